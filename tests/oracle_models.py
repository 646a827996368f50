"""The oracle's models: plain float32 forwards over a whole list of tokens, full causal attention, no caches. Tests only.

Own, independent code: nothing of eaglecli is imported. Llama, Mistral, Qwen2 and Qwen3 targets; EAGLE-1/2 and EAGLE-3 drafts in the
SafeAILab layout (draft-checkpoints 1.4 and 2.1). Notation: n tokens, H hidden size, F feature width, V target and Vd draft vocabulary.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OracleConfig:
    """The numbers of a config.json that the forward needs. `rope` merges rope_theta with rope_scaling or rope_parameters."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: dict[str, Any]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        num_heads = config["num_attention_heads"]
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            eps=config["rms_norm_eps"],
            rope={"rope_theta": config.get("rope_theta") or 10000.0, **scaling},
        )


def rotary_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Inverse frequencies float32 [head_dim / 2] of the kinds default, linear and llama3."""
    frequency = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return frequency
    if kind == "linear":
        return frequency / rope["factor"]
    if kind != "llama3":
        raise ValueError(f"the oracle does not know rope kind {kind}")
    rotations = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # turns within the original length
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((rotations - low) / (high - low)).clamp(0, 1)  # 0: slow frequencies, scaled down; 1: fast ones, left alone
    return keep * frequency + (1 - keep) * frequency / rope["factor"]


def rotate(x: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Rotate-half rotary embedding of x [n, heads, head_dim] at positions 0..n-1."""
    angle = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * rotary_frequencies(rope, x.shape[-1])
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Product with `name`.weight, plus `name`.bias where the checkpoint has one."""
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attend(weights: Weights, layer: str, x: torch.Tensor, config: OracleConfig) -> torch.Tensor:
    """Full causal grouped-query attention with o_proj: x [n, H or 2H] -> [n, H]."""
    name = f"{layer}.self_attn"
    q, k, v = (linear(weights, f"{name}.{part}_proj", x).unflatten(-1, (-1, config.head_dim)) for part in "qkv")
    if f"{name}.q_norm.weight" in weights:
        q, k = (rms_norm(part, weights[f"{name}.{letter}_norm.weight"], config.eps) for letter, part in (("q", q), ("k", k)))
    group = config.num_heads // config.num_kv_heads
    q, k, v = rotate(q, config.rope), rotate(k, config.rope).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(config.head_dim)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -math.inf).softmax(-1), v)
    return linear(weights, f"{name}.o_proj", mixed.flatten(1))


def mlp(weights: Weights, layer: str, x: torch.Tensor, config: OracleConfig) -> torch.Tensor:
    """Post-attention norm and gated MLP, without the residual."""
    normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], config.eps)
    gate, up = (linear(weights, f"{layer}.mlp.{part}_proj", normed) for part in ("gate", "up"))
    return linear(weights, f"{layer}.mlp.down_proj", functional.silu(gate) * up)


def read_weights(folder: Path) -> Weights:
    """All tensors of a checkpoint folder in float32, a leading `model.` removed; integer and boolean tensors as they are."""
    files = sorted(folder.glob("*.safetensors"))
    parts = [load_file(path) for path in files] or [torch.load(folder / "pytorch_model.bin", weights_only=True)]
    named = {name.removeprefix("model."): tensor for part in parts for name, tensor in part.items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in named.items()}


class OracleTarget:
    """A Llama, Mistral, Qwen2 or Qwen3 target: biases, q/k norms and the tied head are taken from the tensors present."""

    def __init__(self, config: dict[str, Any], weights: Weights) -> None:
        if config.get("use_sliding_window", True) and config.get("sliding_window"):
            self.longest = int(config["sliding_window"])  # within the window, windowed attention is plain attention
        else:
            self.longest = int(config["max_position_embeddings"])
        self.config, self.weights = OracleConfig.from_json(config), weights
        self.embedding = weights["embed_tokens.weight"]
        tied = config.get("tie_word_embeddings", False)
        self.head = self.embedding if tied else weights["lm_head.weight"]

    @classmethod
    def from_dir(cls, path: Path) -> Self:
        return cls(json.loads((path / "config.json").read_text()), read_weights(path))

    @classmethod
    def from_transformers(cls, model: nn.Module) -> Self:
        """The numbers of a loaded transformers causal model (a GGUF one, say), shared and not copied if float32."""
        weights = {name.removeprefix("model."): tensor.float() for name, tensor in model.state_dict().items()}
        return cls(model.config.to_dict(), weights)

    @torch.no_grad()
    def forward(self, ids: list[int], tap_boundaries: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [n] -> logits [n, V], features [n, F]: the residual streams at the boundaries side by side, or the post-norm hidden."""
        if len(ids) > self.longest:
            raise ValueError(f"the oracle follows this target up to {self.longest} tokens, not {len(ids)}")
        weights, config = self.weights, self.config
        streams = [self.embedding[torch.tensor(ids)]]
        for index in range(config.num_layers):
            layer, x = f"layers.{index}", streams[-1]
            x = x + attend(weights, layer, rms_norm(x, weights[f"{layer}.input_layernorm.weight"], config.eps), config)
            streams.append(x + mlp(weights, layer, x, config))
        hidden = rms_norm(streams[-1], weights["norm.weight"], config.eps)
        features = torch.cat([streams[boundary] for boundary in tap_boundaries], -1) if tap_boundaries else hidden
        return hidden @ self.head.T, features


