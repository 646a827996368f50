"""RMS norm kernel against its float64 reference."""

import pytest
import torch

from eaglecli.kernels.rms_norm import MAX_WIDTH, rms_norm_reference, rms_norm_triton
from tests.kernels.closeness import GPU_DTYPES, assert_near, poison_free_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = (3 * torch.randn(rows, width, device=device)).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    poison_free_memory(device)
    assert_near(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 80), (2, 576), (5, 1024)])
def test_every_row_is_normalised_like_the_reference(rows: int, width: int) -> None:
    check(rows, width, torch.float32, DEVICE)


def test_rows_of_a_wider_tensor_are_read_with_their_stride() -> None:
    x, weight = torch.randn(4, 96, device=DEVICE)[:, 16:80], torch.randn(64, device=DEVICE)
    assert_near(rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x.double(), weight.double(), 1e-6))


def test_eps_keeps_a_zero_row_finite() -> None:
    out = rms_norm_triton(torch.zeros(1, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-5)
    assert torch.equal(out, torch.zeros_like(out))


def test_no_rows_give_no_rows() -> None:
    assert rms_norm_triton(torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(4, 8).t(), torch.ones(4)),
        (torch.zeros(2, 8), torch.ones(4)),
        (torch.zeros(1, MAX_WIDTH + 1), torch.ones(MAX_WIDTH + 1)),
    ],
)
def test_a_broken_contract_is_a_value_error(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm_triton(x, weight, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 4096), (300, 1111), (3, 16384)])
def test_compiled_kernel_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    check(rows, width, dtype, "cuda")
