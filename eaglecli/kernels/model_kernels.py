"""The kernels that a model's layers call, as one record: the fastest ones, or those whose every row is computed alone.

Attention is not among them: it travels with the addressing of a forward (`AttentionInputs.attend`). What is missing here (norms,
gathers, choices of tokens) works row by row whatever the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eaglecli.kernels.linear import linear, linear_residual, norm_gate_up, norm_linear
from eaglecli.kernels.rotary_store import THROUGHPUT_HEADS, rotary_store, rotary_store_reference, rotary_store_triton
from eaglecli.kernels.row_invariant_linear import (
    row_invariant_linear,
    row_invariant_linear_residual,
    row_invariant_norm_gate_up,
    row_invariant_norm_linear,
)


@dataclass(frozen=True)
class ModelKernels:
    """Signatures as in `kernels.linear` and `kernels.rotary_store`."""

    linear: Callable[..., torch.Tensor]
    norm_linear: Callable[..., torch.Tensor]
    linear_residual: Callable[..., torch.Tensor]
    norm_gate_up: Callable[..., torch.Tensor]
    rotary_store: Callable[..., torch.Tensor]
    is_row_invariant: bool  # no bit of a row depends on the other rows, nor on how many there are


def _row_invariant_rotary_store(qkv: torch.Tensor, *rest: torch.Tensor | None, **named: float) -> torch.Tensor:
    if qkv.is_cuda:
        return rotary_store_triton(qkv, *rest, **named, block_heads=THROUGHPUT_HEADS)  # type: ignore[arg-type]
    return rotary_store_reference(qkv, *rest, **named)  # type: ignore[arg-type]


FASTEST = ModelKernels(linear, norm_linear, linear_residual, norm_gate_up, rotary_store, is_row_invariant=False)
ROW_INVARIANT = ModelKernels(
    row_invariant_linear,
    row_invariant_norm_linear,
    row_invariant_linear_residual,
    row_invariant_norm_gate_up,
    _row_invariant_rotary_store,
    is_row_invariant=True,
)
