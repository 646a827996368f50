"""Sampled text keeps its law, its seed and its options under speculation: kind SAMP of the known failures."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from eaglecli.engine import draft as draft_module
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.models.draft_loader import LoadedDraft
from eaglecli.models.loader import LoadedTarget
from tests.engine.harness import (
    LoadedPair,
    Triple,
    accept_length,
    load_engine_pair,
    make_engine,
    mixed_requests,
    oracle_plain,
    outcomes,
    random_prompt,
    random_prompts,
    requests_of,
    run,
    texts,
)
from tests.fixtures import Weights, change_checkpoint, llama_config, write_eagle_draft, write_target

# ---- B31: the law of the output ------------------------------------------------------------------------------------

NUM_TOKENS = 8
NUM_SAMPLES = 3000


def transition_law(seed: int) -> np.ndarray:
    """[8, 8]: probability of the next token (column) after a token (row), none below 0.04."""
    random = np.random.default_rng(seed)
    return 0.04 + 0.68 * random.dirichlet(np.full(NUM_TOKENS, 0.7), NUM_TOKENS)


LAW, OTHER_LAW = transition_law(0), transition_law(1)


def head_for(law: np.ndarray, embedding: torch.Tensor) -> torch.Tensor:
    """The head [8, H] by which the stream of a token, its embedding, has the logits log law[token]."""
    return (torch.linalg.pinv(embedding.double()) @ torch.from_numpy(np.log(law))).T.float()


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedTarget, LoadedDraft]:
    """A target of 8 tokens that follows LAW exactly (its layer adds nothing), and a draft that believes in OTHER_LAW."""
    folder: Path = tmp_path_factory.mktemp("eight")
    config = llama_config(64, 1, 4, 2, 64, vocab_size=NUM_TOKENS, eos_token_id=None)
    weights = Weights(3)
    embedding = weights.signs(NUM_TOKENS, 64)
    layer = weights.layer("layers.0", config, scale=0.0)
    target_dir = write_target(folder / "target", config, embedding, head_for(LAW, embedding), layer)
    write_eagle_draft(folder / "shared", config, layer, embedding, torch.eye(64), torch.zeros(64, 64))
    own_head = {"lm_head.weight": head_for(OTHER_LAW, embedding)}
    return load_engine_pair(target_dir, change_checkpoint(folder / "shared", folder / "draft", tensors=own_head))


def p_value(drawn: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of samples (numbers of cells) against exact probabilities."""
    return float(chisquare(np.bincount(drawn, minlength=law.size), law.ravel() * len(drawn)).pvalue)


@pytest.mark.parametrize(
    ("triple", "same_noise"),
    [(None, True), ((2, 1, 3), True), ((2, 2, 4), True), ((2, 4, 9), True), ((2, 1, 3), False), ((2, 4, 9), False)],
    ids=str,
)
def test_tokens_and_pairs_follow_the_exact_law(eight: tuple[LoadedTarget, LoadedDraft], triple: Triple | None, same_noise: bool) -> None:
    """B31: the first token comes from the prefill, the second and third from verify steps with a bad draft."""
    requests = [
        Request(seed, np.array([5], np.int32), SamplingParams(temperature=1.0, seed=seed, max_new_tokens=3)) for seed in range(NUM_SAMPLES)
    ]
    engine = make_engine(*eight, triple, max_running_requests=256, page_size=4, same_noise_drafting=same_noise)
    found = {completion.request.key: completion for completion in engine.generate(requests)}  # `run` would prove the books 3000 times
    tokens = np.array([completion.output_ids for completion in found.values()])
    law_1 = LAW[5]
    law_2 = law_1 @ LAW
    assert p_value(tokens[:, 0], law_1) > 0.001
    assert p_value(tokens[:, 1], law_2) > 0.001
    assert p_value(tokens[:, 2], law_2 @ LAW) > 0.001
    assert p_value(tokens[:, 0] * NUM_TOKENS + tokens[:, 1], law_1[:, None] * LAW) > 0.001
    assert p_value(tokens[:, 1] * NUM_TOKENS + tokens[:, 2], law_2[:, None] * LAW) > 0.001
    if triple:
        assert 1.05 < accept_length(found) < 2.9, "some proposals must be accepted and some refused"


# ---- B33: temperature ----------------------------------------------------------------------------------------------

