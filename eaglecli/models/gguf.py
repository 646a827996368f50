"""GGUF files: metadata and tensors under their Hugging Face names.

The header is parsed here and the token lists inside are skipped, so a file is described in milliseconds and loaded in
the time its tensors take to expand. (transformers reads the header three times with the token lists: 35 s against 2 s
for SmolLM2-135M on a slow core.) Tensor formats are expanded by the `gguf` package, the reference of the format.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eaglecli.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class ArrayLength:
    """Stands for an array in the metadata; its items are not kept."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies: `shape` outermost first, `offset_bytes` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header."""

    path: Path
    fields: Mapping[str, Any]  # scalars and strings as they are, arrays as ArrayLength
    tensors: tuple[GgufTensor, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor."""
        return {hugging_face_name(tensor.name, self.path): tensor.shape for tensor in self.tensors}


def is_gguf(path: Path) -> bool:
    """Whether the path names a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of a GGUF file. Raises ModelError when the file is something else or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parse(path, content)
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}", "check that the download is complete") from error


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as a config.json dict. Raises ModelError for an architecture or scaling that is not supported."""
    architecture = file.fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path} has architecture {architecture!r}, which is not supported", f"supported: {', '.join(_ARCHITECTURES)}"
        )

    def field(key: str) -> Any:
        return file.fields.get(f"{architecture}.{key}")

    window = field("attention.sliding_window")
    tokens = file.fields.get("tokenizer.ggml.tokens")
    config = {
        "architectures": ["MistralForCausalLM" if architecture == "llama" and window else _ARCHITECTURES[architecture]],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("attention.key_length") or field("rope.dimension_count"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "rope_scaling": _rope_scaling(file, field),
        "vocab_size": field("vocab_size") or (tokens.count if isinstance(tokens, ArrayLength) else None),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in file.tensors),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "sliding_window": window,
    }
    return {key: value for key, value in config.items() if value is not None}


def iterate_gguf_tensors(file: GgufFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, expanded to float32 when it is asked for."""
    unpermute = file.fields.get("general.architecture") == "llama"
    heads = {"attn_q": file.fields.get("llama.attention.head_count"), "attn_k": file.fields.get("llama.attention.head_count_kv")}
    content = np.memmap(file.path, dtype=np.uint8, mode="r")
    for tensor in file.tensors:
        values = _expand(content, tensor, file.path)
        part = tensor.name.split(".")[-2]
        if unpermute and heads.get(part):
            values = _half_rotating(values, int(heads[part]))
        yield hugging_face_name(tensor.name, file.path), torch.from_numpy(np.require(values, requirements=("C", "W")))


def hugging_face_name(name: str, path: Path) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ModelError for a tensor that eaglecli does not know."""
    stem, _, suffix = name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{suffix}"
    block, _, part = stem.partition(".")[2].partition(".")
    if stem.startswith("blk.") and block.isdigit() and part in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[part]}.{suffix}"
    raise ModelError(f"{path} holds tensor {name!r}, which eaglecli cannot use")


def _rope_scaling(file: GgufFile, field: Callable[[str], Any]) -> dict[str, Any] | None:
    kind = field("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise ModelError(
            f"{file.path} asks for rotary scaling {kind!r}, which is not supported in GGUF files", "use the safetensors checkpoint"
        )
    return {"rope_type": "linear", "factor": field("rope.scaling.factor")}


# ---- the header ---------------------------------------------------------------------------------------------------


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.offset = 0

    def scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.content, self.offset)
        self.offset += layout.size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        text = self.content[self.offset : self.offset + length].decode("utf-8")
        self.offset += length
        return text

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._skipped_array()
        if type_id not in _SCALARS:
            raise ValueError(f"value type {type_id} is unknown")
        return self.scalar(_SCALARS[type_id])

    def _skipped_array(self) -> ArrayLength:
        item_type, count = self.scalar("I"), self.scalar("Q")
        if item_type in _SCALARS:
            self.offset += count * struct.calcsize("<" + _SCALARS[item_type])
        elif item_type == _STRING:
            length_of = struct.Struct("<Q").unpack_from
            for _ in range(count):
                self.offset += 8 + length_of(self.content, self.offset)[0]
        else:
            raise ValueError(f"array item type {item_type} is unknown")
        return ArrayLength(count)


def _parse(path: Path, content: mmap.mmap) -> GgufFile:
    cursor = _Cursor(content)
    if content[:4] != _MAGIC:
        raise ValueError("it does not start with GGUF")
    cursor.offset = 4
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS}")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    fields = {}
    for _ in range(num_fields):
        key = cursor.string()
        fields[key] = cursor.value(cursor.scalar("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(GgufTensor(info.name, info.shape, info.type_id, info.offset_bytes + data_start) for info in infos)
    return GgufFile(path, fields, tensors)


def _tensor_info(cursor: _Cursor) -> GgufTensor:
    """One entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.string()
    dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return GgufTensor(name, tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q"))


# ---- the tensors --------------------------------------------------------------------------------------------------


def _expand(content: np.ndarray, tensor: GgufTensor, path: Path) -> np.ndarray:
    try:  # imported here: other checkpoints do not need the package
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ModelError(f"{path} needs the package gguf, which is not installed", "pip install gguf") from error
    try:
        kind = GGMLQuantizationType(tensor.type_id)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // block_values * block_bytes
        num_bytes = int(np.prod(tensor.shape[:-1], dtype=np.int64)) * row_bytes
        raw = content[tensor.offset_bytes : tensor.offset_bytes + num_bytes]
        return dequantize(_typed(raw, kind.name).reshape(*tensor.shape[:-1], -1), kind)
    except (KeyError, ValueError, NotImplementedError) as error:
        raise ModelError(f"{path}: tensor {tensor.name} cannot be expanded: {error}", "check that the download is complete") from error


def _typed(raw: np.ndarray, kind: str) -> np.ndarray:
    """The `gguf` package wants plain floats as such and everything else as bytes."""
    plain = {"F32": np.float32, "F16": np.float16}
    return raw.view(plain[kind]) if kind in plain else raw


def _half_rotating(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the interleaving of llama query and key rows: pairs (2i, 2i + 1) of a head go back to (i, i + hd/2)."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
