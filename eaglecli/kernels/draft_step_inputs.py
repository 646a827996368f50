# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Where the K beams of one tree step stand for the draft: one launch before each of its forwards.

Step s >= 1 runs the beams of level s - 1. Beam k of a row of length L takes slot slot_table[row, L + (s - 1) K + k] (throw-away:
the next extend or verify overwrites it) at position min(L + s - 1, context - 1), and proposes tokens for position L + s + 1. It
sees the row's prefix and, of the s K tail entries, its ancestors and itself.

    s = 1    no tail but itself; its hidden state is the row's own, which the last extend left
    s > 1    what its parent, row `beam_row` of the step before, saw, and itself; its hidden state is that parent's feedback
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent


@dataclass(frozen=True, eq=False)
class DraftStepInputs:
    """K beams of each of B rows, packed row after row."""

    positions: torch.Tensor  # int32 [B * K]
    proposal_positions: torch.Tensor  # int32 [B * K]
    out_slots: torch.Tensor  # int32 [B * K]
    hidden_index: torch.Tensor  # int32 [B * K] number of a row of the state at step 1, of the feedback of the step before later
    tail_mask: torch.Tensor  # bool [B, K, s * K]
    query_start: torch.Tensor  # int32 [B + 1] multiples of K
    lengths: torch.Tensor  # int32 [B] of the rows asked


@triton.jit
def _draft_step_inputs_kernel(
    rows_ptr, lengths_ptr, slot_table_ptr, beam_row_ptr, mask_before_ptr,
    positions_ptr, proposal_positions_ptr, out_slots_ptr, hidden_index_ptr, mask_ptr, query_start_ptr, out_lengths_ptr,
    step, num_columns, last_position, TOPK: tl.constexpr, BEAM_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0)
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    beam = tl.arange(0, BEAM_BLOCK)
    inside = beam < TOPK
    beams = batch_row * TOPK + beam
    width_before = (step - 1) * TOPK
    parent = tl.zeros([BEAM_BLOCK], tl.int32)
    hidden_index = parent + row.to(tl.int32)
    if mask_before_ptr is not None:
        parent = tl.load(beam_row_ptr + beams, mask=inside, other=0)
        hidden_index = batch_row * TOPK + parent
    tl.store(positions_ptr + beams, tl.minimum(length + step - 1, last_position) + tl.zeros_like(beam), mask=inside)
    tl.store(proposal_positions_ptr + beams, length + step + 1 + tl.zeros_like(beam), mask=inside)
    slots = tl.load(slot_table_ptr + row * num_columns + length + width_before + beam, mask=inside, other=0)
    tl.store(out_slots_ptr + beams, slots, mask=inside)
    tl.store(hidden_index_ptr + beams, hidden_index, mask=inside)

    entry = tl.arange(0, TAIL_BLOCK)
    sees = entry[None, :] == width_before + beam[:, None]
    if mask_before_ptr is not None:
        is_before = inside[:, None] & (entry < width_before)[None, :]
        before = (batch_row * TOPK + parent)[:, None] * width_before + entry[None, :]
        sees = sees | (tl.load(mask_before_ptr + before, mask=is_before, other=0) != 0)
    width = width_before + TOPK
    tl.store(mask_ptr + beams[:, None] * width + entry[None, :], sees, mask=inside[:, None] & (entry < width)[None, :])
    tl.store(out_lengths_ptr + batch_row, length)
    if batch_row == 0:
        tl.store(query_start_ptr, 0)
    tl.store(query_start_ptr + batch_row + 1, (batch_row + 1) * TOPK)


