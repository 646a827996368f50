"""The EAGLE-3 draft as an ordinary autograd module, unrolled over several steps: what `models/eagle3.py` computes, for training.

Step 0 takes the fused features of the target. Step k takes the draft's own output of step k - 1 *at the same index*, the
token k places further on, and rotates by position + k: index t at step k is what a chain of drafts computes at slot t + k after it
started at slot t. See `packed_attention` for which keys it sees.
Weights are float32; every unroll works on one copy of them in the target's dtype. q, k and v share a matrix, and so do gate and up.
Some channels of a target's states are a hundred times larger than others, and an optimizer whose steps are alike for all
weights would listen to these alone. So fc is trained for channels of one size; `feature_scale` is multiplied into it for use.
Source: Li et al., "EAGLE-3" (training-time test).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from eaglecli.models.config import LayerConfig
from eaglecli.models.rope import RopeConfig, rope_tables
from eaglecli.models.target import TargetModel
from eaglecli.training.packed_attention import Documents, unrolled_attention

_INITIAL_DEVIATION = 0.02
_SMALLEST_CHANNEL = 0.01  # of the mean size: a channel that is nearly silent is not turned up further


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft. Its layer is the target's, without biases and query-key norms, and perhaps another width of the MLP."""

    layer: LayerConfig
    tap_boundaries: tuple[int, ...]
    draft_vocab_size: int
    rope_theta: float
    max_position_embeddings: int

    @property
    def fused_size(self) -> int:
        """Width of the features that fc takes."""
        return len(self.tap_boundaries) * self.layer.hidden_size


def draft_layer(target_layer: LayerConfig, intermediate_size: int | None) -> LayerConfig:
    """The draft's layer for a target's; `intermediate_size` None is the target's."""
    width = intermediate_size or target_layer.intermediate_size
    return replace(target_layer, intermediate_size=width, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)


@dataclass(frozen=True, eq=False)
class Unrolled:
    """Outputs of K steps, each [T, H]: `feedback` goes into the next step, `normed` into the head."""

    feedback: list[torch.Tensor]
    normed: list[torch.Tensor]


class DraftModule(nn.Module):
    """All weights of a draft but the embedding, which is the target's and stays as it is."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        layer, self.shape = shape.layer, shape
        hidden, inner = layer.hidden_size, layer.intermediate_size
        q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.part_sizes = (q_size, kv_size, kv_size)
        self.fc = nn.Parameter(torch.empty(hidden, shape.fused_size))
        self.qkv = nn.Parameter(torch.empty(sum(self.part_sizes), 2 * hidden))  # columns: embedding, then hidden state
        self.o = nn.Parameter(torch.empty(hidden, q_size))
        self.gate_up = nn.Parameter(torch.empty(2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(hidden, inner))
        self.head = nn.Parameter(torch.empty(shape.draft_vocab_size, hidden))
        for name in ("input_norm", "hidden_norm", "post_norm", "final_norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(hidden)))
        self.register_buffer("feature_scale", torch.ones(shape.fused_size))

    @torch.no_grad()
    def initialise(self, target: TargetModel, token_ids: torch.Tensor, feature_rms: torch.Tensor, seed: int) -> None:
        """Random layers; the head and the norm before it begin as the target's (rows `token_ids` int64 [Vd] of its head).

        feature_rms [F]: how large the channels of the features are.
        """
        generator = torch.Generator().manual_seed(seed)
        for weight in (self.fc, self.qkv, self.o, self.gate_up, self.down):
            weight.copy_(torch.randn(weight.shape, generator=generator) * _INITIAL_DEVIATION)
        self.head.copy_(target.head_weight[token_ids.to(target.head_weight.device)])
        self.final_norm.copy_(target.final_norm)
        self.feature_scale.copy_(1.0 / feature_rms.clamp(min=_SMALLEST_CHANNEL * float(feature_rms.mean())))

    def unroll(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents,
        embedding: torch.Tensor,
        num_steps: int,
    ) -> Unrolled:
        """Run `num_steps` steps over T packed positions. features [T, F], input_ids int64 [T], positions int32 [T], embedding [V, H]."""
        weights = {name: parameter.to(features.dtype) for name, parameter in self.named_parameters()}
        layer, hidden_size = self.shape.layer, self.shape.layer.hidden_size
        embed_part, hidden_part = weights["qkv"].split(hidden_size, dim=1)
        embeds = self._norm(functional.embedding(input_ids, embedding), weights["input_norm"])
        embed_qkv = functional.linear(embeds, embed_part)
        tables = rope_tables(self._rope(), self.shape.max_position_embeddings + num_steps, features.device)
        hidden = functional.linear(features, self._scaled_fc().to(features.dtype))
        outputs, own_keys, own_values = Unrolled([], []), [], []
        keys = values = features.new_empty(0)
        for step in range(num_steps):
            normed = self._norm(hidden, weights["hidden_norm"])
            qkv = embed_qkv.roll(-(step + 1), 0) + functional.linear(normed, hidden_part)
            q, k, v = (part.unflatten(1, (-1, layer.head_dim)) for part in qkv.split(self.part_sizes, dim=1))
            index = positions.long() + step
            cos, sin = tables.cos[index].unsqueeze(1), tables.sin[index].unsqueeze(1)
            q, k, v = _rotate(q, cos, sin), _rotate(k, cos, sin), v.contiguous()
            if step == 0:
                keys, values = k, v
            else:
                own_keys.append(k)
                own_values.append(v)
            own_k, own_v = (torch.stack(own) if own else k.new_empty(0, *k.shape) for own in (own_keys, own_values))
            attended = unrolled_attention(q, keys, values, own_k, own_v, documents, layer.head_dim**-0.5)
            x = hidden + functional.linear(attended, weights["o"])
            gate, up = functional.linear(self._norm(x, weights["post_norm"]), weights["gate_up"]).chunk(2, dim=-1)
            hidden = x + functional.linear(functional.silu(gate) * up, weights["down"])
            outputs.feedback.append(hidden)
            outputs.normed.append(self._norm(hidden, weights["final_norm"]))
        return outputs

    def published_weights(self) -> Mapping[str, torch.Tensor]:
        """Tensor name of the published layout -> the part of our weights that it holds."""
        q, k, v = self.qkv.split(self.part_sizes)
        gate, up = self.gate_up.chunk(2)
        return {
            "fc.weight": self._scaled_fc(),
            "midlayer.self_attn.q_proj.weight": q,
            "midlayer.self_attn.k_proj.weight": k,
            "midlayer.self_attn.v_proj.weight": v,
            "midlayer.self_attn.o_proj.weight": self.o,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": self.down,
            "midlayer.input_layernorm.weight": self.input_norm,
            "midlayer.hidden_norm.weight": self.hidden_norm,
            "midlayer.post_attention_layernorm.weight": self.post_norm,
            "norm.weight": self.final_norm,
            "lm_head.weight": self.head,
        }

    def _scaled_fc(self) -> torch.Tensor:
        return self.fc * self.feature_scale

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.shape.layer.rms_norm_eps)

    def _rope(self) -> RopeConfig:
        return RopeConfig(self.shape.layer.head_dim, theta=self.shape.rope_theta)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, hd] by cos and sin [T, 1, hd / 2], halves against each other, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
