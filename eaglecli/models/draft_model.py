"""What every draft model offers the engine: one protocol for EAGLE-1/2 and EAGLE-3.

Draft slot i holds the pair (token i + 1, feature of position i), rotates by position i and predicts token i + 2.
A chain or tree step hands a draft its own `feedback` where the first pass hands it the fused target features:
`fuse` is called for target features and never for feedback, so no width decides what a tensor is.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.model_kernels import ModelKernels
from eaglecli.models.draft_config import DraftConfig


@dataclass(frozen=True, eq=False)
class DraftOutput:
    """What a forward pass leaves for every packed token."""

    feedback: torch.Tensor  # [T, H] the hidden state that the next step takes
    head_input: torch.Tensor  # [T, H] what `logits` takes


class DraftModel(Protocol):
    """A draft; the modules own weights and rotary tables, caches and addressing are arguments."""

    config: DraftConfig
    kernels: ModelKernels
    tap_boundaries: tuple[int, ...]  # target boundaries that `fuse` takes side by side; () = the target's final hidden state
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # width of the logits; every id below it may be proposed
    token_map: torch.Tensor | None  # int64 [Vd] target id of each draft id; None = the same ids

    def fuse(self, features: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        """Target features, rows `index` int64 [T] of [X, F] (None: all), to hidden states [T, H]."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttentionInputs,
        hidden_index: torch.Tensor | None = None,
    ) -> DraftOutput:
        """Run T packed pairs: target ids int64 [T], hidden states, positions int32 [T].

        Hidden states are rows hidden_index int32 [T] of hidden [X, H]; None: X = T, in order. kv_cache
        [num_layers, 2, slots, nkv, hd] is written at `inputs.out_slots`.
        """
        ...

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """Scores [M, Vd] over the draft vocabulary of head_input [M, H]."""
        ...

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Canonical tensor name -> the part of our weights that it fills; embedding and head are not among them."""
        ...