def draft_step_inputs_triton(
    step: int,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    beam_row: torch.Tensor,
    mask_before: torch.Tensor | None,
    context_length: int,
) -> DraftStepInputs:
    """One program a row; see `draft_step_inputs`."""
    _check(step, rows, lengths, slot_table, beam_row, mask_before)
    num_rows, topk = beam_row.shape

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    out = DraftStepInputs(
        positions=empty(num_rows * topk),
        proposal_positions=empty(num_rows * topk),
        out_slots=empty(num_rows * topk),
        hidden_index=empty(num_rows * topk),
        tail_mask=empty(num_rows, topk, step * topk, dtype=torch.bool),
        query_start=empty(num_rows + 1),
        lengths=empty(num_rows),
    )
    _draft_step_inputs_kernel[(num_rows,)](
        rows, lengths, slot_table, beam_row, mask_before,
        out.positions, out.proposal_positions, out.out_slots, out.hidden_index, out.tail_mask, out.query_start, out.lengths,
        step, slot_table.shape[1], context_length - 1,
        TOPK=topk, BEAM_BLOCK=triton.next_power_of_2(topk), TAIL_BLOCK=triton.next_power_of_2(step * topk), num_warps=1,
        **launch_options(rows.device),
    )  # fmt: skip
    return out


def draft_step_inputs_reference(
    step: int,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    beam_row: torch.Tensor,
    mask_before: torch.Tensor | None,
    context_length: int,
) -> DraftStepInputs:
    """See `draft_step_inputs`."""
    _check(step, rows, lengths, slot_table, beam_row, mask_before)
    num_rows, topk = beam_row.shape
    length, beam = lengths[rows], torch.arange(topk, device=rows.device)
    columns = length[:, None] + (step - 1) * topk + beam
    tail_mask = torch.eye(topk, dtype=torch.bool, device=rows.device).expand(num_rows, topk, topk)
    hidden_index = rows.repeat_interleave(topk)
    if mask_before is not None:
        parent = beam_row.long()[:, :, None].expand(-1, -1, mask_before.shape[2])
        tail_mask = torch.cat([mask_before.gather(1, parent), tail_mask], 2)
        hidden_index = (torch.arange(num_rows, device=rows.device)[:, None] * topk + beam_row).flatten()
    return DraftStepInputs(
        positions=(length + step - 1).clamp(max=context_length - 1).repeat_interleave(topk),
        proposal_positions=(length + step + 1).repeat_interleave(topk),
        out_slots=slot_table[rows[:, None], columns].flatten(),
        hidden_index=hidden_index.to(torch.int32),
        tail_mask=tail_mask.contiguous(),
        query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device) * topk,
        lengths=length,
    )


def _check(
    step: int, rows: torch.Tensor, lengths: torch.Tensor, slot_table: torch.Tensor, beam_row: torch.Tensor, mask_before: torch.Tensor | None
) -> None:
    require("beam_row", beam_row, torch.int32, -1, -1)
    num_rows, topk = beam_row.shape
    if not num_rows:
        raise ValueError("draft_step_inputs needs at least one row")
    require("rows", rows, torch.int32, num_rows)
    require("lengths", lengths, torch.int32, -1)
    require("slot_table", slot_table, torch.int32, lengths.shape[0], -1)
    if step < 1 or (step > 1) != (mask_before is not None):
        raise ValueError(f"step {step} of a tree starts at 1, and every later one needs the mask of the step before")
    if mask_before is not None:
        require("mask_before", mask_before, torch.bool, num_rows, topk, (step - 1) * topk)


def draft_step_inputs(
    step: int,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    beam_row: torch.Tensor,
    mask_before: torch.Tensor | None,
    context_length: int,
) -> DraftStepInputs:
    """Addressing of the beams of level step - 1.

    rows int32 [B]; lengths int32 [R]; slot_table int32 [R, C], lengths + step * K <= C; beam_row int32 [B, K], of `Beams`;
    mask_before: `tail_mask` of the step before, None at step 1.
    """
    launch = draft_step_inputs_triton if rows.is_cuda else draft_step_inputs_reference
    return launch(step, rows, lengths, slot_table, beam_row, mask_before, context_length)
