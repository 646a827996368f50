# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Root-mean-square normalisation of rows.

    y = x / sqrt(mean(x^2) + eps) * weight

x [T, H], weight [H], result [T, H] in the dtype of x; the arithmetic is float32 (float64 for float64 rows).
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization".
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.launch import launch_options

MAX_WIDTH = 65_536  # one program holds a whole row in registers


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + column, x * scale * weight, mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch one program per row; ValueError when the rows are not [T, H] with contiguous columns, or wider than MAX_WIDTH."""
    if x.dim() != 2 or x.stride(1) != 1 or weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"rms_norm needs x [T, H] with contiguous columns and weight [H], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.shape[1] > MAX_WIDTH:
        raise ValueError(f"rms_norm holds at most {MAX_WIDTH} columns, got {x.shape[1]}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    if out.numel():
        _rms_norm_kernel[(x.shape[0],)](
            x, weight, out, x.stride(0), eps,
            WIDTH=x.shape[1], BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch; x may have any number of leading dimensions."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the rows of x [T, H] and scale them by weight [H]; the result has the dtype of x."""
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
