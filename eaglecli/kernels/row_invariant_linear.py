"""The products of `linear` in an order of additions that no other row can change: bit for bit the same for 1 row as for 1,000.

GPU: one tile of `small_row_linear` for every number of rows. A row is a column of the matrix unit's tile and its inputs are added in the
order of the tile; rows beside it, real or not, are other columns.
CPU: the library chooses its kernels by the number of rows, so it is always given _BLOCK_ROWS of them, the last block filled up with zeros.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from eaglecli.kernels.linear_tiles import MatrixTile, row_invariant_tile
from eaglecli.kernels.rms_norm import rms_norm_reference
from eaglecli.kernels.small_row_linear import small_row_linear

_BLOCK_ROWS = 16


def row_invariant_linear_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    gate_up: bool = False,
    tile: MatrixTile | None = None,
) -> torch.Tensor:
    """Any of the products below on the GPU; `tile` None takes `row_invariant_tile`. ValueError as `small_row_linear`."""
    tile = row_invariant_tile(x.dtype) if tile is None else tile
    return small_row_linear(x, weight, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual, gate_up=gate_up, tile=tile)


def row_invariant_linear_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    gate_up: bool = False,
) -> torch.Tensor:
    """The same in plain torch."""

    def product(block: torch.Tensor) -> torch.Tensor:
        rows = block if norm_weight is None else rms_norm_reference(block, norm_weight, eps)
        out = torch.mm(weight, rows.t()).t().contiguous()  # one orientation for every number of rows
        out = out if bias is None else out + bias
        if gate_up:
            gate, up = out.chunk(2, dim=-1)
            out = functional.silu(gate) * up
        return out

    num_outputs = weight.shape[0] // 2 if gate_up else weight.shape[0]
    out = _by_blocks(product, x, num_outputs)
    return out if residual is None else residual + out


def _by_blocks(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """`product` of every _BLOCK_ROWS rows of x [T, I]: [T, num_outputs]."""
    out = x.new_empty(x.shape[0], num_outputs)
    for start in range(0, x.shape[0], _BLOCK_ROWS):
        rows = x[start : start + _BLOCK_ROWS]
        block = x.new_zeros(_BLOCK_ROWS, x.shape[1])
        block[: len(rows)] = rows
        out[start : start + _BLOCK_ROWS] = product(block)[: len(rows)]
    return out


def row_invariant_norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `linear.norm_linear`."""
    launch = row_invariant_linear_triton if x.is_cuda else row_invariant_linear_reference
    return launch(x, norm_weight, eps, weight, bias)


def row_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `linear.linear`."""
    return row_invariant_norm_linear(x, None, 0.0, weight, bias)


def row_invariant_linear_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, overwrite: bool = False
) -> torch.Tensor:
    """As `linear.linear_residual`; a new tensor, always."""
    launch = row_invariant_linear_triton if x.is_cuda else row_invariant_linear_reference
    return launch(x, None, 0.0, weight, bias, residual=residual)


def row_invariant_norm_gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `linear.norm_gate_up`."""
    launch = row_invariant_linear_triton if x.is_cuda else row_invariant_linear_reference
    return launch(x, norm_weight, eps, weight, bias, gate_up=True)
