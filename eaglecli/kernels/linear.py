# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Products with a weight matrix, and what surrounds them in a Llama layer.

- `linear(x[T,I], weight[O,I], bias[O]|None) -> [T,O]`
- `norm_linear`: RMS norm of the rows, then `linear` (queries, keys and values; the head).
- `linear_residual`: `linear`, then the residual stream is added (attention output, down projection).
- `norm_gate_up`: RMS norm, then silu(gate) * up, where the gate rows of the weight come first.

`norm_weight` None leaves the rows as they are. All tensors of a call share one dtype; accumulation is float32 or wider.
On the GPU `choose_tile` names `small_row_linear` (few rows, more of small weights) or the library's product, with the norm
and the activation as kernels around it.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.launch import dependent_launch_supported, launch_options
from eaglecli.kernels.linear_tiles import LibraryProduct, LinearTile, choose_tile
from eaglecli.kernels.rms_norm import rms_norm_reference, rms_norm_triton
from eaglecli.kernels.small_row_linear import small_row_linear

_SILU_BLOCK = 1024
_MAX_FEW_ROWS = 8  # rows up to which the CPU's product is turned round
_FEW_ROWS_GROUP = 4  # rows of such a product at a time


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of contiguous rows [T, 2I] (gate first): [T, I]; ValueError when not so."""
    if gate_up.dim() != 2 or not gate_up.is_contiguous() or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul needs contiguous rows of even width, got {tuple(gate_up.shape)}")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(width, _SILU_BLOCK))
        _silu_mul_kernel[grid](gate_up, out, width, BLOCK=_SILU_BLOCK, num_warps=4, **launch_options(gate_up.device))
    return out


def norm_linear_triton(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`norm_linear` on the GPU; ValueError when a shape, a stride or a dtype is not as the module says."""
    tile = _tile(x, weight)
    if not isinstance(tile, LibraryProduct):
        return small_row_linear(x, weight, norm_weight=norm_weight, eps=eps, bias=bias, tile=tile)
    return functional.linear(_norm(x, norm_weight, eps), weight, bias)


def linear_residual_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, overwrite: bool = False
) -> torch.Tensor:
    """`linear_residual` on the GPU; ValueError as `norm_linear_triton`."""
    tile = _tile(x, weight)
    if not isinstance(tile, LibraryProduct):
        return small_row_linear(x, weight, bias=bias, residual=residual, tile=tile)
    if bias is not None:
        return functional.linear(x, weight, bias).add_(residual)
    # the library adds to what is there: another place for the sum would be filled with a copy first
    return residual.addmm_(x, weight.t()) if overwrite else torch.addmm(residual, x, weight.t())


def norm_gate_up_triton(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`norm_gate_up` on the GPU; ValueError as `norm_linear_triton`."""
    tile = _tile(x, weight, gate_up=True)
    if not isinstance(tile, LibraryProduct):
        return small_row_linear(x, weight, norm_weight=norm_weight, eps=eps, bias=bias, gate_up=True, tile=tile)
    return silu_mul_triton(functional.linear(_norm(x, norm_weight, eps), weight, bias))


def _tile(x: torch.Tensor, weight: torch.Tensor, gate_up: bool = False) -> LinearTile:
    num_outputs = weight.shape[0] // (2 if gate_up else 1)
    return choose_tile(x.shape[0], num_outputs, weight.shape[1], gate_up, x.dtype, dependent_launch_supported(x.device))


def _norm(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if norm_weight is None else rms_norm_triton(x, norm_weight, eps)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` in plain torch."""
    if x.device.type == "cpu" and 0 < x.shape[0] <= _MAX_FEW_ROWS:
        out = torch.cat([_turned_product(rows, weight) for rows in x.split(_FEW_ROWS_GROUP)])
        return out if bias is None else out + bias
    return functional.linear(x, weight, bias)


def _turned_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, O] of rows [n, I], the weight on the M side, where the CPU library is 2 to 4 times as fast with so few.

    One row more where their number is odd: one takes 1.4 to 2.5 times as long as two, three 1.2 times as long as four.
    """
    even = functional.pad(rows, (0, 0, 0, rows.shape[0] % 2))
    return torch.mm(weight, even.t()).t()[: rows.shape[0]]


def norm_linear_reference(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`norm_linear` in plain torch."""
    rows = x if norm_weight is None else rms_norm_reference(x, norm_weight, eps)
    return linear_reference(rows, weight, bias)


def linear_residual_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """`linear_residual` in plain torch."""
    return residual + linear_reference(x, weight, bias)


def norm_gate_up_reference(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`norm_gate_up` in plain torch."""
    gate, up = norm_linear_reference(x, norm_weight, eps, weight, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, I] times weight [O, I] transposed, plus bias [O]: [T, O]."""
    if x.is_cuda:
        return norm_linear_triton(x, None, 0.0, weight, bias)
    return linear_reference(x, weight, bias)


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` of the RMS-normalised rows of x [T, H]: [T, O]."""
    if x.is_cuda:
        return norm_linear_triton(x, norm_weight, eps, weight, bias)
    return norm_linear_reference(x, norm_weight, eps, weight, bias)


def linear_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, overwrite: bool = False
) -> torch.Tensor:
    """residual [T, H] + `linear`(x [T, I], weight [H, I], bias [H]): a new tensor [T, H], or with `overwrite` perhaps `residual` itself."""
    if x.is_cuda:
        return linear_residual_triton(x, weight, bias, residual, overwrite)
    return residual.add_(linear_reference(x, weight, bias)) if overwrite else linear_residual_reference(x, weight, bias, residual)


def norm_gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(gate) * up of the RMS-normalised rows of x [T, H]; weight [2I, H] holds the gate rows, then the up rows: [T, I]."""
    if x.is_cuda:
        return norm_gate_up_triton(x, norm_weight, eps, weight, bias)
    return norm_gate_up_reference(x, norm_weight, eps, weight, bias)
