"""What a draft checkpoint says about itself, from its config and the headers of its tensors; no weights are read.

`read_draft_settings` flattens the configs of all spellings into one dict and applies the user's overrides;
`build_draft_config` turns that dict, the layout and the target's sizes into a `DraftConfig`. Optional parts are decided
by the tensors that are in the file; a flag of the config that says otherwise is an error, never a silent choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eaglecli.errors import ModelError, UserError
from eaglecli.models.config import LayerConfig, TargetConfig
from eaglecli.models.draft_layout import Algorithm, DraftLayout
from eaglecli.models.rope import RopeConfig, read_rope_config
from eaglecli.models.tap_layers import IdSource, TapLayers, check_boundaries, resolve_tap_layers

_DEFAULT_MAX_POSITION = 2048  # what transformers assumes for a Llama config without the key

_OVERRIDE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tap_boundaries",
    "eagle_aux_hidden_state_layer_ids",
    "use_aux_hidden_state",
    "norm_before_residual",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
    "bias",
    "attention_bias",
    "draft_vocab_size",
)

_QKV_BIASES = tuple(f"layers.0.self_attn.{part}_proj.bias" for part in "qkv")
_MLP_BIASES = tuple(f"layers.0.mlp.{part}_proj.bias" for part in ("gate", "up", "down"))

# Flags of configs and the tensors that they speak of, by canonical name.
_FLAG_TENSORS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("bias", "fusion_bias", "eagle_fc_bias"), ("fc.bias",)),
    (("qkv_bias", "attention_bias"), _QKV_BIASES),
    (("mlp_bias",), _MLP_BIASES),
    (("use_aux_hidden_state",), ("fc.weight",)),
    (("norm_before_fc",), ("input_norm.weight",)),
    (("fc_norm", "use_aux_norm"), ("fc_norm.0.weight",)),
    (("add_para_norm",), ("embedding_layernorm.weight", "hidden_states_layernorm.weight")),
    (("layernorms",), ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight", "layers.0.input_layernorm.weight")),
)


@dataclass(frozen=True)
class DraftSettings:
    """The config of a draft as one flat dict, wherever its file kept the keys."""

    values: Mapping[str, Any]
    is_speculators: bool
    id_source: IdSource  # where the file keeps the ids of the tapped layers
    source: str  # the config file, for messages


@dataclass(frozen=True)
class DraftConfig:
    """Everything that shapes a draft's computation; see eagle.py and eagle3.py for what each part does."""

    algorithm: Algorithm
    layer: LayerConfig
    target_hidden_size: int
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    input_norms: tuple[bool, ...]  # per layer: whether its input is normalised (layer 0 of an EAGLE-3 draft always is)
    taps: TapLayers
    has_fc: bool
    fc_bias: bool
    norm_before_fc: bool  # one norm over all fused states
    fc_norm: bool  # one norm per fused state
    embedding_norm: bool  # EAGLE-1/2: norm of the token embedding before fc
    feature_norm: bool  # EAGLE-1/2: norm of the feature before fc
    head_norm: bool  # EAGLE-1/2: norm before the head
    norm_before_residual: bool
    norm_output: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers of the draft."""
        return len(self.windows)


def read_draft_settings(config: Mapping[str, Any], overrides: Mapping[str, Any] | None, source: str) -> DraftSettings:
    """Flatten the dict of a draft's config file; `source` names the file in messages.

    Raises UserError for an override that is not known, ModelError for a config that cannot be served.
    """
    is_speculators = "speculators_model_type" in config or "transformer_layer_config" in config
    flat = _flatten(config)
    nested = config.get("eagle_config") or {}
    has_nested_ids = nested.get("eagle_aux_hidden_state_layer_ids") is not None
    _apply_overrides(flat, overrides or {})
    _refuse_unsupported(flat, source)
    id_source: IdSource = "speculators" if is_speculators else "eagle_config" if has_nested_ids else "top level"
    return DraftSettings(flat, is_speculators, id_source, source)


def translate_mistral_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of Mistral's own params.json under the names of a config.json."""
    names = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "max_seq_len": "max_position_embeddings",
    }
    return {names.get(key, key): value for key, value in params.items()}


