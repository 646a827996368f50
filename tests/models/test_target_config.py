"""What is read from config.json and generation_config.json, and what is refused by name."""

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from eaglecli.errors import ModelError
from eaglecli.models.config import TargetConfig, read_target_config

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(architecture: str = "LlamaForCausalLM", generation: dict[str, Any] | None = None, **changes: Any) -> TargetConfig:
    config = {key: value for key, value in (SIZES | changes).items() if value != "absent"}
    return read_target_config(config | {"architectures": [architecture]}, generation)


@pytest.mark.parametrize(
    ("architecture", "reference"),
    [("Llama", LlamaConfig), ("Mistral", MistralConfig), ("Qwen2", Qwen2Config), ("Qwen3", Qwen3Config)],
)
def test_absent_keys_mean_what_transformers_assumes(architecture: str, reference: type) -> None:
    sizes = {"num_attention_heads": 32, "hidden_size": 64}
    expected = reference(**{key: value for key, value in (SIZES | sizes).items() if key != "num_key_value_heads"})
    found = read(f"{architecture}ForCausalLM", num_key_value_heads="absent", **sizes)
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.head_dim == getattr(expected, "head_dim", 64 // 32)
    assert found.max_position_embeddings == expected.max_position_embeddings
    assert found.layer.rms_norm_eps == expected.rms_norm_eps
    assert found.tie_word_embeddings == expected.tie_word_embeddings
    assert found.rope.theta == expected.rope_parameters["rope_theta"]
    assert found.eos_token_ids == (() if expected.eos_token_id is None else (expected.eos_token_id,))
    window = expected.sliding_window if architecture == "Mistral" else None
    assert found.windows == (window,) * 4


def test_null_key_value_heads_mean_one_per_attention_head() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 5}, (None, None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 5, "use_sliding_window": False}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 5, "use_sliding_window": True}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 5)),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (5, None, 5, None),
        ),
    ],
)
def test_sliding_windows_by_layer(architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert read(architecture, **changes).windows == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (True, True, True, False)),
        ("MistralForCausalLM", (False, False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False, False)),
        ("Qwen3ForCausalLM", (True, True, False, True)),
    ],
)
def test_bias_flags_count_only_for_families_that_know_them(architecture: str, expected: tuple[bool, ...]) -> None:
    layer = read(architecture, attention_bias=True, mlp_bias=True).layer
    assert (layer.qkv_bias, layer.o_bias, layer.mlp_bias, layer.qk_norm) == expected


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [9, 7]}, (7, 9)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {}, ()),
        (0, {}, (0,)),
    ],
)
def test_end_of_text_ids_of_both_files(in_config: Any, in_generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert read(generation=in_generation, eos_token_id=in_config).eos_token_ids == expected


def test_model_type_serves_where_no_architecture_is_named() -> None:
    assert read_target_config(SIZES | {"model_type": "qwen3"}).family == "qwen3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"type": "mystery", "factor": 2.0}}, "'mystery'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "absent"}, "'hidden_size'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers'"),
        ({"vocab_size": "twenty"}, "'vocab_size'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_what_cannot_be_honoured_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(**changes)


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "LlamaForSequenceClassification"])
def test_other_architectures_are_named(architecture: str) -> None:
    with pytest.raises(ModelError, match=architecture):
        read(architecture)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False}, "no sliding window"),
    ],
)
def test_layer_types_that_make_no_sense_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read("Qwen2ForCausalLM", **changes)
