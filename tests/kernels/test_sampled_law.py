"""The law of sampled text: of one choice, and of a whole draft-choose-walk iteration, against exact probabilities.

Target and draft are tables: the next token's logits depend on the last one (and on the depth), so every law is known.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from eaglecli.kernels.accept_path import AcceptedPath, accept_path_reference
from eaglecli.kernels.build_tree import DraftTree, empty_tree, expand_beams, select_nodes, start_beams
from eaglecli.kernels.choose_tokens import SamplingTensors, choose_tokens
from eaglecli.kernels.draft_topk import draft_topk
from tests.kernels.sampling_rows import DEVICE, exact_law, many_samples

NUM_SAMPLES = 20_000
LEAST_P = 1e-4  # fixed seeds: a pass is a pass for ever
ROOT_POSITION = 30
FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05}]


def positions(depth: int, count: int = NUM_SAMPLES) -> torch.Tensor:
    return torch.full((count,), ROOT_POSITION + depth, dtype=torch.int32, device=DEVICE)


def assert_follows(tokens: np.ndarray, law: np.ndarray) -> None:
    """Chi-square of counts; tokens of little probability are put together, those of none must not occur."""
    counts, expected = np.bincount(tokens, minlength=len(law)), law * len(tokens)
    assert counts[law == 0].sum() == 0
    rare = expected < 10
    groups = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 0:
        groups.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    counts, expected = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    if len(counts) > 1:
        assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > LEAST_P


def draw(logits: np.ndarray, rows_at_once: int, **setting: float) -> np.ndarray:
    """NUM_SAMPLES choices from one row of logits, which differ in the sample number alone."""
    chosen = []
    for first in range(0, NUM_SAMPLES, rows_at_once):
        rows = torch.from_numpy(logits).float().to(DEVICE).repeat(rows_at_once, 1)
        chosen.append(choose_tokens(rows, many_samples(rows_at_once, **setting, first=first), positions(1, rows_at_once)))
    return torch.cat(chosen).cpu().numpy()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("filters", FILTERS)
def test_choices_among_8_tokens_follow_the_exact_law(temperature: float, filters: dict[str, float]) -> None:
    logits = np.random.default_rng(3).normal(size=8).round(3)
    assert_follows(draw(logits, NUM_SAMPLES, temperature=temperature, **filters), exact_law(logits, temperature, **filters))


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        (1.0, {}),
        pytest.param(0.3, {}, marks=pytest.mark.slow),
        pytest.param(1.7, {}, marks=pytest.mark.slow),
        *(pytest.param(1.0, filters, marks=pytest.mark.slow) for filters in ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02})),
    ],
)
def test_choices_among_4096_tokens_follow_the_exact_law(temperature: float, filters: dict[str, float]) -> None:
    logits = 2 * np.random.default_rng(4).normal(size=4096).round(3)
    assert_follows(draw(logits, 1000, temperature=temperature, **filters), exact_law(logits, temperature, **filters))


class Tables:
    """Logits [8, 8] of each depth by the last token; depth 0 has one row only, that of the root."""

    def __init__(self, seed: int, like: "Tables | None" = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = [torch.randn(8, 8, generator=generator).to(DEVICE) for _ in range(4)]
        if like is not None:
            self.logits = [0.7 * theirs + 0.5 * ours for theirs, ours in zip(like.logits, self.logits, strict=True)]

    def at(self, depth: torch.Tensor | int, token: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.logits)[depth, torch.where(torch.as_tensor(depth, device=DEVICE) == 0, 0, token)]


TARGET = Tables(1)
DRAFT = Tables(2, like=TARGET)


def grow_tree(sampling: SamplingTensors, topk: int, num_steps: int, num_nodes: int) -> DraftTree:
    root = torch.zeros(NUM_SAMPLES, dtype=torch.int64, device=DEVICE)
    first = draft_topk(DRAFT.at(0, root), topk, sampling, positions(1), None, 8)
    pool, beams = start_beams(sampling.rows, first, num_steps)
    for level in range(1, num_steps):
        logits = DRAFT.at(level, beams.token.flatten())
        children = draft_topk(logits, topk, replace(sampling, repeats=topk), positions(level + 1, NUM_SAMPLES * topk), None, 8)
        beams = expand_beams(level, beams, children, pool)
    tree = empty_tree(NUM_SAMPLES, num_nodes, root.device)
    select_nodes(pool, sampling.rows, root, tree)
    return tree


def iterate(temperature: float, topk: int, num_steps: int, num_nodes: int, same_noise: bool, **filters: float) -> AcceptedPath:
    """One iteration of NUM_SAMPLES copies: draft, choose at every node, walk."""
    sampling = many_samples(NUM_SAMPLES, temperature, **filters)
    tree = grow_tree(sampling if same_noise else many_samples(NUM_SAMPLES, 0.0), topk, num_steps, num_nodes)
    depth = tree.depths.long()
    logits = TARGET.at(depth, tree.tokens).flatten(0, 1)
    chosen = choose_tokens(logits, replace(sampling, repeats=num_nodes), (ROOT_POSITION + 1 + tree.depths).flatten()).view_as(tree.tokens)
    return accept_path_reference(tree.tokens, tree.parents, chosen, torch.ones_like(tree.tokens, dtype=torch.bool), num_steps)


def decode_plainly(temperature: float, num_tokens: int, **filters: float) -> torch.Tensor:
    """int64 [NUM_SAMPLES, num_tokens]: one choice after another, without a draft."""
    sampling = many_samples(NUM_SAMPLES, temperature, **filters)
    tokens = [torch.zeros(NUM_SAMPLES, dtype=torch.int64, device=DEVICE)]
    for depth in range(num_tokens):
        tokens.append(choose_tokens(TARGET.at(depth, tokens[-1]), sampling, positions(depth + 1)))
    return torch.stack(tokens[1:], 1)


SHAPES = pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 3, 4), (2, 2, 5), (3, 3, 9)], ids=["chain", "small tree", "tree"])


@SHAPES
@pytest.mark.parametrize("same_noise", [False, True])
@pytest.mark.parametrize(
    ("temperature", "filters"), [(0.3, {}), (1.0, {}), (1.7, {"top_k": 6}), (1.0, {"top_p": 0.8}), (1.0, {"min_p": 0.1})]
)
def test_an_iteration_emits_what_plain_decoding_would(topk, num_steps, num_nodes, same_noise, temperature, filters) -> None:
    out = iterate(temperature, topk, num_steps, num_nodes, same_noise, **filters)
    plain = decode_plainly(temperature, num_steps + 1, **filters)
    emitted = torch.arange(num_steps + 1, device=DEVICE) <= out.num_accepted[:, None]
    assert torch.equal(out.tokens, torch.where(emitted, plain, 0))
    assert out.num_accepted.float().mean() > 0.1  # the walk was put to the test


@SHAPES
@pytest.mark.parametrize("same_noise", [False, True])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_the_first_two_tokens_follow_the_exact_joint_law(topk, num_steps, num_nodes, same_noise, temperature) -> None:
    out = iterate(temperature, topk, num_steps, num_nodes, same_noise)
    first = out.tokens[:, 0]
    # A row that accepted nothing gets its second token from the next iteration.
    next_choice = choose_tokens(TARGET.at(1, first), many_samples(NUM_SAMPLES, temperature), positions(2))
    second = torch.where(out.num_accepted > 0, out.tokens[:, 1], next_choice)
    laws = [exact_law(row.cpu().numpy(), temperature) for row in (TARGET.logits[0][0], *TARGET.logits[1])]
    joint = laws[0][:, None] * np.stack(laws[1:])
    assert_follows((first * 8 + second).cpu().numpy(), joint.flatten())


@SHAPES
def test_drafting_with_the_same_noise_accepts_more(topk, num_steps, num_nodes) -> None:
    same, none = (iterate(1.0, topk, num_steps, num_nodes, same_noise).num_accepted.float().mean() for same_noise in (True, False))
    assert same > none + 0.1


def test_the_chi_square_sees_a_wrong_law() -> None:
    logits = np.random.default_rng(3).normal(size=8).round(3)
    with pytest.raises(AssertionError):
        assert_follows(draw(logits, NUM_SAMPLES, temperature=1.0), exact_law(logits, 1.1))