def build_draft_config(
    settings: DraftSettings, layout: DraftLayout, shapes: Mapping[str, tuple[int, ...]], target: TargetConfig
) -> DraftConfig:
    """Combine config, tensors (`shapes` by canonical name) and target; raises ModelError naming what does not fit."""
    _check_flags(settings, layout)
    _check_target_width(settings, target)
    layer = _layer_config(settings, layout, shapes)
    present = layout.file_names
    max_position = optional_size(settings, "max_position_embeddings") or _DEFAULT_MAX_POSITION
    return DraftConfig(
        algorithm=layout.algorithm,
        layer=layer,
        target_hidden_size=target.hidden_size,
        max_position_embeddings=max_position,
        rope=read_rope_config(settings.values, layer.head_dim, max_position, settings.source),
        windows=_windows(settings, layout.num_layers),
        input_norms=tuple(f"layers.{index}.input_layernorm.weight" in present for index in range(layout.num_layers)),
        taps=_tap_layers(settings, layout, shapes, target),
        has_fc="fc.weight" in present,
        fc_bias="fc.bias" in present,
        norm_before_fc="input_norm.weight" in present,
        fc_norm=any(name.startswith("fc_norm.") for name in present),
        embedding_norm="embedding_layernorm.weight" in present,
        feature_norm="hidden_states_layernorm.weight" in present,
        head_norm="pre_lm_head_layernorm.weight" in present,
        norm_before_residual=_flag(settings, "norm_before_residual"),
        norm_output=_flag(settings, "norm_output"),
    )


def optional_size(settings: DraftSettings, key: str) -> int | None:
    """A size of the config, None when it is absent. Raises ModelError when it is not a positive whole number."""
    return None if settings.values.get(key) is None else positive_integer(settings, key)


def positive_integer(settings: DraftSettings, key: str) -> int:
    """A size of the config. Raises ModelError when it is missing or not a positive whole number."""
    value = settings.values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{settings.source} needs a positive whole number as {key!r}, found {value!r}")
    return value


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level for all keys. Outer keys of speculators go before nested ones, except those that name the layer's kind."""
    layer_config = config.get("transformer_layer_config") or {}
    nested = config.get("eagle_config") or {}
    flat = {**layer_config, **config, **nested}
    if "model_type" in layer_config:
        flat["model_type"] = layer_config["model_type"]
    return flat


