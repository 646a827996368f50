# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""After a commit: add the tokens that each row has put out to its counts, which `adjust_logits` reads at the next choice.

counts[rows[b], token] += 2 for each of the first `emitted` tokens of record b. A row that asks for no adjustment is left alone.
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.adjust_logits import AdjustmentTensors
from eaglecli.kernels.contract import require


@triton.jit
def _count_tokens_kernel(rows_ptr, record_ptr, is_adjusted_ptr, counts_ptr, vocab_size, RUN_WIDTH: tl.constexpr, STEP_BLOCK: tl.constexpr):
    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    record_ptr += batch_row * (RUN_WIDTH + 3)
    if tl.load(is_adjusted_ptr + row) != 0:
        num_emitted = tl.load(record_ptr + RUN_WIDTH + 1)
        step = tl.arange(0, STEP_BLOCK)
        token = tl.load(record_ptr + step, mask=step < num_emitted, other=0)
        # atomic: a run may hold one token twice
        tl.atomic_add(counts_ptr + row * vocab_size + token, tl.full([STEP_BLOCK], 2, tl.int32), mask=step < num_emitted)


def count_tokens_triton(adjustments: AdjustmentTensors, rows: torch.Tensor, record: torch.Tensor) -> None:
    """One launch, one program a row; see `count_tokens`."""
    _check(adjustments, rows, record)
    run_width = record.shape[1] - 3
    if rows.shape[0]:
        _count_tokens_kernel[(rows.shape[0],)](
            rows, record, adjustments.is_adjusted, adjustments.counts, adjustments.counts.shape[1],
            RUN_WIDTH=run_width, STEP_BLOCK=triton.next_power_of_2(run_width), num_warps=1,
        )  # fmt: skip


def count_tokens_reference(adjustments: AdjustmentTensors, rows: torch.Tensor, record: torch.Tensor) -> None:
    """See `count_tokens`."""
    _check(adjustments, rows, record)
    step = torch.arange(record.shape[1] - 3, device=record.device)
    is_counted = (step < record[:, -2, None]) & adjustments.is_adjusted[rows][:, None]
    batch_row, step = torch.nonzero(is_counted, as_tuple=True)
    token, row = record[batch_row, step].long(), rows[batch_row].long()
    adjustments.counts.index_put_((row, token), adjustments.counts.new_full((), 2), accumulate=True)


def _check(adjustments: AdjustmentTensors, rows: torch.Tensor, record: torch.Tensor) -> None:
    require("rows", rows, torch.int32, -1)
    require("record", record, torch.int32, rows.shape[0], -1)
    require("is_adjusted", adjustments.is_adjusted, torch.bool, -1)
    require("counts", adjustments.counts, torch.int32, adjustments.is_adjusted.shape[0], -1)


def count_tokens(adjustments: AdjustmentTensors, rows: torch.Tensor, record: torch.Tensor) -> None:
    """Count what a commit emitted; changes `adjustments.counts`.

    rows int32 [B], those with an adjustment distinct; record int32 [B, W + 3], see `commit_run.RunOutputs`.
    """
    launch = count_tokens_triton if rows.is_cuda else count_tokens_reference
    launch(adjustments, rows, record)
