"""Rotary tables against transformers, the spellings of their settings, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eaglecli.errors import ModelError
from eaglecli.models.rope import read_rope_config, rope_tables

HEAD_DIM = 16
MAX_POSITION = 512
SHORT = [1.0 + 0.1 * index for index in range(HEAD_DIM // 2)]
LONG = [2.0 + 0.3 * index for index in range(HEAD_DIM // 2)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.4, "mscale_all_dim": 0.6, "original_max_position_embeddings": 128},
    "yarn attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, "original_max_position_embeddings": 128},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 128},
    "longrope factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 16.0,
        "original_max_position_embeddings": 128,
    },
}


def read(config: dict[str, Any]) -> Any:
    return read_rope_config(config, HEAD_DIM, MAX_POSITION)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_tables_equal_transformers(kind: str, theta: float) -> None:
    parameters = KINDS[kind] | {"rope_theta": theta}
    length = 128 if parameters["rope_type"] == "longrope" else MAX_POSITION
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=MAX_POSITION, rope_parameters=dict(parameters))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    tables = rope_tables(read({"rope_parameters": parameters}), length, "cpu")
    assert tables.cos.shape == (length, HEAD_DIM // 2)
    # angles reach 512 radians: one float32 rounding of the angle is 3e-5
    torch.testing.assert_close(tables.cos, cos[0, :, : HEAD_DIM // 2], rtol=0, atol=1e-4)
    torch.testing.assert_close(tables.sin, sin[0, :, : HEAD_DIM // 2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_spelling_reads_alike(kind: str) -> None:
    inside = {"rope_parameters": KINDS[kind] | {"rope_theta": 5000.0}}
    outside = {"rope_theta": 5000.0, "rope_scaling": KINDS[kind]}
    old = {key: value for key, value in KINDS[kind].items() if key != "rope_type"} | {"type": KINDS[kind]["rope_type"]}
    assert read(inside) == read(outside) == read({"rope_theta": 5000.0, "rope_scaling": old})


def test_without_settings_the_base_is_ten_thousand() -> None:
    rope = read({})
    assert (rope.kind, rope.theta) == ("default", 10_000.0)
    assert read({"rope_scaling": None, "rope_theta": 77.0}).theta == 77.0


def test_original_length_beside_the_rotary_settings_wins() -> None:
    assert read({"rope_parameters": KINDS["yarn"], "original_max_position_embeddings": 64}).original_context == 64


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"type": "su"}}, "'su'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": KINDS["longrope"] | {"short_factor": [1.0]}}, "'short_factor'"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(config)


def test_odd_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="odd head size"):
        read_rope_config({}, 15, MAX_POSITION)


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", MAX_POSITION), ("longrope", 128)])
def test_kinds_that_depend_on_the_length_are_refused_past_it(kind: str, limit: int) -> None:
    rope = read({"rope_parameters": KINDS[kind]})
    rope_tables(rope, limit, "cpu")
    with pytest.raises(ModelError, match=str(limit)) as caught:
        rope_tables(rope, limit + 1, "cpu")
    assert f"--context-length {limit}" in caught.value.hint
