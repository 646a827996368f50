"""The Llama decoder layer on fused weights, shared by targets and drafts.

Kernel launches: norm and qkv product; rotary, cache store and attention (two where a row sees what another stores, or heads have norms);
output product and residual; then norm, gate and up with silu; down product and residual. The modules own their weights and
nothing else: caches, tables and addressing are arguments. `checkpoint_views` names the parts of the fused weights as
checkpoints do, so that a loader can copy tensor after tensor into place.
"""

import torch
from torch import nn

from eaglecli.kernels.attention import attention
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.models.config import LayerConfig
from eaglecli.models.kernel_choice import KernelUser
from eaglecli.models.rope import RopeTables


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An unfilled weight; eaglecli never trains through these modules."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Attention(KernelUser):
    """Self-attention with its residual; `input_size` differs from the hidden size in EAGLE-3 drafts."""

    def __init__(
        self,
        config: LayerConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.scale = config.head_dim**-0.5
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.part_sizes = (q_size, kv_size, kv_size)
        qkv_size = q_size + 2 * kv_size
        self.qkv_weight = empty_parameter(qkv_size, input_size or config.hidden_size, dtype=dtype, device=device)
        self.qkv_bias = empty_parameter(qkv_size, dtype=dtype, device=device) if config.qkv_bias else None
        self.o_weight = empty_parameter(config.hidden_size, q_size, dtype=dtype, device=device)
        self.o_bias = empty_parameter(config.hidden_size, dtype=dtype, device=device) if config.o_bias else None
        self.q_norm = empty_parameter(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.k_norm = empty_parameter(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        tables: RopeTables,
        layer_cache: torch.Tensor,
        inputs: AttentionInputs,
        overwrite: bool = False,
    ) -> torch.Tensor:
        """residual [T, H] + attention of x [T, input_size], normalised by `norm_weight` unless None; layer_cache [2, slots, nkv, hd].

        `overwrite`: nobody needs the residual any more.
        """
        eps = self.config.rms_norm_eps
        k_cache, v_cache = layer_cache[0], layer_cache[1]
        qkv = self.kernels.norm_linear(x, norm_weight, eps, self.qkv_weight, self.qkv_bias)
        if inputs.attend_qkv is not None and self.q_norm is None and self.k_norm is None:
            attended = inputs.attend_qkv(qkv, tables.cos, tables.sin, k_cache, v_cache, inputs, self.scale, self.window)
        else:
            places = positions, tables.cos, tables.sin, inputs.out_slots
            q = self.kernels.rotary_store(qkv, *places, k_cache, v_cache, self.q_norm, self.k_norm, eps)
            attended = (inputs.attend or attention)(q, k_cache, v_cache, inputs, self.scale, self.window)
        return self.kernels.linear_residual(attended, self.o_weight, self.o_bias, residual, overwrite)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the part of our weights that it fills; `prefix` ends with a dot, e.g. "layers.0.self_attn."."""
        views = {f"{prefix}o_proj.weight": self.o_weight}
        parts = ("q_proj", "k_proj", "v_proj")
        views.update(zip((f"{prefix}{part}.weight" for part in parts), self.qkv_weight.split(self.part_sizes), strict=True))
        if self.qkv_bias is not None:
            views.update(zip((f"{prefix}{part}.bias" for part in parts), self.qkv_bias.split(self.part_sizes), strict=True))
        optional = {"o_proj.bias": self.o_bias, "q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        views.update({prefix + name: weight for name, weight in optional.items() if weight is not None})
        return views


class Mlp(KernelUser):
    """Gated feed-forward with its residual."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_weight = empty_parameter(2 * inner, hidden, dtype=dtype, device=device)
        self.gate_up_bias = empty_parameter(2 * inner, dtype=dtype, device=device) if config.mlp_bias else None
        self.down_weight = empty_parameter(hidden, inner, dtype=dtype, device=device)
        self.down_bias = empty_parameter(hidden, dtype=dtype, device=device) if config.mlp_bias else None

    def forward(self, x: torch.Tensor, norm_weight: torch.Tensor | None) -> torch.Tensor:
        """x [T, H] + MLP of x normalised by `norm_weight` (None: as it is). x may be overwritten."""
        inner = self.kernels.norm_gate_up(x, norm_weight, self.config.rms_norm_eps, self.gate_up_weight, self.gate_up_bias)
        return self.kernels.linear_residual(inner, self.down_weight, self.down_bias, x, overwrite=True)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the part of our weights that it fills; `prefix` ends with a dot, e.g. "layers.0.mlp."."""
        gate, up = self.gate_up_weight.chunk(2)
        views = {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": self.down_weight}
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate, up = self.gate_up_bias.chunk(2)
            views |= {f"{prefix}gate_proj.bias": gate, f"{prefix}up_proj.bias": up, f"{prefix}down_proj.bias": self.down_bias}
        return views


class DecoderLayer(nn.Module):
    """Attention, then MLP, each behind an RMS norm. `input_norm` False leaves the first norm out (EAGLE-1/2 drafts)."""

    def __init__(
        self,
        config: LayerConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
        input_norm: bool = True,
    ) -> None:
        super().__init__()
        self.input_norm = empty_parameter(config.hidden_size, dtype=dtype, device=device) if input_norm else None
        self.attention = Attention(config, dtype, device, window)
        self.post_norm = empty_parameter(config.hidden_size, dtype=dtype, device=device)
        self.mlp = Mlp(config, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        tables: RopeTables,
        layer_cache: torch.Tensor,
        inputs: AttentionInputs,
        overwrite: bool = False,
    ) -> torch.Tensor:
        """The residual stream x [T, H] after this layer; layer_cache [2, slots, nkv, hd] is written at `inputs.out_slots`.

        `overwrite`: nobody needs x any more.
        """
        x = self.attention(x, self.input_norm, x, positions, tables, layer_cache, inputs, overwrite)
        return self.mlp(x, self.post_norm)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the part of our weights that it fills; `prefix` ends with a dot, e.g. "model.layers.0."."""
        views = self.attention.checkpoint_views(f"{prefix}self_attn.") | self.mlp.checkpoint_views(f"{prefix}mlp.")
        views[f"{prefix}post_attention_layernorm.weight"] = self.post_norm
        if self.input_norm is not None:
            views[f"{prefix}input_layernorm.weight"] = self.input_norm
        return views
