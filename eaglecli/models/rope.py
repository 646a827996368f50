"""Rotary position tables: what a checkpoint asks for, and the cosines and sines of a run.

The six kinds are those of transformers (`modeling_rope_utils`), computed alike: default, linear, dynamic, llama3
(Llama 3.1), yarn (Peng et al., "YaRN"), longrope (Ding et al., "LongRoPE"). Two of them, dynamic and longrope, change
all angles once the sequence passes the original length. Keys already in a cache cannot follow that, so such a run is
refused; below that length the tables are exact.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eaglecli.errors import ModelError

DEFAULT_THETA = 10_000.0
_LENGTH_BOUND_KINDS = ("dynamic", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary parameters of one model; fields that a kind does not use keep their defaults."""

    head_dim: int
    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_context: int = 0  # positions the angles were trained for, before any scaling
    attention_factor: float | None = None  # multiplies cos and sin; None = the value that the kind prescribes
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class RopeTables:
    """cos and sin, float32 [P, head_dim / 2] for positions 0 to P - 1, the attention factor folded in."""

    cos: torch.Tensor
    sin: torch.Tensor


def read_rope_config(config: Mapping[str, Any], head_dim: int, max_position_embeddings: int, source: str = "config.json") -> RopeConfig:
    """Read the rotary settings of a config dict in any of its spellings; `source` names the file in messages.

    Spellings: `rope_theta` with `rope_scaling` (its kind under "rope_type" or "type"), and `rope_parameters` of
    transformers 5, where the base lies inside. Raises ModelError for an unknown kind, a missing field, or rotation of
    only a part of each head.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(f"{source} has one set of rotary parameters per layer type ({', '.join(nested)}), which is not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _INVERSE_FREQUENCIES:
        raise ModelError(f"{source} asks for rotary type {kind!r}", f"supported types: {', '.join(_INVERSE_FREQUENCIES)}")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ModelError(f"{source} rotates only a part of each head (partial_rotary_factor {partial}), which is not supported")
    if head_dim % 2:
        raise ModelError(f"{source} has an odd head size ({head_dim}), which cannot be rotated")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    return _READERS.get(kind, _read_plain)(config, parameters, RopeConfig(head_dim, kind, float(theta)), max_position_embeddings, source)


def rope_tables(rope: RopeConfig, context_length: int, device: torch.device | str) -> RopeTables:
    """Tables for positions 0 to context_length - 1. Raises ModelError when the kind cannot serve that length."""
    if rope.kind in _LENGTH_BOUND_KINDS and context_length > rope.original_context:
        raise ModelError(
            f"rotary type {rope.kind!r} changes every angle past {rope.original_context} positions; the run's context is {context_length}",
            f"use --context-length {rope.original_context} or less",
        )
    positions = torch.arange(context_length, dtype=torch.float32, device=device)
    angles = positions[:, None] * _INVERSE_FREQUENCIES[rope.kind](rope).to(device)
    scale = _attention_factor(rope)
    return RopeTables(angles.cos() * scale, angles.sin() * scale)


# ---- reading ----------------------------------------------------------------------------------------------------


def _required(parameters: Mapping[str, Any], key: str, kind: str, source: str) -> Any:
    if parameters.get(key) is None:
        raise ModelError(f"{source} asks for rotary type {kind!r} but gives no {key!r}")
    return parameters[key]


def _read_plain(config: Mapping[str, Any], parameters: Mapping[str, Any], base: RopeConfig, max_position: int, source: str) -> RopeConfig:
    factor = 1.0 if base.kind == "default" else float(_required(parameters, "factor", base.kind, source))
    return RopeConfig(base.head_dim, base.kind, base.theta, factor, max_position)


def _read_llama3(config: Mapping[str, Any], parameters: Mapping[str, Any], base: RopeConfig, max_position: int, source: str) -> RopeConfig:
    factor, low, high = (float(_required(parameters, key, base.kind, source)) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _original_context(config, parameters, max_position)
    return RopeConfig(base.head_dim, base.kind, base.theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(config: Mapping[str, Any], parameters: Mapping[str, Any], base: RopeConfig, max_position: int, source: str) -> RopeConfig:
    original = _original_context(config, parameters, max_position)
    return RopeConfig(
        head_dim=base.head_dim,
        kind=base.kind,
        theta=base.theta,
        factor=float(parameters.get("factor") or max_position / original),
        original_context=original,
        attention_factor=parameters.get("attention_factor"),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _read_longrope(
    config: Mapping[str, Any], parameters: Mapping[str, Any], base: RopeConfig, max_position: int, source: str
) -> RopeConfig:
    original = _original_context(config, parameters, max_position)
    short = tuple(float(value) for value in _required(parameters, "short_factor", base.kind, source))
    if len(short) != base.head_dim // 2:
        raise ModelError(f"{source} has {len(short)} values in 'short_factor', but half a head is {base.head_dim // 2}")
    return RopeConfig(
        head_dim=base.head_dim,
        kind=base.kind,
        theta=base.theta,
        factor=float(parameters.get("factor") or max_position / original),
        original_context=original,
        attention_factor=parameters.get("attention_factor"),
        short_factor=short,
    )


def _original_context(config: Mapping[str, Any], parameters: Mapping[str, Any], max_position: int) -> int:
    """The outer field goes before the one among the rotary parameters, as in transformers."""
    for holder in (config, parameters):
        if holder.get("original_max_position_embeddings"):
            return int(holder["original_max_position_embeddings"])
    return max_position


_READERS: Mapping[str, Callable[..., RopeConfig]] = {"llama3": _read_llama3, "yarn": _read_yarn, "longrope": _read_longrope}


# ---- angles per position, float32 [head_dim / 2] ------------------------------------------------------------------


def _default(rope: RopeConfig) -> torch.Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim)


def _linear(rope: RopeConfig) -> torch.Tensor:
    return _default(rope) / rope.factor


def _llama3(rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    frequency = _default(rope)
    turns = rope.original_context * frequency / (2 * math.pi)  # full turns within the original context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Like llama3, with the blend linear in the dimension between two numbers of turns."""

    def dimension_with(turns: float) -> float:
        return rope.head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    high = high + 0.001 if low == high else high  # avoids a division by zero
    keep = 1 - ((torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequency = _default(rope)
    return frequency / rope.factor * (1 - keep) + frequency * keep


def _longrope(rope: RopeConfig) -> torch.Tensor:
    return _default(rope) / torch.tensor(rope.short_factor, dtype=torch.float32)


_INVERSE_FREQUENCIES: Mapping[str, Callable[[RopeConfig], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # equal to the default up to the original length, the only lengths served
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_magnitude(rope.factor, rope.mscale) / _yarn_magnitude(rope.factor, rope.mscale_all_dim)
        return _yarn_magnitude(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
