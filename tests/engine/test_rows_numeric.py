"""Bad numbers of a draft cost speed only; bad numbers of a target end the request they are in: kind NUM of the known failures."""

import math
from pathlib import Path

import pytest
import torch

from tests.engine.harness import (
    LoadedPair,
    Triple,
    accept_length,
    draft_dir,
    load_engine_pair,
    make_engine,
    random_prompts,
    requests_of,
    run,
    texts,
)
from tests.fixtures import VOCAB_SIZE, change_checkpoint, disjoint_cycles, read_checkpoint

PROMPTS = random_prompts([3, 8, 15, 30])
REQUESTS = requests_of(PROMPTS, 16) + [
    type(request)(key=("sampled", request.key), prompt_ids=request.prompt_ids, sampling=request.sampling)
    for request in requests_of(PROMPTS, 16, temperature=1.0, seed=2)
]
TRIPLES: list[Triple] = [(1, 1, 2), (6, 2, 9)]


@pytest.fixture(scope="module")
def plain(twin: LoadedPair) -> dict[object, tuple[list[int], str]]:
    return texts(run(make_engine(twin.target, None), REQUESTS))


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fc.weight", math.nan),
        ("fc.weight", math.inf),
        ("fc.weight", -math.inf),
        ("layers.0.self_attn.k_proj.weight", math.inf),
        ("embed_tokens.weight", math.nan),
    ],
)
def test_bad_number_in_a_draft_weight_costs_speed_only(
    twin: LoadedPair, plain: dict[object, tuple[list[int], str]], tmp_path: Path, name: str, bad: float, triple: Triple
) -> None:
    """B44."""
    weight = read_checkpoint(draft_dir(twin))[1][name].clone()
    row = int(PROMPTS[0][-1]) if name == "embed_tokens.weight" else 0
    weight[row, 0] = bad
    draft = load_engine_pair(twin.target.path, change_checkpoint(draft_dir(twin), tmp_path, tensors={name: weight}))[1]
    found = run(make_engine(twin.target, draft, triple, graph_sizes=(4, 8)), REQUESTS)
    assert texts(found) == plain
    if name == "fc.weight":
        assert accept_length(found) < 1.2


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_draft_with_equal_logits_costs_speed_only(
    twin: LoadedPair, plain: dict[object, tuple[list[int], str]], tmp_path: Path, triple: Triple
) -> None:
    """B44: ties everywhere."""
    head = {"lm_head.weight": torch.zeros(VOCAB_SIZE, 64)}
    draft = load_engine_pair(twin.target.path, change_checkpoint(draft_dir(twin), tmp_path, tensors=head))[1]
    found = run(make_engine(twin.target, draft, triple), REQUESTS)
    assert texts(found) == plain
    assert accept_length(found) < 1.5


# ---- the target's own numbers --------------------------------------------------------------------------------------

BAD_TOKEN = 13  # in the middle of its cycle: 10 11 12 13 14


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("triple", [None, (1, 1, 2), (5, 1, 6), (4, 2, 8)], ids=str)
def test_non_finite_logits_end_a_request_with_the_tokens_before_them(
    cycle: LoadedPair, tmp_path: Path, triple: Triple | None, bad: float
) -> None:
    """The target has no embedding for token 13: nothing can be chosen after it. Requests on other cycles go on."""
    embedding = read_checkpoint(cycle.target.path)[1]["model.embed_tokens.weight"].clone()
    embedding[BAD_TOKEN] = bad
    target_dir = change_checkpoint(cycle.target.path, tmp_path, tensors={"model.embed_tokens.weight": embedding})
    target, draft = load_engine_pair(target_dir, draft_dir(cycle))
    prompts = [[0, 1], [10], [20], [11, 12], [13], [14], [30, 31, 32]]
    expected = {1: [11, 12, 13], 3: [13], 4: [], 5: [10, 11, 12, 13]}
    found = run(make_engine(target, draft, triple), requests_of(prompts, 12))
    for key, prompt in enumerate(prompts):
        output_ids, reason = texts(found)[key]
        if key in expected:
            assert (output_ids, reason) == (expected[key], "error")
            assert found[key].error is not None and str(len(output_ids)) in found[key].error
        else:
            members = disjoint_cycles()[prompt[0] // 5]
            assert (output_ids, reason) == ([members[(len(prompt) + index) % 5] for index in range(12)], "length")


@pytest.mark.parametrize("triple", [(3, 1, 4), (3, 2, 6)], ids=str)
def test_proposed_token_with_bad_numbers_does_not_spoil_its_relatives(twin: LoadedPair, tmp_path: Path, triple: Triple) -> None:
    """Tokens that the target itself never chooses, and whose embedding is not finite, stand in the tree and are refused."""
    clean = texts(run(make_engine(twin.target, None), REQUESTS))
    used = {token for output_ids, _ in clean.values() for token in output_ids} | {int(token) for prompt in PROMPTS for token in prompt}
    unused = [token for token in range(VOCAB_SIZE) if token not in used]
    embedding = read_checkpoint(twin.target.path)[1]["model.embed_tokens.weight"].clone()
    embedding[unused] = math.nan
    target_dir = change_checkpoint(twin.target.path, tmp_path / "target", tensors={"model.embed_tokens.weight": embedding})
    head = read_checkpoint(twin.target.path)[1]["lm_head.weight"].clone()
    head[unused] *= 3.0
    draft_path = change_checkpoint(draft_dir(twin), tmp_path / "draft", tensors={"lm_head.weight": head})
    found = run(make_engine(*load_engine_pair(target_dir, draft_path), triple), REQUESTS)
    assert texts(found) == clean
