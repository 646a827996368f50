"""The EAGLE-3 draft: a decoder layer over token embedding and fused states of several target layers.

    h = fc([a_low ; a_mid ; a_high])                  first pass only; later steps take the draft's own output
    q, k, v from [norm_in(embedding) ; norm_hid(h)]   layer 0, embedding first
    r = h + attention                                 norm_hid(h) + attention with `norm_before_residual`
    out = r + MLP(norm_post(r))                       then any further ordinary layers
    logits = head(norm(out)); out is fed back         norm(out) is fed back with `norm_output` (EAGLE 3.1)

Before fc the states may be normalised one by one (`fc_norm`) or as one long row (`norm_before_fc`). A draft without
fc takes the target's final hidden state.
Sources: Li et al., "EAGLE-3"; SafeAILab/EAGLE, SpecForge, speculators.
"""

import torch
from torch import nn

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.draft_input import Residual, draft_input
from eaglecli.kernels.gather_norm import gather_norm
from eaglecli.kernels.rms_norm import rms_norm
from eaglecli.models.draft_config import DraftConfig
from eaglecli.models.draft_model import DraftOutput
from eaglecli.models.kernel_choice import KernelUser
from eaglecli.models.layers import Attention, DecoderLayer, Mlp, empty_parameter
from eaglecli.models.rope import RopeTables


class FirstLayer(nn.Module):
    """Layer 0: attention over [norm_in(embedding) ; norm_hid(hidden)], then MLP."""

    def __init__(self, config: DraftConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden_size = config.layer.hidden_size
        self.eps = config.layer.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = empty_parameter(hidden_size, dtype=dtype, device=device)
        self.hidden_norm = empty_parameter(hidden_size, dtype=dtype, device=device)
        self.post_norm = empty_parameter(hidden_size, dtype=dtype, device=device)
        self.attention = Attention(config.layer, dtype, device, config.windows[0], input_size=2 * hidden_size)
        self.mlp = Mlp(config.layer, dtype, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        hidden_index: torch.Tensor | None,
        positions: torch.Tensor,
        tables: RopeTables,
        layer_cache: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Tokens and hidden states, see `DraftModel.forward`, to the residual stream [T, H]; layer_cache [2, slots, nkv, hd] is written."""
        residual = Residual.NORMALISED if self.norm_before_residual else Residual.RAW
        start = draft_input(input_ids, embedding, hidden, hidden_index, self.input_norm, self.hidden_norm, self.eps, residual)
        assert start.residual is not None
        x = self.attention(start.pair, None, start.residual, positions, tables, layer_cache, inputs)
        return self.mlp(x, self.post_norm)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Canonical tensor name -> the part of our weights that it fills."""
        norms = {"input_layernorm": self.input_norm, "hidden_norm": self.hidden_norm, "post_attention_layernorm": self.post_norm}
        views = self.attention.checkpoint_views(f"{prefix}self_attn.") | self.mlp.checkpoint_views(f"{prefix}mlp.")
        return views | {f"{prefix}{name}.weight": weight for name, weight in norms.items()}


class Eagle3Draft(KernelUser):
    """Unfilled layers around a given embedding [>=V, H] and head [Vd, H]; see `DraftModel` for the protocol."""

    def __init__(
        self,
        config: DraftConfig,
        tables: RopeTables,
        embedding: torch.Tensor,
        head: torch.Tensor,
        token_map: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.config = config
        self.tables = tables
        self.tap_boundaries = config.taps.boundaries
        self.hidden_size, self.num_layers = config.layer.hidden_size, config.num_layers
        self.num_kv_heads, self.head_dim = config.layer.num_kv_heads, config.layer.head_dim
        self.vocab_size = head.shape[0]
        self.embed_weight, self.head_weight, self.token_map = embedding, head, token_map

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return empty_parameter(*shape, dtype=dtype, device=device) if wanted else None

        num_states, state_size = len(self.tap_boundaries), config.target_hidden_size
        self.fc_weight = parameter(config.has_fc, self.hidden_size, num_states * state_size)
        self.fc_bias = parameter(config.fc_bias, self.hidden_size)
        self.fused_norm = parameter(config.norm_before_fc, num_states * state_size)
        self.state_norms = parameter(config.fc_norm, num_states * state_size)
        self.first_layer = FirstLayer(config, dtype, device)
        self.later_layers = nn.ModuleList(DecoderLayer(config.layer, dtype, device, window) for window in config.windows[1:])
        self.final_norm = empty_parameter(self.hidden_size, dtype=dtype, device=device)

    def fuse(self, features: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        """Tapped target states side by side, [X, k * Ht], to hidden states; see `DraftModel.fuse`. Without fc they stay as they are."""
        eps = self.config.layer.rms_norm_eps
        if self.state_norms is not None:
            features, index = gather_norm(features, index, self.state_norms, len(self.tap_boundaries), eps), None
        if index is not None or self.fused_norm is not None:
            features = gather_norm(features, index, self.fused_norm, 1, eps)
        return features if self.fc_weight is None else self.kernels.linear(features, self.fc_weight, self.fc_bias)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttentionInputs,
        hidden_index: torch.Tensor | None = None,
    ) -> DraftOutput:
        """See `DraftModel.forward`. `head_input` is the stream before the final norm, which `logits` applies to the rows it is given."""
        x = self.first_layer(input_ids, self.embed_weight, hidden, hidden_index, positions, self.tables, kv_cache[0], inputs)
        for index, layer in enumerate(self.later_layers, start=1):
            x = layer(x, positions, self.tables, kv_cache[index], inputs, overwrite=True)
        feedback = rms_norm(x, self.final_norm, self.config.layer.rms_norm_eps) if self.config.norm_output else x
        return DraftOutput(feedback=feedback, head_input=x)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """See `DraftModel.logits`."""
        return self.kernels.norm_linear(head_input, self.final_norm, self.config.layer.rms_norm_eps, self.head_weight, None)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """See `DraftModel.checkpoint_views`."""
        views: dict[str, torch.Tensor] = {"norm.weight": self.final_norm}
        optional = {"fc.weight": self.fc_weight, "fc.bias": self.fc_bias, "input_norm.weight": self.fused_norm}
        views |= {name: weight for name, weight in optional.items() if weight is not None}
        if self.state_norms is not None:
            parts = self.state_norms.chunk(len(self.tap_boundaries))
            views |= {f"fc_norm.{index}.weight": weight for index, weight in enumerate(parts)}
        views |= self.first_layer.checkpoint_views("layers.0.")
        for index, layer in enumerate(self.later_layers, start=1):
            views |= layer.checkpoint_views(f"layers.{index}.")
        return views