TRIPLES: list[Triple] = [(3, 1, 4), (3, 2, 6)]


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_200_seeds_give_the_plain_samplers_outputs(twin: LoadedPair, triple: Triple) -> None:
    """B33."""
    requests = [Request(seed, random_prompt(6), SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4)) for seed in range(200)]
    plain = texts(run(make_engine(twin.target, None, max_running_requests=200), requests))
    found = run(make_engine(twin.target, twin.draft, triple, max_running_requests=200), requests)
    assert texts(found) == plain
    assert len({tuple(output_ids) for output_ids, _ in plain.values()}) > 100
    assert all((completion.accept_counts >= 0).all() for completion in found.values())


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_temperature_of_nearly_zero_is_greedy(twin: LoadedPair, triple: Triple) -> None:
    """B33."""
    prompts = random_prompts([4, 7, 11])
    greedy = run(make_engine(twin.target, twin.draft, triple), requests_of(prompts, 20))
    cold = run(make_engine(twin.target, twin.draft, triple), requests_of(prompts, 20, temperature=1e-9, seed=5))
    assert outcomes(cold) == outcomes(greedy)
    assert all((completion.accept_counts >= 0).all() for completion in cold.values())


# ---- B34: seeds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("triple", TRIPLES[1:], ids=str)
def test_seed_gives_the_same_tokens_in_any_company(twin: LoadedPair, triple: Triple) -> None:
    """B34: twice, alone, among 15 others, first and last; another seed or sample number gives something else."""
    request = Request("seed 7", random_prompt(9), SamplingParams(temperature=1.0, seed=7, max_new_tokens=16))
    others = mixed_requests(15, seed=8, max_prompt=30, max_cap=12)

    def tokens(requests: list[Request], key: str = "seed 7") -> list[int]:
        return run(make_engine(twin.target, twin.draft, triple), requests)[key].output_ids.tolist()

    expected = tokens([request])
    assert tokens([request]) == expected
    assert tokens([request, *others]) == expected
    assert tokens([*others, request]) == expected
    assert tokens([*others[:8], dataclasses.replace(request, key="twin row"), *others[8:], request], "twin row") == expected
    assert tokens([dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=8))]) != expected
    assert tokens([dataclasses.replace(request, sample=1)]) != expected


# ---- B36: options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_filter_is_honoured_at_every_token_of_a_step(twin: LoadedPair, triple: Triple, option: dict[str, float]) -> None:
    """B36: equal to plain decoding and to the oracle with the option, and unequal to what comes without it."""
    settings = {"temperature": 1.3, "seed": 3}
    prompts = random_prompts(range(3, 11))
    requests = requests_of(prompts, 16, **settings, **option)
    found = run(make_engine(twin.target, twin.draft, triple), requests)
    plain = run(make_engine(twin.target, None), requests)
    assert texts(found) == texts(plain)
    first = requests[:3]
    assert {request.key: texts(plain)[request.key] for request in first} == oracle_plain(twin, first)
    assert texts(plain) != texts(run(make_engine(twin.target, None), requests_of(prompts, 16, **settings)))
    assert accept_length(found) > 1.5


# ---- drafting with the noise that the target will use --------------------------------------------------------------


@pytest.mark.parametrize("triple", [(4, 1, 5), (3, 3, 8)], ids=str)
def test_drafting_with_the_targets_noise_accepts_more_and_writes_the_same(twin: LoadedPair, triple: Triple) -> None:
    requests = [Request(seed, random_prompt(8, seed), SamplingParams(temperature=1.0, seed=seed, max_new_tokens=32)) for seed in range(24)]
    with_noise = run(make_engine(twin.target, twin.draft, triple), requests)
    without = run(make_engine(twin.target, twin.draft, triple, same_noise_drafting=False), requests)
    assert texts(with_noise) == texts(without)
    assert accept_length(with_noise) > accept_length(without) + 0.3, (accept_length(with_noise), accept_length(without))


def ranked_without_noise(propose: Callable) -> Callable:
    """`draft_topk` that proposes the same children with the log-softmax of the logits alone as their log q. Draft ids = target ids."""

    def rank(logits, k, sampling, position, token_map, num_valid, into_rows=None):
        assert token_map is None
        out = propose(logits, k, sampling, position, token_map, num_valid, into_rows)
        rows = slice(None) if into_rows is None else sampling.row_of_logits
        out.log_q[rows] = logits[:, :num_valid].float().log_softmax(1).gather(1, out.token[rows])
        return out

    return rank


@pytest.mark.parametrize(("triple", "gain"), [((3, 2, 7), 0.4), ((4, 1, 5), 0.0)], ids=["tree", "chain"])
def test_ranking_a_tree_with_the_noise_accepts_more(twin: LoadedPair, triple: Triple, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: the tree 3.64 with the noise, 2.91 without; a chain has nothing to rank."""
    requests = [Request(seed, random_prompt(8, seed), SamplingParams(temperature=1.0, seed=seed, max_new_tokens=32)) for seed in range(24)]
    with_noise = run(make_engine(twin.target, twin.draft, triple), requests)
    monkeypatch.setattr(draft_module, "draft_topk", ranked_without_noise(draft_module.draft_topk))
    without = run(make_engine(twin.target, twin.draft, triple), requests)
    assert texts(with_noise) == texts(without)
    assert (outcomes(with_noise) == outcomes(without)) == (gain == 0)
    assert accept_length(with_noise) >= accept_length(without) + gain, (accept_length(with_noise), accept_length(without))