def _apply_overrides(flat: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    unknown = sorted(set(overrides) - set(_OVERRIDE_KEYS))
    if unknown:
        raise UserError(f"--draft-config-overrides does not know {unknown[0]!r}", f"known keys: {', '.join(_OVERRIDE_KEYS)}")
    for key in ("tap_boundaries", "eagle_aux_hidden_state_layer_ids"):
        if key in overrides and not _is_integer_list(overrides[key]):
            raise UserError(f"--draft-config-overrides: {key} must be a list of whole numbers, found {overrides[key]!r}")
    if "rope_parameters" in overrides or "rope_scaling" in overrides:
        # The base stays the file's own unless it is overridden too.
        base = (flat.get("rope_parameters") or {}).get("rope_theta", flat.get("rope_theta"))
        flat.update(rope_parameters=None, rope_scaling=None, rope_theta=base)
    elif "rope_theta" in overrides and (flat.get("rope_parameters") or {}).get("rope_theta") is not None:
        flat["rope_parameters"] = {**flat["rope_parameters"], "rope_theta": overrides["rope_theta"]}
    flat.update(overrides)


def _is_integer_list(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _refuse_unsupported(flat: Mapping[str, Any], source: str) -> None:
    if flat.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{source} has hidden_act {flat['hidden_act']!r}; only 'silu' is supported")
    if flat.get("quantization_config"):
        raise ModelError(f"{source} has a quantization_config; quantized drafts are not supported", "use the unquantized draft")


def _check_flags(settings: DraftSettings, layout: DraftLayout) -> None:
    """Compare what the config says with what the file holds. A key that is absent says nothing."""
    for keys, tensors in _FLAG_TENSORS:
        claims = {key: settings.values[key] for key in keys if isinstance(settings.values.get(key), bool)}
        if any(claims.values()):
            _require_tensors(settings, layout, next(key for key, value in claims.items() if value), tensors)
        elif claims:
            _forbid_tensors(settings, layout, next(iter(claims)), tensors)
    query_norm = "layers.0.self_attn.q_norm.weight"
    if settings.is_speculators and settings.values.get("model_type") == "qwen3" and query_norm not in layout.file_names:
        raise ModelError(f"{settings.source} says the layer is of kind qwen3, but tensor {query_norm} is not in the file")
    has_no_fc = layout.algorithm == "EAGLE3" and "fc.weight" not in layout.file_names
    if has_no_fc and settings.values.get("use_aux_hidden_state") is not False:
        raise ModelError(
            f"tensor fc.weight is not in the file, and {settings.source} does not say that use_aux_hidden_state is false",
            _flag_hint("use_aux_hidden_state"),
        )


def _require_tensors(settings: DraftSettings, layout: DraftLayout, key: str, tensors: Sequence[str]) -> None:
    for name in tensors:
        if name not in layout.file_names:
            raise ModelError(f"{settings.source} says {key} is true, but tensor {layout.spell(name)} is not in the file", _flag_hint(key))


def _forbid_tensors(settings: DraftSettings, layout: DraftLayout, key: str, tensors: Sequence[str]) -> None:
    for name in tensors:
        if name in layout.file_names:
            raise ModelError(f"{settings.source} says {key} is false, but the file has tensor {layout.spell(name)}", _flag_hint(key))


def _flag_hint(key: str) -> str:
    if key not in _OVERRIDE_KEYS:
        return "correct the config"
    return f"if the file is right, correct the config or use --draft-config-overrides '{{\"{key}\": ...}}'"


def _check_target_width(settings: DraftSettings, target: TargetConfig) -> None:
    expected = settings.values.get("target_hidden_size")
    if expected is not None and expected != target.hidden_size:
        raise ModelError(
            f"draft was made for a target of hidden size {expected} ({settings.source}), this target has {target.hidden_size}",
            "this draft was made for another target",
        )


def _layer_config(settings: DraftSettings, layout: DraftLayout, shapes: Mapping[str, tuple[int, ...]]) -> LayerConfig:
    """Sizes from the config, optional parts and the MLP width from the tensors (some configs carry another MLP's width)."""
    hidden_size, num_heads = positive_integer(settings, "hidden_size"), positive_integer(settings, "num_attention_heads")
    num_kv_heads = optional_size(settings, "num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"{settings.source} has {num_heads} attention heads, not a multiple of its {num_kv_heads} key-value heads")
    gate_shape = shapes.get("layers.0.mlp.gate_proj.weight")
    present = layout.file_names
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=gate_shape[0] if gate_shape else positive_integer(settings, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=optional_size(settings, "head_dim") or hidden_size // num_heads,
        rms_norm_eps=float(settings.values.get("rms_norm_eps") or 1e-6),
        qkv_bias=any(name in present for name in _QKV_BIASES),
        o_bias="layers.0.self_attn.o_proj.bias" in present,
        mlp_bias=any(name in present for name in _MLP_BIASES),
        qk_norm=any(f"layers.0.self_attn.{part}_norm.weight" in present for part in "qk"),
    )


def _windows(settings: DraftSettings, num_layers: int) -> tuple[int | None, ...]:
    """Only speculators trains drafts with a window; other configs carry the key as a copy of the target's."""
    window = optional_size(settings, "sliding_window")
    if not settings.is_speculators or window is None or settings.values.get("use_sliding_window") is False:
        return (None,) * num_layers
    layer_types = settings.values.get("layer_types")
    if layer_types is None:
        return (window,) * num_layers
    if not isinstance(layer_types, Sequence) or len(layer_types) < num_layers:
        raise ModelError(f"{settings.source} has layer_types {layer_types!r} for {num_layers} draft layers")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"{settings.source} has layer type {unknown[0]!r}, which is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types[:num_layers])


def _tap_layers(settings: DraftSettings, layout: DraftLayout, shapes: Mapping[str, tuple[int, ...]], target: TargetConfig) -> TapLayers:
    if layout.algorithm == "EAGLE" or "fc.weight" not in shapes:
        return TapLayers((), "last hidden state of the target, after its final norm")
    name, width = layout.spell("fc.weight"), shapes["fc.weight"][-1]
    num_states, rest = divmod(width, target.hidden_size)
    if rest or num_states == 0:
        raise ModelError(
            f"{name} takes {width} inputs, expected a multiple of the target's hidden size {target.hidden_size}",
            "this draft was made for another target",
        )
    chosen = settings.values.get("tap_boundaries")
    if chosen is not None:
        check_boundaries(chosen, num_states, target.num_layers, "--draft-config-overrides")
        return TapLayers(tuple(chosen), "--draft-config-overrides")
    claimed = optional_size(settings, "num_aux_hidden_states")
    if claimed is not None and claimed != num_states:
        raise ModelError(f"{settings.source} says num_aux_hidden_states is {claimed}, but {name} fuses {num_states} states")
    ids = settings.values.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not _is_integer_list(ids):
        raise ModelError(f"{settings.source} has eagle_aux_hidden_state_layer_ids {ids!r}, expected a list of whole numbers")
    return resolve_tap_layers(ids, settings.id_source, num_states, target.num_layers, settings.source)


def _flag(settings: DraftSettings, key: str) -> bool:
    value = settings.values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{settings.source} has {key} {value!r}, expected true or false")
    return bool(value)
