"""The target model: embedding, decoder layers, final norm, head.

Boundary b is the residual stream after b layers: 0 is the embedding, num_layers the stream before the final norm.
The forward pass launches kernels and nothing else: it never waits for the device and does no work per token.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.rms_norm import rms_norm
from eaglecli.models.config import TargetConfig
from eaglecli.models.kernel_choice import KernelUser
from eaglecli.models.layers import DecoderLayer, empty_parameter
from eaglecli.models.rope import rope_tables


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """What a forward pass leaves: `hidden` [T, H] after the final norm, `features` [T, F] for the draft."""

    hidden: torch.Tensor
    features: torch.Tensor


class TargetModel(KernelUser):
    """A Llama-family model that reads and writes the cache it is given. `own_head` False ties the head to the embedding."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype, device: torch.device | str, context_length: int, own_head: bool) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.context_length = context_length
        self.embed_weight = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, dtype, device, window) for window in config.windows)
        self.final_norm = empty_parameter(config.hidden_size, dtype=dtype, device=device)
        self.own_head = own_head
        self.head_weight = (
            empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device) if own_head else self.embed_weight
        )
        self.tables = rope_tables(config.rope, context_length, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttentionInputs,
        tap_boundaries: tuple[int, ...] = (),
        features_out: torch.Tensor | None = None,
    ) -> TargetOutput:
        """Run T packed tokens. input_ids int64 [T], positions int32 [T], kv_cache [num_layers, 2, slots, nkv, hd].

        `features` are the residual streams at `tap_boundaries` side by side, or `hidden` itself when there are none;
        they are written to `features_out` [T, F] where that is given.
        """
        x = functional.embedding(input_ids, self.embed_weight)
        boundaries = {0: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, self.tables, kv_cache[index], inputs, overwrite=index not in tap_boundaries)
            if index + 1 in tap_boundaries:
                boundaries[index + 1] = x
        hidden = rms_norm(x, self.final_norm, self.config.layer.rms_norm_eps)
        if tap_boundaries:
            features = torch.cat([boundaries[b] for b in tap_boundaries], dim=-1, out=features_out)
        else:
            features = hidden if features_out is None else features_out.copy_(hidden)
        return TargetOutput(hidden, features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [M, V] of the rows of hidden [M, H], which are past the final norm."""
        return self.kernels.linear(hidden, self.head_weight, None)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the part of our weights that it fills; filling all of them fills the model."""
        views = {"model.embed_tokens.weight": self.embed_weight, "model.norm.weight": self.final_norm}
        for index, layer in enumerate(self.layers):
            views |= layer.checkpoint_views(f"model.layers.{index}.")
        if self.own_head:
            views["lm_head.weight"] = self.head_weight
        return views
