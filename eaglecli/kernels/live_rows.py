# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Replace finished rows by the dummy row: the first launch of an iteration.

    live[b] = R - 1 where finished[rows[b]], else rows[b]

The dummy row, the last of R, owns the dummy slot alone, so what runs under its number leaves no trace.
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent

_BLOCK = 256  # rows of one program


@triton.jit
def _live_rows_kernel(rows_ptr, finished_ptr, live_ptr, num_rows, dummy_row, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    start_dependent(DEPENDENT)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    finished = tl.load(finished_ptr + row, mask=inside, other=1) != 0
    tl.store(live_ptr + index, tl.where(finished, dummy_row, row), mask=inside)


def live_rows_triton(rows: torch.Tensor, finished: torch.Tensor, out: torch.Tensor) -> None:
    """One launch; see `live_rows`."""
    _check(rows, finished, out)
    num_rows = rows.shape[0]
    if num_rows:
        _live_rows_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            rows, finished, out, num_rows, finished.shape[0] - 1, BLOCK=_BLOCK, num_warps=1, **launch_options(rows.device)
        )


def live_rows_reference(rows: torch.Tensor, finished: torch.Tensor, out: torch.Tensor) -> None:
    """See `live_rows`."""
    _check(rows, finished, out)
    out.copy_(torch.where(finished[rows], finished.shape[0] - 1, rows))


def _check(rows: torch.Tensor, finished: torch.Tensor, out: torch.Tensor) -> None:
    require("rows", rows, torch.int32, -1)
    require("finished", finished, torch.bool, -1)
    require("out", out, torch.int32, rows.shape[0])


def live_rows(rows: torch.Tensor, finished: torch.Tensor, out: torch.Tensor) -> None:
    """Write the live rows, int32 [B], of rows int32 [B] to `out`; finished bool [R]."""
    if rows.is_cuda:
        live_rows_triton(rows, finished, out)
    else:
        live_rows_reference(rows, finished, out)
