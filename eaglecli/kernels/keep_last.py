# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Of a packed draft forward keep what each row's last token leaves: its feedback goes to the row's state, its head input comes out.

draft_hidden[rows[b]] = feedback[last_index[b]]      out[b] = head_input[last_index[b]]
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent

_BLOCK = 1024  # columns of one program


@triton.jit
def _keep_last_kernel(
    head_input_ptr, feedback_ptr, last_index_ptr, rows_ptr, draft_hidden_ptr, out_ptr, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    source = tl.load(last_index_ptr + batch_row) * width + column
    tl.store(draft_hidden_ptr + row * width + column, tl.load(feedback_ptr + source, mask=inside), mask=inside)
    tl.store(out_ptr + batch_row * width + column, tl.load(head_input_ptr + source, mask=inside), mask=inside)


def keep_last_triton(
    head_input: torch.Tensor, feedback: torch.Tensor, last_index: torch.Tensor, rows: torch.Tensor, draft_hidden: torch.Tensor
) -> torch.Tensor:
    """One launch; see `keep_last`."""
    _check(head_input, feedback, last_index, rows, draft_hidden)
    num_rows, width = rows.shape[0], head_input.shape[1]
    out = torch.empty(num_rows, width, dtype=head_input.dtype, device=head_input.device)
    if out.numel():
        _keep_last_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            head_input, feedback, last_index, rows, draft_hidden, out, width, BLOCK=_BLOCK, **launch_options(head_input.device)
        )
    return out


def keep_last_reference(
    head_input: torch.Tensor, feedback: torch.Tensor, last_index: torch.Tensor, rows: torch.Tensor, draft_hidden: torch.Tensor
) -> torch.Tensor:
    """See `keep_last`."""
    _check(head_input, feedback, last_index, rows, draft_hidden)
    draft_hidden[rows] = feedback[last_index]
    return head_input[last_index]


def _check(
    head_input: torch.Tensor, feedback: torch.Tensor, last_index: torch.Tensor, rows: torch.Tensor, draft_hidden: torch.Tensor
) -> None:
    require("head_input", head_input, head_input.dtype, -1, -1)
    require("feedback", feedback, head_input.dtype, *head_input.shape)
    require("rows", rows, torch.int32, -1)
    require("last_index", last_index, torch.int64, rows.shape[0])
    require("draft_hidden", draft_hidden, head_input.dtype, -1, head_input.shape[1])


def keep_last(
    head_input: torch.Tensor, feedback: torch.Tensor, last_index: torch.Tensor, rows: torch.Tensor, draft_hidden: torch.Tensor
) -> torch.Tensor:
    """Head input [B, H] of each row's last token; its feedback is written to draft_hidden [R, H].

    head_input and feedback [T, H], may be one tensor; last_index int64 [B] of packed tokens; rows int32 [B]. A row named twice
    (the dummy row) holds one of the values.
    """
    launch = keep_last_triton if rows.is_cuda else keep_last_reference
    return launch(head_input, feedback, last_index, rows, draft_hidden)
