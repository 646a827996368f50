"""What is kept of tokens that the draft did not see; kernel and reference."""

import pytest
import torch

from eaglecli.kernels.keep_features import keep_features_reference, keep_features_triton
from tests.kernels.random_trees import DEVICE, int32

IMPLEMENTATIONS = pytest.mark.parametrize("keep", [keep_features_reference, keep_features_triton])


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [12, 2100])
def test_a_token_goes_to_the_place_of_its_position_in_its_rows_ring(keep, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    features, ring = (torch.randn(*shape, width, generator=generator).to(DEVICE) for shape in ((3,), (5, 4)))
    tokens, ring_tokens = torch.tensor([7, 8, 9], device=DEVICE), torch.zeros(5, 4, dtype=torch.int64, device=DEVICE)
    before = ring.clone()
    keep(features, tokens, int32([0, 6, 103]), int32([3, 0, 2]), ring, ring_tokens)
    places = [(3, 0), (0, 2), (2, 3)]
    for index, place in enumerate(places):
        assert torch.equal(ring[place], features[index])
        assert ring_tokens[place] == tokens[index]
        before[place] = ring[place]
    assert torch.equal(ring, before)
    assert int(ring_tokens.count_nonzero()) == 3


@IMPLEMENTATIONS
def test_a_ring_of_another_width_is_a_value_error(keep) -> None:
    ring, ring_tokens = torch.zeros(2, 4, 9, device=DEVICE), torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="ring"):
        keep(torch.zeros(1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE), int32([0]), int32([0]), ring, ring_tokens)
