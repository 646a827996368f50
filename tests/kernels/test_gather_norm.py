"""Gathered rows, normalised whole or in parts; kernel and reference against float64."""

import pytest
import torch

from eaglecli.kernels.gather_norm import gather_norm_reference, gather_norm_triton
from eaglecli.kernels.rms_norm import rms_norm_reference
from tests.kernels.closeness import GPU_DTYPES, assert_near
from tests.kernels.random_trees import DEVICE

IMPLEMENTATIONS = pytest.mark.parametrize("gather", [gather_norm_reference, gather_norm_triton])
DTYPES = GPU_DTYPES if DEVICE == "cuda" else (torch.float32, torch.float16)
EPS = 1e-5


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "num_parts"), [(72, 1), (72, 3), (2100, 1)])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_each_part_of_the_rows_named_is_normalised_by_itself(gather, dtype, width, num_parts, indexed: bool, normed: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(4, width, generator=generator)).to(DEVICE, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE, dtype) if normed else None
    index = torch.tensor([3, 0, 0, 2, 1], device=DEVICE) if indexed else None
    out = gather(x, index, weight, num_parts, EPS)
    rows = x.double()[index] if indexed else x.double()
    if normed:
        parts = zip(rows.chunk(num_parts, 1), weight.double().chunk(num_parts), strict=True)
        rows = torch.cat([rms_norm_reference(part, part_weight, EPS) for part, part_weight in parts], 1)
    assert out.dtype == dtype
    assert_near(out, rows)


@IMPLEMENTATIONS
def test_parts_that_are_not_equal_are_a_value_error(gather) -> None:
    with pytest.raises(ValueError, match="3 equal parts"):
        gather(torch.zeros(2, 8, device=DEVICE), None, torch.zeros(8, device=DEVICE), 3, EPS)
