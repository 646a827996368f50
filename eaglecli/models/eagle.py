"""The EAGLE-1/2 draft: one decoder layer that continues the target's final hidden states.

    z = fc([embedding ; feature])      embedding first; HASS and speculators variants normalise the two
    g = decoder layers(z)              layer 0 has no input norm, unless the file holds one
    logits = head(g)                   no final norm, unless the file holds one; g itself is fed back

The feature is the target's hidden state after the final norm. EAGLE-1 and EAGLE-2 differ in the tree only.
Sources: Li et al., "EAGLE" and "EAGLE-2"; SafeAILab/EAGLE.
"""

import torch
from torch import nn

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.draft_input import Residual, draft_input
from eaglecli.kernels.gather_norm import gather_norm
from eaglecli.models.draft_config import DraftConfig
from eaglecli.models.draft_model import DraftOutput
from eaglecli.models.kernel_choice import KernelUser
from eaglecli.models.layers import DecoderLayer, empty_parameter
from eaglecli.models.rope import RopeTables


class EagleDraft(KernelUser):
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

        def norm(wanted: bool) -> nn.Parameter | None:
            return empty_parameter(self.hidden_size, dtype=dtype, device=device) if wanted else None

        self.embedding_norm, self.feature_norm = norm(config.embedding_norm), norm(config.feature_norm)
        self.head_norm = norm(config.head_norm)
        self.fc_weight = empty_parameter(self.hidden_size, 2 * self.hidden_size, dtype=dtype, device=device)
        self.fc_bias = empty_parameter(self.hidden_size, dtype=dtype, device=device) if config.fc_bias else None
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, dtype, device, window, input_norm)
            for window, input_norm in zip(config.windows, config.input_norms, strict=True)
        )

    def fuse(self, features: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        """The target's final hidden states as they are; see `DraftModel.fuse`."""
        return features if index is None else gather_norm(features, index, None, 1, 0.0)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttentionInputs,
        hidden_index: torch.Tensor | None = None,
    ) -> DraftOutput:
        """See `DraftModel.forward`."""
        eps = self.config.layer.rms_norm_eps
        norms = self.embedding_norm, self.feature_norm
        pair = draft_input(input_ids, self.embed_weight, hidden, hidden_index, *norms, eps, Residual.NONE).pair
        x = self.kernels.linear(pair, self.fc_weight, self.fc_bias)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, self.tables, kv_cache[index], inputs, overwrite=True)
        return DraftOutput(feedback=x, head_input=x)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """See `DraftModel.logits`."""
        return self.kernels.norm_linear(head_input, self.head_norm, self.config.layer.rms_norm_eps, self.head_weight, None)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """See `DraftModel.checkpoint_views`."""
        optional = {
            "fc.bias": self.fc_bias,
            "embedding_layernorm.weight": self.embedding_norm,
            "hidden_states_layernorm.weight": self.feature_norm,
            "pre_lm_head_layernorm.weight": self.head_norm,
        }
        views = {"fc.weight": self.fc_weight} | {name: weight for name, weight in optional.items() if weight is not None}
        for index, layer in enumerate(self.layers):
            views |= layer.checkpoint_views(f"layers.{index}.")
        return views