class OracleDraft:
    """What a draft is to the generator; tests may script their own. `token_map` [Vd] holds target ids, None = the ids themselves."""

    tap_boundaries: tuple[int, ...] = ()
    token_map: np.ndarray | None = None

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """True target features [n, F] -> hidden [n, H] for `forward`."""
        return features

    def forward(self, token_ids: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs (token_ids[i], hidden[i]) at positions i -> feedback [n, H], logits [n, Vd]."""
        raise NotImplementedError

    @staticmethod
    def from_dir(path: Path, target: OracleTarget, tap_boundaries: tuple[int, ...] | None = None) -> "OracleDraft":
        """The draft of a checkpoint in the SafeAILab layout, its kind read from the tensors present."""
        config, weights = json.loads((path / "config.json").read_text()), read_weights(path)
        known = r"(embed_tokens|lm_head|norm|fc|(midlayer|layers\.\d+)\.(\w+norm|(self_attn|mlp)\.\w+))\.(weight|bias)|d2t|t2d"
        strangers = [name for name in weights if not re.fullmatch(known, name)]
        if strangers:
            raise ValueError(f"the oracle does not know the draft tensors {strangers}")
        if "midlayer.hidden_norm.weight" in weights:
            return OracleEagle3(config, weights, target, tap_boundaries)
        return OracleEagle1(config, weights, target)


class OracleEagle1(OracleDraft):
    """EAGLE-1/2 (draft-checkpoints 1.4): no first input norm, no final norm, the feature is the target's post-norm hidden."""

    def __init__(self, config: dict[str, Any], weights: Weights, target: OracleTarget) -> None:
        self.config, self.weights = OracleConfig.from_json(config), weights
        self.embedding = weights.get("embed_tokens.weight", target.embedding)
        self.head = weights.get("lm_head.weight", target.head)[: len(target.head)]  # padded ids are never proposed

    @torch.no_grad()
    def forward(self, token_ids: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, config = self.weights, self.config
        x = linear(weights, "fc", torch.cat([self.embedding[torch.tensor(token_ids)], hidden], -1))
        for index in range(config.num_layers):
            layer = f"layers.{index}"
            norm = weights.get(f"{layer}.input_layernorm.weight")
            x = x + attend(weights, layer, x if norm is None else rms_norm(x, norm, config.eps), config)
            x = x + mlp(weights, layer, x, config)
        return x, x @ self.head.T


class OracleEagle3(OracleDraft):
    """EAGLE-3 (draft-checkpoints 2.1), one layer, d2t offsets, own or borrowed embedding and head; no norm flags."""

    def __init__(self, config: dict[str, Any], weights: Weights, target: OracleTarget, tap_boundaries: tuple[int, ...] | None) -> None:
        flags = {**config, **config.get("eagle_config", {})}
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if flags.get(flag):
                raise ValueError(f"the oracle does not follow {flag}")
        self.config, self.weights = OracleConfig.from_json(config), weights
        self.embedding = weights.get("embed_tokens.weight", target.embedding)
        self.head = weights.get("lm_head.weight", target.head)
        if "d2t" in weights:
            self.token_map = (torch.arange(len(weights["d2t"])) + weights["d2t"]).numpy()
        else:
            self.head = self.head[: len(target.head)]
        num_layers = target.config.num_layers
        default = (2, num_layers // 2, num_layers - 3)
        ids = flags.get("eagle_aux_hidden_state_layer_ids") or default
        if tap_boundaries is None and tuple(ids) not in (default, tuple(boundary - 1 for boundary in default)):
            raise ValueError(f"layer ids {ids} can be read in two ways: give tap_boundaries")
        self.tap_boundaries = tap_boundaries or default

    @torch.no_grad()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return linear(self.weights, "fc", features)

    @torch.no_grad()
    def forward(self, token_ids: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, eps = self.weights, self.config.eps
        embedded = rms_norm(self.embedding[torch.tensor(token_ids)], weights["midlayer.input_layernorm.weight"], eps)
        both = torch.cat([embedded, rms_norm(hidden, weights["midlayer.hidden_norm.weight"], eps)], -1)
        x = hidden + attend(weights, "midlayer", both, self.config)
        x = x + mlp(weights, "midlayer", x, self.config)
        return x, rms_norm(x, weights["norm.weight"], eps) @ self.head.T
