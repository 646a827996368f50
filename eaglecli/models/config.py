"""What a target checkpoint says about itself: sizes, layer options, rotary settings, end-of-text ids.

`read_target_config` is the one reader of foreign config keys for targets. It honours every key that changes the
numbers of the supported families as transformers does, and refuses what eaglecli cannot compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglecli.errors import ModelError
from eaglecli.models.rope import RopeConfig, read_rope_config

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes when config.json leaves the key out.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_DEFAULT_EOS = {"llama": 2, "mistral": 2}


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of one decoder layer, the same for targets and drafts."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class TargetConfig:
    """A target model's description; see `read_target_config`."""

    family: str  # llama, mistral, qwen2 or qwen3
    layer: LayerConfig
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.layer.hidden_size

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of every layer."""
        return self.layer.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.layer.head_dim


def read_target_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, source: str = "config.json"
) -> TargetConfig:
    """Build a TargetConfig from the dicts of config.json and generation_config.json; `source` names the file in messages.

    Raises ModelError naming what is missing or not supported.
    """
    family = _family(config, source)
    _refuse_unsupported(config, source)
    layer = _layer_config(config, family, source)
    num_layers = _size(config, "num_hidden_layers", source)
    max_position = int(config.get("max_position_embeddings") or _DEFAULT_MAX_POSITION[family])
    return TargetConfig(
        family=family,
        layer=layer,
        num_layers=num_layers,
        vocab_size=_size(config, "vocab_size", source),
        max_position_embeddings=max_position,
        rope=read_rope_config(config, layer.head_dim, max_position, source),
        windows=_windows(config, family, num_layers, source),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(config, generation_config or {}, family),
    )


def _family(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    if not names and config.get("model_type") in _FAMILIES.values():
        return config["model_type"]
    found = ", ".join(names) or config.get("model_type") or "none given"
    raise ModelError(f"{source} has architecture {found}, which is not supported", f"supported: {', '.join(_FAMILIES)}")


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{source} has hidden_act {config['hidden_act']!r}; only 'silu' is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(
            f"{source} has a quantization_config ({method}); quantized checkpoints are not supported", "use the unquantized model"
        )


def _size(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{source} needs a positive whole number as {key!r}, found {value!r}")
    return value


def _layer_config(config: Mapping[str, Any], family: str, source: str) -> LayerConfig:
    hidden_size, num_heads = _size(config, "hidden_size", source), _size(config, "num_attention_heads", source)
    num_kv_heads = _num_kv_heads(config, family, num_heads, source)
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size", source),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or default_head_dim),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def _num_kv_heads(config: Mapping[str, Any], family: str, num_heads: int, source: str) -> int:
    """An absent key takes the family's default, a null one means one key-value head per attention head."""
    value = config.get("num_key_value_heads", _DEFAULT_KV_HEADS.get(family))
    num_kv_heads = num_heads if value is None else _size({"num_key_value_heads": value}, "num_key_value_heads", source)
    if num_heads % num_kv_heads:
        raise ModelError(f"{source} has {num_heads} attention heads, not a multiple of its {num_kv_heads} key-value heads")
    return num_kv_heads


def _windows(config: Mapping[str, Any], family: str, num_layers: int, source: str) -> tuple[int | None, ...]:
    """The sliding window of every layer: Mistral has one for all layers, Qwen only when switched on, and then by layer."""
    if family == "llama":
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)
    if family == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        window = None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    return tuple(_typed_window(name, window, source) for name in _checked_layer_types(layer_types, num_layers, source))


def _checked_layer_types(layer_types: list[str], num_layers: int, source: str) -> list[str]:
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"{source} has layer type {unknown[0]!r}, which is not supported")
    if len(layer_types) != num_layers:
        raise ModelError(f"{source} has {len(layer_types)} layer_types for {num_layers} layers")
    return layer_types


def _typed_window(layer_type: str, window: int | None, source: str) -> int | None:
    if layer_type == "full_attention":
        return None
    if window is None:
        raise ModelError(f"{source} has layers of type 'sliding_attention' but no sliding window that is switched on")
    return window


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """Ids of both files, each an int or a list, without repeats and in order of appearance."""
    found: dict[int, None] = {}
    for value in (config.get("eos_token_id", _DEFAULT_EOS.get(family)), generation_config.get("eos_token_id")):
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)
