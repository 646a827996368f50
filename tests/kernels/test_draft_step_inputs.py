"""Addressing of the beams of tree steps; kernel and reference against ancestors followed one by one."""

import pytest
import torch

from eaglecli.kernels.draft_step_inputs import draft_step_inputs_reference, draft_step_inputs_triton
from tests.kernels.random_trees import DEVICE, int32

IMPLEMENTATIONS = pytest.mark.parametrize("address", [draft_step_inputs_reference, draft_step_inputs_triton])
CONTEXT = 30


@IMPLEMENTATIONS
@pytest.mark.parametrize(("num_rows", "topk", "num_steps"), [(1, 1, 4), (3, 2, 3), (2, 5, 3)])
def test_beams_see_their_ancestors_and_themselves_at_their_own_places(address, num_rows: int, topk: int, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(topk)
    lengths = torch.tensor([3, CONTEXT - 2, 11, 0])
    table = torch.randint(1, 10**6, (4, CONTEXT + num_steps * topk), generator=generator)
    rows = torch.tensor([1, 2, 0][:num_rows])
    rows_d, lengths_d, table_d = (part.int().to(DEVICE) for part in (rows, lengths, table))
    seen = [[set() for _ in range(topk)] for _ in range(num_rows)]  # tail entries of each beam of the step before
    mask = None
    for step in range(1, num_steps + 1):
        parent = torch.randint(0, topk, (num_rows, topk), generator=generator)
        out = address(step, rows_d, lengths_d, table_d, parent.int().to(DEVICE), mask, CONTEXT)
        mask, first = out.tail_mask, (step - 1) * topk
        inherited = [[seen[line][parent[line, beam]] if step > 1 else set() for beam in range(topk)] for line in range(num_rows)]
        seen = [[inherited[line][beam] | {first + beam} for beam in range(topk)] for line in range(num_rows)]
        expected = [[[entry in seen[line][beam] for entry in range(step * topk)] for beam in range(topk)] for line in range(num_rows)]
        assert mask.tolist() == expected
        beams = [(line, row, beam) for line, row in enumerate(rows.tolist()) for beam in range(topk)]
        length_of = [lengths[row].item() for _, row, _ in beams]
        assert out.positions.tolist() == [min(length + step - 1, CONTEXT - 1) for length in length_of]
        assert out.proposal_positions.tolist() == [length + step + 1 for length in length_of]
        assert out.out_slots.tolist() == [table[row, lengths[row] + first + beam].item() for _, row, beam in beams]
        before = [line * topk + parent[line, beam].item() for line, _, beam in beams]
        assert out.hidden_index.tolist() == (before if step > 1 else [row for _, row, _ in beams])
        assert out.query_start.tolist() == [topk * line for line in range(num_rows + 1)]
        assert out.lengths.tolist() == lengths[rows].tolist()
        integers = (out.positions, out.proposal_positions, out.out_slots, out.hidden_index, out.query_start, out.lengths)
        assert {part.dtype for part in integers} == {torch.int32}


@IMPLEMENTATIONS
def test_a_later_step_without_the_mask_before_it_is_a_value_error(address) -> None:
    with pytest.raises(ValueError, match="needs the mask"):
        address(2, int32([0]), int32([3]), int32([[1] * 9]), int32([[0]]), None, 8)
