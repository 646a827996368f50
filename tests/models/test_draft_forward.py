"""Drafts of every kind against the published formulas in float64, with fused features and with fed-back states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget
from tests.fixtures import VOCAB_SIZE, Tensors, Weights, write_checkpoint
from tests.models.draft_cases import (
    CONTEXT,
    HIDDEN,
    as_midlayer,
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    load_small_target,
    random_layer,
    random_norm,
    random_pairs,
    run_draft,
)
from tests.models.plain_draft import PlainDraft

TOLERANCE = 1e-4  # of the largest value, float32 against float64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_small_target(tmp_path_factory.mktemp("target"))


def load(folder: Path, target: LoadedTarget, config: Mapping[str, Any], tensors: Tensors, **options: Any) -> LoadedDraft:
    write_checkpoint(folder / "draft", config, tensors)
    return load_draft(folder / "draft", target, torch.float32, "cpu", CONTEXT, **options)


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() <= TOLERANCE * reference.abs().max()


def biases(weights: Weights, parts: str = "qkv", layer: str = "layers.0") -> Tensors:
    sizes = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2, "o": HIDDEN}
    return {f"{layer}.self_attn.{part}_proj.bias": 3 * weights.matrix(1, sizes[part])[0] for part in parts}


def eagle_extras() -> dict[str, tuple[dict[str, Any], Tensors]]:
    """Optional parts of EAGLE-1/2 drafts: config keys and tensors to add."""
    weights = Weights(9)
    second_layer = random_layer(weights, eagle_config(), 1)
    return {
        "plain": ({}, {}),
        "fc bias": ({"bias": True}, {"fc.bias": 3 * weights.matrix(1, HIDDEN)[0]}),
        "qkv bias": ({"qkv_bias": True}, biases(weights)),
        "four attention biases": ({"attention_bias": True}, biases(weights, "qkvo")),
        "hass norms": (
            {"add_para_norm": True},
            {"embedding_layernorm.weight": random_norm(weights, HIDDEN), "hidden_states_layernorm.weight": random_norm(weights, HIDDEN)},
        ),
        "norm before the head": ({}, {"pre_lm_head_layernorm.weight": random_norm(weights, HIDDEN)}),
        "input norm": ({}, {"layers.0.input_layernorm.weight": random_norm(weights, HIDDEN)}),
        "two layers": ({}, second_layer),
        "own head": ({}, {"lm_head.weight": weights.matrix(VOCAB_SIZE, HIDDEN, 4.0)}),
        "own embedding": ({}, {"embed_tokens.weight": weights.matrix(VOCAB_SIZE, HIDDEN, 4.0)}),
        "other rotary base": ({"rope_theta": 100.0}, {}),
    }


@pytest.mark.parametrize("name", eagle_extras())
def test_eagle_draft_computes_the_published_formula(name: str, target: LoadedTarget, tmp_path: Path) -> None:
    extra_config, extra_tensors = eagle_extras()[name]
    config = eagle_config() | extra_config
    tensors = eagle_tensors(config) | extra_tensors
    draft = load(tmp_path, target, config, tensors)
    embedding = tensors.get("embed_tokens.weight", target.model.embed_weight)
    plain = PlainDraft(config, tensors, embedding, tensors.get("lm_head.weight", target.model.head_weight))
    token_ids, features = random_pairs(HIDDEN)
    feedback, logits = run_draft(draft, token_ids, draft.model.fuse(features))
    expected_feedback, expected_logits = plain.eagle(token_ids, features)
    assert_close(feedback, expected_feedback)
    assert_close(logits, expected_logits)


def eagle3_extras() -> dict[str, tuple[dict[str, Any], Tensors]]:
    """Optional parts of EAGLE-3 drafts: config keys and tensors to add."""
    weights = Weights(8)
    three_norms = {f"fc_norm.{index}.weight": random_norm(weights, HIDDEN) for index in range(3)}
    qk_norms = {f"layers.0.self_attn.{part}_norm.weight": random_norm(weights, 8) for part in "qk"}
    return {
        "plain": ({}, {}),
        "own embedding": ({}, {"embed_tokens.weight": weights.matrix(VOCAB_SIZE, HIDDEN, 4.0)}),
        "fc bias": ({"bias": True}, {"fc.bias": 3 * weights.matrix(1, HIDDEN)[0]}),
        "qkv bias": ({"attention_bias": True}, biases(weights)),
        "norm before residual": ({"norm_before_residual": True}, {}),
        "norm before fc": ({"norm_before_fc": True}, {"input_norm.weight": random_norm(weights, 3 * HIDDEN)}),
        "norm per state": ({"fc_norm": True}, three_norms),
        "norm output": ({"norm_output": True}, {}),
        "q and k norms": ({}, qk_norms),
        "three layers": ({}, random_layer(weights, eagle3_config(), 1) | random_layer(weights, eagle3_config(), 2)),
    }


@pytest.mark.parametrize("name", eagle3_extras())
def test_eagle3_draft_computes_the_published_formula(name: str, target: LoadedTarget, tmp_path: Path) -> None:
    extra_config, extra_tensors = eagle3_extras()[name]
    config = eagle3_config() | extra_config
    check_eagle3(tmp_path, target, config, eagle3_tensors(config) | extra_tensors)


def check_eagle3(folder: Path, target: LoadedTarget, config: Mapping[str, Any], tensors: Tensors) -> LoadedDraft:
    """Compare the first pass over target features and one more step over fed-back states."""
    draft = load(folder, target, config, as_midlayer(tensors) if "layers.1.mlp.gate_proj.weight" not in tensors else tensors)
    embedding = tensors.get("embed_tokens.weight", target.model.embed_weight)
    plain = PlainDraft(config, tensors, embedding, tensors.get("lm_head.weight", target.model.head_weight))
    token_ids, features = random_pairs(tensors["fc.weight"].shape[1] if "fc.weight" in tensors else HIDDEN)
    hidden, expected_hidden = draft.model.fuse(features), plain.fuse(features)
    assert_close(hidden, expected_hidden)
    for _ in range(2):
        hidden, logits = run_draft(draft, token_ids, hidden)
        expected_hidden, expected_logits = plain.eagle3(token_ids, expected_hidden)
        assert_close(hidden, expected_hidden)
        assert_close(logits, expected_logits)
    return draft


@pytest.mark.parametrize("num_states", [1, 2, 4])
def test_number_of_fused_states_is_read_from_fc(num_states: int, target: LoadedTarget, tmp_path: Path) -> None:
    config = eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": list(range(1, 1 + num_states))})
    draft = check_eagle3(tmp_path, target, config, eagle3_tensors(config, num_states=num_states))
    assert draft.model.tap_boundaries == tuple(range(2, 2 + num_states))


def test_eagle3_draft_without_fc_takes_the_final_hidden_state(target: LoadedTarget, tmp_path: Path) -> None:
    config = eagle3_config(eagle_config={"use_aux_hidden_state": False})
    tensors = eagle3_tensors(config)
    del tensors["fc.weight"]
    assert check_eagle3(tmp_path, target, config, tensors).model.tap_boundaries == ()


def test_head_size_may_differ_from_hidden_size_over_heads(target: LoadedTarget, tmp_path: Path) -> None:
    config = eagle3_config() | {"head_dim": 16}
    check_eagle3(tmp_path, target, config, eagle3_tensors(config))


def test_draft_may_be_wider_than_its_target(target: LoadedTarget, tmp_path: Path) -> None:
    config = eagle3_config(target_hidden_size=HIDDEN) | {"hidden_size": 48, "head_dim": 12}
    tensors = eagle3_tensors(config) | {"embed_tokens.weight": Weights(5).matrix(VOCAB_SIZE, 48, 4.0)}
    assert check_eagle3(tmp_path, target, config, tensors).model.hidden_size == 48


def test_fc_is_applied_on_request_only_even_when_widths_agree(target: LoadedTarget, tmp_path: Path) -> None:
    """One fused state of the draft's own width: a rule by width would take feedback for features."""
    config = eagle3_config(eagle_aux_hidden_state_layer_ids=[8])
    draft = check_eagle3(tmp_path, target, config, eagle3_tensors(config, num_states=1))
    features = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(draft.model.fuse(features), features)


def test_speculators_draft_sees_its_sliding_window_only(target: LoadedTarget, tmp_path: Path) -> None:
    config = eagle3_config()
    tensors = eagle3_tensors(config)
    outer = {"speculators_model_type": "eagle3", "draft_vocab_size": 64, "norm_before_residual": False}
    layer = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
    nested = layer | {"sliding_window": 4, "layer_types": ["sliding_attention"]}
    draft = load(tmp_path, target, outer | {"transformer_layer_config": nested}, tensors)
    plain = PlainDraft(config | {"sliding_window": 4}, tensors, target.model.embed_weight, tensors["lm_head.weight"])
    token_ids, features = random_pairs(3 * HIDDEN)
    feedback, _ = run_draft(draft, token_ids, draft.model.fuse(features))
    assert_close(feedback, plain.eagle3(token_ids, plain.fuse(features))[0])
