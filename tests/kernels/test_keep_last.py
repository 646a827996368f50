"""What each row's last token leaves; kernel and reference."""

import pytest
import torch

from eaglecli.kernels.keep_last import keep_last_reference, keep_last_triton
from tests.kernels.random_trees import DEVICE, int32

IMPLEMENTATIONS = pytest.mark.parametrize("keep", [keep_last_reference, keep_last_triton])


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [8, 1100])
def test_feedback_goes_to_the_rows_state_and_head_input_comes_out(keep, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    head_input, feedback, state = (torch.randn(count, width, generator=generator).to(DEVICE) for count in (6, 6, 5))
    before = state.clone()
    out = keep(head_input, feedback, torch.tensor([2, 5, 0], device=DEVICE), int32([3, 0, 2]), state)
    assert torch.equal(out, head_input[[2, 5, 0]])
    assert torch.equal(state[[3, 0, 2]], feedback[[2, 5, 0]])
    assert torch.equal(state[[1, 4]], before[[1, 4]])


@IMPLEMENTATIONS
def test_a_state_of_another_width_is_a_value_error(keep) -> None:
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="draft_hidden"):
        keep(x, x, torch.tensor([0], device=DEVICE), int32([0]), torch.zeros(2, 9, device=DEVICE))
