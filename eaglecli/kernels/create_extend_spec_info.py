# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""The draft's extend input after verification: the accepted runs of all rows, packed without padding (SGLang#6987).

Row b contributes extend_lens[b] tokens (accepted drafts + 1; 0 when finished or padding). Its token j has

    id tokens[b, j]      position L + j      slot slot_table[rows[b], L + j]      feature of verify output row b*N + path[b, j]

that is, each token is paired with the target's hidden state at the node that produced it. Runs are packed at the front; the
one launch also writes the whole tail (id 0, position 0, dummy slot 0, feature 0), so no stale entry of a fixed-shape buffer
can be read. A row's last token, at position L + extend_lens[b] - 1, makes the draft propose tokens for two positions on.
Every row works out its own start as the sum of the lengths before it: no cumulative-sum launch, no host.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent

_ROW_BLOCK = 256  # extend lengths summed at a time


@dataclass(frozen=True, eq=False)
class ExtendInfo:
    """E = B * (S + 1) packed entries, the real ones first."""

    input_ids: torch.Tensor  # int64 [E]
    positions: torch.Tensor  # int32 [E]
    out_slots: torch.Tensor  # int32 [E]
    feature_index: torch.Tensor  # int64 [E] row of the verify output, [B * N] rows
    query_start: torch.Tensor  # int32 [B+1]
    last_index: torch.Tensor  # int64 [B] packed index of each row's last token; 0 for a row without tokens
    verified_id: torch.Tensor  # int64 [B] each row's last token; 0 for a row without tokens
    proposal_positions: torch.Tensor  # int32 [B] of the tokens that a row's last token makes the draft propose


@triton.jit
def _create_extend_spec_info_kernel(
    tokens_ptr, extend_lens_ptr, lengths_ptr, rows_ptr, slot_table_ptr, path_ptr,
    input_ids_ptr, positions_ptr, out_slots_ptr, feature_index_ptr, query_start_ptr, last_index_ptr, verified_id_ptr,
    proposal_positions_ptr, num_rows, num_columns, num_nodes, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    row = tl.program_id(0)
    start, total = 0, 0
    for first in range(0, num_rows, ROW_BLOCK):
        other = first + tl.arange(0, ROW_BLOCK)
        lens = tl.load(extend_lens_ptr + other, mask=other < num_rows, other=0)
        start += tl.sum(tl.where(other < row, lens, 0), axis=0)
        total += tl.sum(lens, axis=0)
    extend_len = tl.load(extend_lens_ptr + row)
    length = tl.load(lengths_ptr + row)
    slot_row = tl.load(rows_ptr + row).to(tl.int64) * num_columns
    step = tl.arange(0, WIDTH_BLOCK)
    inside = step < WIDTH
    is_real = step < extend_len
    # A row's unused entries go to the tail, behind those of the rows before it: every entry is written exactly once.
    packed = tl.where(is_real, start + step, total + row * WIDTH - start + step - extend_len)
    token = tl.load(tokens_ptr + row * WIDTH + step, mask=is_real, other=0)
    slot = tl.load(slot_table_ptr + slot_row + length + step, mask=is_real & (length + step < num_columns), other=0)
    path_node = tl.load(path_ptr + row * WIDTH + step, mask=is_real, other=0)
    tl.store(input_ids_ptr + packed, token, mask=inside)
    tl.store(positions_ptr + packed, tl.where(is_real, length + step, 0), mask=inside)
    tl.store(out_slots_ptr + packed, slot, mask=inside)
    tl.store(feature_index_ptr + packed, tl.where(is_real, row * num_nodes + path_node, 0), mask=inside)
    tl.store(query_start_ptr + row, start)
    if row == num_rows - 1:
        tl.store(query_start_ptr + num_rows, total)
    tl.store(last_index_ptr + row, tl.where(extend_len > 0, start + extend_len - 1, 0))
    tl.store(verified_id_ptr + row, tl.sum(tl.where(step == extend_len - 1, token, 0), axis=0))
    tl.store(proposal_positions_ptr + row, length + extend_len + 1)


def create_extend_spec_info_triton(
    tokens: torch.Tensor,
    extend_lens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    slot_table: torch.Tensor,
    path: torch.Tensor,
    num_nodes: int,
) -> ExtendInfo:
    """Launch one program per row; see `create_extend_spec_info`."""
    _check(tokens, extend_lens, lengths, rows, slot_table, path)
    num_rows, width = tokens.shape

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=tokens.device)

    out = ExtendInfo(
        input_ids=empty(num_rows * width, torch.int64),
        positions=empty(num_rows * width, torch.int32),
        out_slots=empty(num_rows * width, torch.int32),
        feature_index=empty(num_rows * width, torch.int64),
        query_start=empty(num_rows + 1, torch.int32),
        last_index=empty(num_rows, torch.int64),
        verified_id=empty(num_rows, torch.int64),
        proposal_positions=empty(num_rows, torch.int32),
    )
    _create_extend_spec_info_kernel[(num_rows,)](
        tokens, extend_lens, lengths, rows, slot_table, path,
        out.input_ids, out.positions, out.out_slots, out.feature_index, out.query_start, out.last_index, out.verified_id,
        out.proposal_positions, num_rows, slot_table.shape[1], num_nodes,
        WIDTH=width, WIDTH_BLOCK=triton.next_power_of_2(width), ROW_BLOCK=_ROW_BLOCK, num_warps=1, **launch_options(tokens.device),
    )  # fmt: skip
    return out


