"""GGUF files written by the `gguf` package: config, names, interleaved heads, quantized blocks, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from eaglecli.errors import ModelError
from eaglecli.models.checkpoint import read_tensor_headers
from eaglecli.models.loader import load_target

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 40
LAYER_PARTS = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to llama query and key rows: row i and i + hd/2 of a head become neighbours."""
    rows = [head * HEAD_DIM + half * HEAD_DIM // 2 + i for head in range(heads) for i in range(HEAD_DIM // 2) for half in (0, 1)]
    return weight[rows]


def write_gguf(
    path: Path, quantization: GGMLQuantizationType, extra_tensor: str = "", architecture: str = "llama"
) -> dict[str, np.ndarray]:
    """A one-layer model; returns its weights by Hugging Face name, as the quantization leaves them."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    add_metadata(writer)
    expected: dict[str, np.ndarray] = {}

    def add(gguf_name: str, hugging_face_name: str, shape: tuple[int, ...]) -> None:
        weight = rng.standard_normal(shape, dtype=np.float32)
        kind = quantization if len(shape) == 2 else GGMLQuantizationType.F32
        stored = quantize(weight, kind)
        expected[hugging_face_name] = dequantize(stored, kind)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(gguf_name.split(".")[-2]) if architecture == "llama" else None
        plain = kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
        writer.add_tensor(gguf_name, interleaved(stored, heads) if heads else stored, raw_dtype=None if plain else kind)

    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    for gguf_part, (part, shape) in LAYER_PARTS.items():
        add(f"blk.0.{gguf_part}.weight", f"model.layers.0.{part}.weight", shape)
        if architecture == "qwen2" and part[-6:] in ("q_proj", "k_proj", "v_proj"):
            add(f"blk.0.{gguf_part}.bias", f"model.layers.0.{part}.bias", shape[:1])
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_metadata(writer: GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {index} é" for index in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_eos_token_id(3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_tensors_arrive_expanded_under_their_names(tmp_path: Path, quantization: str, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, GGMLQuantizationType[quantization], architecture=architecture)
    views = load_target(path, torch.float32, "cpu").model.checkpoint_views()
    assert set(views) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(views[name].numpy(), weight.astype(np.float32))


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, GGMLQuantizationType.F32)
    config = load_target(path, torch.float32, "cpu", load_format="dummy").config
    sizes = (config.hidden_size, config.layer.intermediate_size, config.layer.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM)
    assert (config.num_layers, config.vocab_size, config.max_position_embeddings) == (1, VOCAB, 128)
    assert (config.rope.theta, config.eos_token_ids, config.tie_word_embeddings) == (5000.0, (3,), True)
    assert config.layer.rms_norm_eps == pytest.approx(1e-5)


def test_headers_use_the_hugging_face_names(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, GGMLQuantizationType.Q8_0)
    assert {name: header.shape for name, header in read_tensor_headers(path).items()} == {
        name: weight.shape for name, weight in expected.items()
    }


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, GGMLQuantizationType.F32, extra_tensor="rope_freqs.weight")
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        load_target(path, torch.float32, "cpu")


def test_other_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, GGMLQuantizationType.F32, architecture="gemma")
    with pytest.raises(ModelError, match="'gemma'"):
        load_target(path, torch.float32, "cpu")


def test_rotary_scaling_that_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    add_metadata(writer)
    writer.add_string("llama.rope.scaling.type", "yarn")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'yarn'"):
        load_target(path, torch.float32, "cpu", load_format="dummy")


@pytest.mark.parametrize("kept", [0, 3, 20, 200, -40])
def test_cut_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        load_target(path, torch.float32, "cpu")


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path: Any = tmp_path / "model.gguf"
    path.write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(ModelError, match="does not start with GGUF"):
        load_target(path, torch.float32, "cpu")
