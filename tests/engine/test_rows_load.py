"""What is in the draft's files reaches the proposals: accept lists of kinds LOAD and CONF of the known failures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eaglecli.errors import ModelError
from tests.engine.harness import (
    LoadedPair,
    Triple,
    accept_lists,
    draft_dir,
    load_engine_pair,
    load_pair,
    make_engine,
    oracle_eagle,
    outcomes,
    random_prompt,
    random_prompts,
    requests_of,
    run,
    run_watched,
    texts,
)
from tests.fixtures import VOCAB_SIZE, Pair, Weights, change_checkpoint, read_checkpoint, scattered_ids, write_twin

REQUESTS = requests_of(random_prompts([5, 9, 14, 23, 1, 12]), 20)
TRIPLES: list[Triple] = [(4, 1, 5), (3, 2, 7)]
NO_TABLES = {"d2t": None, "t2d": None}


def accepted(target_dir: Path, draft_path: Path, triple: Triple) -> dict[object, list[int]]:
    target, draft = load_engine_pair(target_dir, draft_path)
    return accept_lists(run(make_engine(target, draft, triple), REQUESTS))


def proposals(pair_dirs: Sequence[Path], triple: Triple) -> tuple[dict[object, tuple[list[int], str, list[int]]], set[int]]:
    """Outcomes of REQUESTS, and every token that stood in a tree."""
    proposed: set[int] = set()
    engine = make_engine(*load_engine_pair(*pair_dirs), triple)
    found = run_watched(engine, REQUESTS, lambda running: proposed.update(running._iteration.buffers.tree.tokens.flatten().tolist()))
    return outcomes(found), proposed


# ---- B01, B10: vocabulary ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_offset_table_proposes_what_the_same_head_over_all_ids_proposes(e3: LoadedPair, tmp_path: Path, triple: Triple) -> None:
    """B01: rows of ids outside the draft vocabulary are zero in the full head, so that they are never the best."""
    head = torch.zeros(VOCAB_SIZE, 64)
    head[scattered_ids(64)] = read_checkpoint(draft_dir(e3))[1]["lm_head.weight"]
    config = {"draft_vocab_size": VOCAB_SIZE}
    change_checkpoint(draft_dir(e3), tmp_path, config, {"lm_head.weight": head, **NO_TABLES})
    short, proposed = proposals((e3.target.path, draft_dir(e3)), triple)
    expanded, _ = proposals((e3.target.path, tmp_path), triple)
    assert short == expanded
    known = set(scattered_ids(64).tolist()) | {token for output_ids, *_ in short.values() for token in output_ids} | {0}
    assert proposed <= known
    assert sum(sum(accept_counts) for *_, accept_counts in short.values()) > 10


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_rows_that_pad_the_head_are_never_proposed(twin: LoadedPair, tmp_path: Path, triple: Triple) -> None:
    """B10: 64 padding rows whose scores would often be the best."""
    head = read_checkpoint(twin.target.path)[1]["lm_head.weight"]
    padding = Weights(9).matrix(64, 64, 40.0)
    embedding = read_checkpoint(draft_dir(twin))[1]["embed_tokens.weight"]
    padded = {"lm_head.weight": torch.cat((head, padding)), "embed_tokens.weight": torch.cat((embedding, padding))}
    change_checkpoint(draft_dir(twin), tmp_path, {"vocab_size": 384}, padded)
    found, proposed = proposals((twin.target.path, tmp_path), triple)
    assert max(proposed) < VOCAB_SIZE
    assert found == outcomes(run(make_engine(twin.target, twin.draft, triple), REQUESTS))
    assert {key: outcome[:2] for key, outcome in found.items()} == texts(run(make_engine(twin.target, None), REQUESTS))


# ---- B04: whose head -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def e3_dirs(request: pytest.FixtureRequest, e3: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """E3 with a target that has its own head, and with one whose head is its embedding."""
    if not request.param:
        return Pair(e3.target.path, draft_dir(e3))
    folder = tmp_path_factory.mktemp("tied")
    embedding = read_checkpoint(e3.target.path)[1]["model.embed_tokens.weight"]
    target_dir = change_checkpoint(e3.target.path, folder / "target", {"tie_word_embeddings": True}, {"lm_head.weight": None})
    head = {"lm_head.weight": embedding[scattered_ids(64)]}
    return Pair(target_dir, change_checkpoint(draft_dir(e3), folder / "draft", tensors=head))


def target_head(target_dir: Path) -> torch.Tensor:
    tensors = read_checkpoint(target_dir)[1]
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("triple", TRIPLES[1:], ids=str)
def test_head_is_the_drafts_own_or_the_targets_but_never_random(e3_dirs: Pair, tmp_path: Path, triple: Triple) -> None:
    """B04: four drafts."""
    target_dir, own = e3_dirs
    tied = change_checkpoint(own, tmp_path / "tied", {"tie_word_embeddings": True})
    assert accepted(target_dir, tied, triple) == accepted(target_dir, own, triple)

    full = {"draft_vocab_size": VOCAB_SIZE}
    borrowed = change_checkpoint(own, tmp_path / "borrowed", full, {"lm_head.weight": None, **NO_TABLES})
    copied = change_checkpoint(own, tmp_path / "copied", full, {"lm_head.weight": target_head(target_dir), **NO_TABLES})
    lists = accepted(target_dir, borrowed, triple)
    assert lists == accepted(target_dir, copied, triple)
    assert sum(map(sum, lists.values())) > 10

    headless = change_checkpoint(own, tmp_path / "headless", tensors={"lm_head.weight": None})
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_engine_pair(target_dir, headless)


# ---- B06: biases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_attention_bias", [False, True], ids=["qkv", "qkv bias"])
@pytest.mark.parametrize("has_fusion_bias", [False, True], ids=["fc", "fc bias"])
@pytest.mark.parametrize("says_so", [False, True], ids=["config silent", "config says"])
def test_biases_of_the_file_are_used(
    twin: LoadedPair, tmp_path: Path, has_attention_bias: bool, has_fusion_bias: bool, says_so: bool
) -> None:
    """B06: large biases, accept lists of the oracle."""
    weights, tensors = Weights(4), {}
    if has_fusion_bias:
        tensors["fc.bias"] = weights.matrix(1, 64, 8.0)[0]
    if has_attention_bias:
        tensors |= {
            f"layers.0.self_attn.{part}_proj.bias": weights.matrix(1, size, 8.0)[0] for part, size in (("q", 64), ("k", 32), ("v", 32))
        }
    flags = {"bias": has_fusion_bias, "attention_bias": has_attention_bias} if says_so else {"bias": None, "attention_bias": None}
    biased = load_pair(Pair(twin.target.path, change_checkpoint(draft_dir(twin), tmp_path, flags, tensors)))
    requests = requests_of(random_prompts([3, 6, 10, 12], seed=40), 16)
    found = accept_lists(run(make_engine(biased.target, biased.draft, (3, 1, 4)), requests))
    assert found == {key: result.accept_counts for key, result in oracle_eagle(biased, requests, (3, 1, 4)).items()}
    unbiased = accept_lists(run(make_engine(twin.target, twin.draft, (3, 1, 4)), requests))
    assert (found == unbiased) == (not tensors)
    assert any(map(sum, found.values())), "a draft that is never right shows nothing"


# ---- B13: rotary ---------------------------------------------------------------------------------------------------

SCALED = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SPELLINGS: dict[str, dict[str, Any]] = {
    "type": {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALED}},
    "rope_type": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALED}},
    "rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALED}},
}
LOST: dict[str, dict[str, Any]] = {"base lost": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **SCALED}}}


@pytest.fixture(scope="module")
def lists_by_spelling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[object, list[int]]]:
    requests = requests_of([random_prompt(16, 1), random_prompt(1500, 2)], 40)
    lists = {}
    for name, spelling in (SPELLINGS | LOST).items():
        pair = write_twin(tmp_path_factory.mktemp("rotary"), rotary=SPELLINGS["type"], draft_rotary=spelling)
        lists[name] = accept_lists(run(make_engine(*load_engine_pair(*pair), (4, 1, 5)), requests))
    return lists


@pytest.mark.parametrize("prompt", [0, 1], ids=["16 tokens", "1500 tokens"])
def test_rotary_settings_mean_the_same_in_all_spellings(lists_by_spelling: dict[str, dict[object, list[int]]], prompt: int) -> None:
    """B13: and a lost base would be seen."""
    lists = {name: tuple(found[prompt]) for name, found in lists_by_spelling.items()}
    assert len({lists[name] for name in SPELLINGS}) == 1
    assert np.mean(lists["type"]) > 1
    assert lists["base lost"] != lists["type"]
