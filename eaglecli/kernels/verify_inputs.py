# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Where the nodes of the trees stand for the target: one launch between the draft's last step and the verify forward.

Node n of row b, at depth d under a root at index L (the row's length), has

    position min(L + d, context - 1)      slot slot_table[row, L + n]      allowed L + d < limit

The row's look-ahead has slots for nodes past its limit; such a node may not be accepted, and positions end with the context.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent


@dataclass(frozen=True, eq=False)
class VerifyInputs:
    """N nodes of each of B rows, packed row after row."""

    positions: torch.Tensor  # int32 [B * N]
    choice_positions: torch.Tensor  # int32 [B * N] of the token chosen at each node: one further on
    out_slots: torch.Tensor  # int32 [B * N]
    allowed: torch.Tensor  # bool [B, N] whether the node may be accepted
    query_start: torch.Tensor  # int32 [B + 1] multiples of N


@triton.jit
def _verify_inputs_kernel(
    rows_ptr, lengths_ptr, limits_ptr, slot_table_ptr, depths_ptr,
    positions_ptr, choice_positions_ptr, out_slots_ptr, allowed_ptr, query_start_ptr, base_lengths_ptr,
    num_columns, last_position, NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0)
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    length, limit = tl.load(lengths_ptr + row), tl.load(limits_ptr + row)
    node = tl.arange(0, NODE_BLOCK)
    inside = node < NUM_NODES
    nodes = batch_row * NUM_NODES + node
    index = length + tl.load(depths_ptr + nodes, mask=inside, other=0)
    position = tl.minimum(index, last_position)
    tl.store(positions_ptr + nodes, position, mask=inside)
    tl.store(choice_positions_ptr + nodes, position + 1, mask=inside)
    tl.store(out_slots_ptr + nodes, tl.load(slot_table_ptr + row * num_columns + length + node, mask=inside, other=0), mask=inside)
    tl.store(allowed_ptr + nodes, index < limit, mask=inside)
    tl.store(base_lengths_ptr + batch_row, length)
    if batch_row == 0:
        tl.store(query_start_ptr, 0)
    tl.store(query_start_ptr + batch_row + 1, (batch_row + 1) * NUM_NODES)


def verify_inputs_triton(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    slot_table: torch.Tensor,
    depths: torch.Tensor,
    context_length: int,
    base_lengths: torch.Tensor,
) -> VerifyInputs:
    """One program a row; see `verify_inputs`."""
    _check(rows, lengths, limits, slot_table, depths, base_lengths)
    num_rows, num_nodes = depths.shape

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    total = num_rows * num_nodes
    out = VerifyInputs(empty(total), empty(total), empty(total), empty(num_rows, num_nodes, dtype=torch.bool), empty(num_rows + 1))
    _verify_inputs_kernel[(num_rows,)](
        rows, lengths, limits, slot_table, depths,
        out.positions, out.choice_positions, out.out_slots, out.allowed, out.query_start, base_lengths,
        slot_table.shape[1], context_length - 1, NUM_NODES=num_nodes, NODE_BLOCK=triton.next_power_of_2(num_nodes), num_warps=1,
        **launch_options(rows.device),
    )  # fmt: skip
    return out


def verify_inputs_reference(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    slot_table: torch.Tensor,
    depths: torch.Tensor,
    context_length: int,
    base_lengths: torch.Tensor,
) -> VerifyInputs:
    """See `verify_inputs`."""
    _check(rows, lengths, limits, slot_table, depths, base_lengths)
    num_rows, num_nodes = depths.shape
    length = lengths[rows]
    base_lengths.copy_(length)
    index = length[:, None] + depths
    columns = length[:, None] + torch.arange(num_nodes, device=rows.device)
    positions = index.clamp(max=context_length - 1).flatten()
    return VerifyInputs(
        positions=positions,
        choice_positions=positions + 1,
        out_slots=slot_table[rows[:, None], columns].flatten(),
        allowed=index < limits[rows][:, None],
        query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device) * num_nodes,
    )


def _check(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    slot_table: torch.Tensor,
    depths: torch.Tensor,
    base_lengths: torch.Tensor,
) -> None:
    require("rows", rows, torch.int32, -1)
    if not rows.shape[0]:
        raise ValueError("verify_inputs needs at least one row")
    require("lengths", lengths, torch.int32, -1)
    require("limits", limits, torch.int32, lengths.shape[0])
    require("slot_table", slot_table, torch.int32, lengths.shape[0], -1)
    require("depths", depths, torch.int32, rows.shape[0], -1)
    require("base_lengths", base_lengths, torch.int32, rows.shape[0])


def verify_inputs(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    slot_table: torch.Tensor,
    depths: torch.Tensor,
    context_length: int,
    base_lengths: torch.Tensor,
) -> VerifyInputs:
    """Addressing of all nodes of all trees.

    rows int32 [B]; lengths and limits int32 [R]; slot_table int32 [R, C], lengths + N <= C; depths int32 [B, N] of the tree.
    The rows' lengths are written to base_lengths int32 [B].
    """
    launch = verify_inputs_triton if rows.is_cuda else verify_inputs_reference
    return launch(rows, lengths, limits, slot_table, depths, context_length, base_lengths)
