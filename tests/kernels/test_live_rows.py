"""Finished rows give way to the dummy row; kernel and reference."""

import pytest
import torch

from eaglecli.kernels.live_rows import live_rows_reference, live_rows_triton
from tests.kernels.random_trees import DEVICE, int32

IMPLEMENTATIONS = pytest.mark.parametrize("replace_finished", [live_rows_reference, live_rows_triton])


@IMPLEMENTATIONS
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_finished_rows_become_the_last_row_and_others_stay(replace_finished, count: int) -> None:
    finished = torch.arange(401, device=DEVICE) % 3 == 1
    finished[400] = True
    rows = torch.randperm(401, generator=torch.Generator().manual_seed(0))[:count].int().to(DEVICE)
    out = int32([-5] * (count + 1))
    replace_finished(rows, finished, out[:count])
    assert out.tolist() == [400 if row % 3 == 1 else row for row in rows.tolist()] + [-5]


@IMPLEMENTATIONS
def test_rows_of_another_dtype_are_a_value_error(replace_finished) -> None:
    with pytest.raises(ValueError, match="rows"):
        replace_finished(torch.tensor([0], device=DEVICE), torch.tensor([True], device=DEVICE), int32([0]))
