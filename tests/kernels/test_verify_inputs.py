"""Addressing of tree nodes for the target; kernel and reference against a loop."""

import pytest
import torch

from eaglecli.kernels.verify_inputs import verify_inputs_reference, verify_inputs_triton
from tests.kernels.random_trees import DEVICE, int32

IMPLEMENTATIONS = pytest.mark.parametrize("address", [verify_inputs_reference, verify_inputs_triton])


@IMPLEMENTATIONS
@pytest.mark.parametrize(("num_rows", "num_nodes"), [(1, 1), (3, 6), (5, 8)])
def test_every_node_has_its_position_slot_and_permission(address, num_rows: int, num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    context, num_columns = 40, 40 + num_nodes
    lengths = torch.randint(0, context, (7,), generator=generator)
    lengths[:2] = context - 1  # nodes past the context
    limits = (lengths + torch.randint(1, 6, (7,), generator=generator)).clamp(max=context)
    table = torch.randint(1, 10**6, (7, num_columns), generator=generator)
    depths = torch.randint(0, 5, (num_rows, num_nodes), generator=generator)
    rows = torch.randperm(7, generator=generator)[:num_rows]
    base_lengths = int32([-1] * num_rows)
    lengths_d, limits_d, table_d, depths_d, rows_d = (part.int().to(DEVICE) for part in (lengths, limits, table, depths, rows))
    out = address(rows_d, lengths_d, limits_d, table_d, depths_d, context, base_lengths)
    assert base_lengths.tolist() == lengths[rows].tolist()
    assert out.query_start.tolist() == [num_nodes * row for row in range(num_rows + 1)]
    nodes = [(line, row, node) for line, row in enumerate(rows.tolist()) for node in range(num_nodes)]
    index = [lengths[row].item() + depths[line, node].item() for line, row, node in nodes]
    assert out.positions.tolist() == [min(place, context - 1) for place in index]
    assert out.choice_positions.tolist() == [min(place, context - 1) + 1 for place in index]
    assert out.allowed.flatten().tolist() == [place < limits[row].item() for place, (_, row, _) in zip(index, nodes, strict=True)]
    assert out.out_slots.tolist() == [table[row, lengths[row] + node].item() for _, row, node in nodes]
    assert {part.dtype for part in (out.positions, out.choice_positions, out.out_slots, out.query_start)} == {torch.int32}


@IMPLEMENTATIONS
def test_depths_of_other_rows_are_a_value_error(address) -> None:
    with pytest.raises(ValueError, match="depths"):
        address(int32([0, 1]), int32([3, 4]), int32([9, 9]), int32([[1] * 9] * 2), int32([[0]]), 8, int32([0, 0]))