def create_extend_spec_info_reference(
    tokens: torch.Tensor,
    extend_lens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    slot_table: torch.Tensor,
    path: torch.Tensor,
    num_nodes: int,
) -> ExtendInfo:
    """See `create_extend_spec_info`."""
    _check(tokens, extend_lens, lengths, rows, slot_table, path)
    num_rows, width = tokens.shape
    step = torch.arange(width, device=tokens.device)
    row = torch.arange(num_rows, device=tokens.device)[:, None]
    lens = extend_lens.to(torch.int64)[:, None]
    end = torch.cumsum(lens, dim=0)
    start, total = end - lens, end[-1:]
    is_real = step < lens
    # A row's unused entries go to the tail, behind those of the rows before it: every entry is written exactly once.
    packed = torch.where(is_real, start + step, total + row * width - start + step - lens)
    column = lengths.to(torch.int64)[:, None] + step
    slots = slot_table[rows.to(torch.int64)[:, None], column.clamp(0, slot_table.shape[1] - 1)]
    feature = row * num_nodes + path.to(torch.int64)

    def pack(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(num_rows * width, dtype=dtype, device=tokens.device)
        out[packed.flatten()] = torch.where(is_real, values, 0).to(dtype).flatten()
        return out

    last = (lens - 1).clamp_min(0)
    return ExtendInfo(
        input_ids=pack(tokens, torch.int64),
        positions=pack(column, torch.int32),
        out_slots=pack(slots, torch.int32),
        feature_index=pack(feature, torch.int64),
        query_start=torch.cat([torch.zeros_like(end[:1]), end])[:, 0].to(torch.int32),
        last_index=torch.where(lens > 0, end - 1, 0)[:, 0],
        verified_id=torch.where(lens > 0, tokens.gather(1, last), 0)[:, 0],
        proposal_positions=lengths + extend_lens + 1,
    )


def _check(
    tokens: torch.Tensor, extend_lens: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, slot_table: torch.Tensor, path: torch.Tensor
) -> None:
    require("tokens", tokens, torch.int64, -1, -1)
    num_rows, width = tokens.shape
    if not num_rows:
        raise ValueError("create_extend_spec_info needs at least one row")
    require("extend_lens", extend_lens, torch.int32, num_rows)
    require("lengths", lengths, torch.int32, num_rows)
    require("rows", rows, torch.int32, num_rows)
    require("slot_table", slot_table, torch.int32, -1, -1)
    require("path", path, torch.int32, num_rows, width)


def create_extend_spec_info(
    tokens: torch.Tensor,
    extend_lens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    slot_table: torch.Tensor,
    path: torch.Tensor,
    num_nodes: int,
) -> ExtendInfo:
    """Pack the accepted runs.

    tokens int64 [B, S+1] and path int32 [B, S+1] (of `accept_path`), extend_lens int32 [B] in 0 .. S+1, lengths int32 [B] (L,
    before the commit), rows int32 [B], slot_table int32 [R, C] (already permuted), num_nodes = N nodes verified per row.
    """
    if tokens.is_cuda:
        return create_extend_spec_info_triton(tokens, extend_lens, lengths, rows, slot_table, path, num_nodes)
    return create_extend_spec_info_reference(tokens, extend_lens, lengths, rows, slot_table, path, num_nodes)
