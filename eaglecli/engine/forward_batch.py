"""Inputs of one forward of the draft, complete when built: nothing is filled in later by its caller."""

import enum
from dataclasses import dataclass

import torch

from eaglecli.kernels.attention_inputs import AttentionInputs


class ForwardMode(enum.Enum):
    """What a forward of the draft is for."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    EXTEND = enum.auto()


class CaptureHidden(enum.Enum):
    """Which tokens of a forward feed the next draft: all of them (tree steps) or each row's last (prefill and extend)."""

    FULL = enum.auto()
    LAST = enum.auto()


@dataclass(frozen=True, eq=False)
class DraftForwardBatch:
    """T packed tokens of B rows. No token of a draft forward is ever reported, so it has no log-probabilities to ask for."""

    mode: ForwardMode
    capture_hidden: CaptureHidden
    input_ids: torch.Tensor  # int64 [T]
    hidden: torch.Tensor  # [X, H] fused features of the target, or the draft's own feedback
    hidden_index: torch.Tensor | None  # int32 [T] which of them each token continues; None: X = T, in order
    positions: torch.Tensor  # int32 [T]
    proposal_positions: torch.Tensor  # int32 of the tokens proposed after each captured one
    attention: AttentionInputs
    last_index: torch.Tensor | None  # int64 [B] packed index of each row's last token; None when all tokens are captured

    def __post_init__(self) -> None:
        if (self.capture_hidden is CaptureHidden.LAST) != (self.last_index is not None):
            raise ValueError("last_index names the tokens of CaptureHidden.LAST, and of no other")
