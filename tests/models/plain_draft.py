"""Drafts in plain torch, straight from the published formulas, in float64: what `eagle.py` and `eagle3.py` are held against.

Weights are a dict under SafeAILab names with numbered layers; nothing of eaglecli is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PlainDraft:
    """One draft on one sequence: n pairs of token and hidden state, all positions at once."""

    config: Mapping[str, Any]
    weights: Weights
    embedding: torch.Tensor
    head: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor | None:
        tensor = self.weights.get(name)
        return None if tensor is None else tensor.double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm, or x itself when the file has no such norm."""
        weight = self[name]
        return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * weight

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequency = self.config.get("rope_theta", 10000.0) ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)

    def attention(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        count, head_dim = len(x), self.config["head_dim"]
        q, k, v = (self.linear(x, f"{layer}.self_attn.{part}_proj").view(count, -1, head_dim) for part in "qkv")
        q, k = self.rotate(self.norm(q, f"{layer}.self_attn.q_norm.weight")), self.rotate(self.norm(k, f"{layer}.self_attn.k_norm.weight"))
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(groups, 1)) * head_dim**-0.5
        distance = torch.arange(count)[:, None] - torch.arange(count)
        visible = (distance >= 0) & (distance < self.config.get("sliding_window", count))
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", shares, v.repeat_interleave(groups, 1))
        return self.linear(attended.reshape(count, -1), f"{layer}.self_attn.o_proj")

    def mlp(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        x = self.norm(x, f"{layer}.post_attention_layernorm.weight")
        inner = functional.silu(self.linear(x, f"{layer}.mlp.gate_proj")) * self.linear(x, f"{layer}.mlp.up_proj")
        return self.linear(inner, f"{layer}.mlp.down_proj")

    def ordinary_layers(self, x: torch.Tensor, first: int) -> torch.Tensor:
        index = first
        while f"layers.{index}.self_attn.q_proj.weight" in self.weights:
            x = x + self.attention(self.norm(x, f"layers.{index}.input_layernorm.weight"), f"layers.{index}")
            x = x + self.mlp(x, f"layers.{index}")
            index += 1
        return x

    def eagle(self, token_ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feedback [n, H] and logits [n, V] of an EAGLE-1/2 draft."""
        embeds = self.norm(self.embedding.double()[token_ids], "embedding_layernorm.weight")
        features = self.norm(features.double(), "hidden_states_layernorm.weight")
        x = self.ordinary_layers(self.linear(torch.cat((embeds, features), -1), "fc"), first=0)
        return x, self.norm(x, "pre_lm_head_layernorm.weight") @ self.head.double().T

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Tapped states [n, k * Ht] to hidden [n, H] of an EAGLE-3 draft."""
        if "fc.weight" not in self.weights:
            return features.double()
        if "fc_norm.0.weight" in self.weights:
            count = sum(name.startswith("fc_norm.") for name in self.weights)
            parts = features.double().chunk(count, -1)
            features = torch.cat([self.norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)], -1)
        return self.linear(self.norm(features.double(), "input_norm.weight"), "fc")

    def eagle3(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feedback [n, H] and logits [n, Vd] of an EAGLE-3 draft from hidden states that are fused or fed back."""
        normed = self.norm(hidden.double(), "layers.0.hidden_norm.weight")
        residual = normed if self.config.get("norm_before_residual") else hidden.double()
        pair = torch.cat((self.norm(self.embedding.double()[token_ids], "layers.0.input_layernorm.weight"), normed), -1)
        x = residual + self.attention(pair, "layers.0")
        x = self.ordinary_layers(x + self.mlp(x, "layers.0"), first=1)
        normed_output = self.norm(x, "norm.weight")
        return normed_output if self.config.get("norm_output") else x, normed_output @ self.head.double().T
