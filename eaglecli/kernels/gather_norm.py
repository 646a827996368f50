# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Take rows and normalise them on the way, whole or in equal parts.

    out[t] = [ norm(x[index[t]][part 0]) ; norm(x[index[t]][part 1]) ; ... ]

with the RMS norm of `rms_norm` for each part and one weight for all columns; without a weight the rows as they are.
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent
from eaglecli.kernels.rms_norm import MAX_WIDTH, rms_norm_reference

_COPY_WIDTH = 2048  # columns of one program when nothing is normalised


@triton.jit
def _gather_norm_kernel(
    x_ptr, index_ptr, weight_ptr, out_ptr, num_columns, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    column = tl.program_id(1) * WIDTH + offset
    inside = (offset < WIDTH) & (column < num_columns)
    row = token
    if index_ptr is not None:
        row = tl.load(index_ptr + token)
    x = tl.load(x_ptr + row * num_columns + column, mask=inside, other=0.0)
    if weight_ptr is not None:
        wide = x.to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)) * weight
    tl.store(out_ptr + token * num_columns + column, x, mask=inside)


def gather_norm_triton(
    x: torch.Tensor, index: torch.Tensor | None, weight: torch.Tensor | None, num_parts: int, eps: float
) -> torch.Tensor:
    """One launch; a program takes one part of one row. See `gather_norm`."""
    _check(x, index, weight, num_parts)
    num_columns = x.shape[1]
    num_tokens = x.shape[0] if index is None else index.shape[0]
    width = _COPY_WIDTH if weight is None else num_columns // num_parts
    block = triton.next_power_of_2(width)
    out = torch.empty(num_tokens, num_columns, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gather_norm_kernel[(num_tokens, triton.cdiv(num_columns, width))](
            x,
            index,
            weight,
            out,
            num_columns,
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(x.device),
        )
    return out


def gather_norm_reference(
    x: torch.Tensor, index: torch.Tensor | None, weight: torch.Tensor | None, num_parts: int, eps: float
) -> torch.Tensor:
    """See `gather_norm`."""
    _check(x, index, weight, num_parts)
    rows = x if index is None else x[index]
    if weight is None:
        return rows
    parts = rows.unflatten(1, (num_parts, -1))
    return rms_norm_reference(parts, weight.unflatten(0, (num_parts, -1)), eps).flatten(1)


def _check(x: torch.Tensor, index: torch.Tensor | None, weight: torch.Tensor | None, num_parts: int) -> None:
    require("x", x, x.dtype, -1, -1)
    if index is not None:
        require("index", index, torch.int64, -1)
    if weight is not None:
        require("weight", weight, x.dtype, x.shape[1])
    if num_parts < 1 or x.shape[1] % num_parts or x.shape[1] // num_parts > MAX_WIDTH:
        raise ValueError(f"gather_norm cannot take {x.shape[1]} columns in {num_parts} equal parts of at most {MAX_WIDTH}")


def gather_norm(x: torch.Tensor, index: torch.Tensor | None, weight: torch.Tensor | None, num_parts: int, eps: float) -> torch.Tensor:
    """Rows `index` int64 [T] of x [X, F] (None: all of them), each of `num_parts` parts normalised and scaled by weight [F] (None: not)."""
    launch = gather_norm_triton if x.is_cuda else gather_norm_reference
    return launch(x, index, weight, num_parts, eps)
