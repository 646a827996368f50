# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Matrix products of a few rows (a decoding step, a tree) with what surrounds them in one launch.

    y = norm(x) @ weight^T + bias          x [T, K], weight [N, K]
    out = y | y + residual | silu(y[:, :N/2]) * y[:, N/2:]

The weight is read once, so the bytes of the weight are the floor of the time. The RMS norm costs no pass over x: rows
are scaled by the norm weight as they are loaded, their squares are summed along, and 1 / rms multiplies the finished sums.

Two kernels. *vector* (one row): products and sums on the arithmetic units, the next piece of the weight on its way in
registers. *matrix* (up to 64 rows): tiles of `tl.dot` with pipelined loads. Neither splits the inputs over programs, so a
row's numbers depend on the tile alone, never on the other rows: a caller that fixes the tile has row invariance.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.launch import launch_options

MAX_ROWS = 64


@dataclass(frozen=True)
class LinearTile:
    """What one program computes: block_rows (0: the vector kernel) x block_outputs, block_inputs at a time."""

    block_rows: int
    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int
    prefetch_inputs: int = 0  # columns of the weight asked into L2 before the wait for the previous kernel


ROW_INVARIANT_TILE = LinearTile(16, 32, 128, 4, 4)

# (1, 8 or 64 rows, outputs, inputs, gate and up) -> the fastest bfloat16 tile on an H200, lines by benchmarks/bench_kernels_model.py
MEASURED_TILES: dict[tuple[int, int, int, bool], LinearTile] = {}


@triton.jit
def _prefetch_weight(pointers):
    """Ask for the cache lines of these addresses in L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _weight_tile(weight_ptr, outputs, inputs, NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr):
    """[outputs, inputs] of the weight, zero outside; every weight is used once, so the caches need not keep it."""
    pointers = weight_ptr + outputs.to(tl.int64)[:, None] * NUM_INPUTS + inputs[None, :]
    inside = (outputs < NUM_OUTPUTS)[:, None] & (inputs < NUM_INPUTS)[None, :]
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _vector_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, eps,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, GATE_UP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    up_ptr = weight_ptr + NUM_OUTPUTS * NUM_INPUTS
    if DEPENDENT:
        gdc_launch_dependents()
    # weights are constant: their first piece comes in while the kernel before is still running
    weight = _weight_tile(weight_ptr, outputs, inputs, NUM_OUTPUTS, NUM_INPUTS)
    if GATE_UP:
        up_weight = _weight_tile(up_ptr, outputs, inputs, NUM_OUTPUTS, NUM_INPUTS)
    if DEPENDENT:
        gdc_wait()
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        current = start + inputs
        inside = current < NUM_INPUTS
        x = tl.load(x_ptr + current, mask=inside, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            squares += x * x
            x *= tl.load(norm_weight_ptr + current, mask=inside, other=0.0).to(tl.float32)
        this_weight = weight
        weight = _weight_tile(weight_ptr, outputs, current + BLOCK_K, NUM_OUTPUTS, NUM_INPUTS)
        if GATE_UP:
            this_up_weight = up_weight
            up_weight = _weight_tile(up_ptr, outputs, current + BLOCK_K, NUM_OUTPUTS, NUM_INPUTS)
            up_sums += this_up_weight.to(tl.float32) * x[None, :]
        sums += this_weight.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    up = tl.sum(up_sums, 1)
    if norm_weight_ptr is not None:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / NUM_INPUTS + eps)
        y *= scale
        up *= scale
    exists = outputs < NUM_OUTPUTS
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=exists, other=0.0).to(tl.float32)
        if GATE_UP:
            up += tl.load(bias_ptr + NUM_OUTPUTS + outputs, mask=exists, other=0.0).to(tl.float32)
    if GATE_UP:
        y = _silu(y) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + outputs, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y, mask=exists)


@triton.jit(do_not_specialize=["num_rows"])  # or 1, 16 and other numbers of rows would each be compiled
def _matrix_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, x_stride, eps,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, GATE_UP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = rows < num_rows
    up_ptr = weight_ptr + NUM_OUTPUTS * NUM_INPUTS
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH:
            lines = tl.arange(0, PREFETCH // 64) * 64  # 128-byte lines of 16-bit weights
            first_output = tl.minimum(outputs, NUM_OUTPUTS - 1).to(tl.int64)[:, None] * NUM_INPUTS
            _prefetch_weight(weight_ptr + first_output + lines[None, :])
            if GATE_UP:
                _prefetch_weight(up_ptr + first_output + lines[None, :])
        gdc_wait()
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        inside = inputs < NUM_INPUTS
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :], mask=row_exists[:, None] & inside[None, :], other=0.0)
        if norm_weight_ptr is not None:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_weight_ptr + inputs, mask=inside, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
        weight = _weight_tile(weight_ptr, outputs, inputs, NUM_OUTPUTS, NUM_INPUTS)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
        if GATE_UP:
            up_weight = _weight_tile(up_ptr, outputs, inputs, NUM_OUTPUTS, NUM_INPUTS)
            up_sums = tl.dot(x, tl.trans(up_weight), up_sums, input_precision="ieee")
    if norm_weight_ptr is not None:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / NUM_INPUTS + eps)
        sums *= scale[:, None]
        up_sums *= scale[:, None]
    output_exists = outputs < NUM_OUTPUTS
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
        if GATE_UP:
            up_sums += tl.load(bias_ptr + NUM_OUTPUTS + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    if GATE_UP:
        sums = _silu(sums) * up_sums
    exists = row_exists[:, None] & output_exists[None, :]
    place = rows.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    if residual_ptr is not None:
        sums += tl.load(residual_ptr + place, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, sums, mask=exists)


def choose_tile(num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool, dtype: torch.dtype) -> LinearTile:
    """The tile of a shape. num_outputs counts the outputs written, half the weight's rows for gate and up."""
    if dtype not in (torch.bfloat16, torch.float16):
        return _wide_tile(num_rows, num_inputs)
    row_bucket = 1 if num_rows == 1 else 8 if num_rows <= 16 else 64
    measured = MEASURED_TILES.get((row_bucket, num_outputs, num_inputs, gate_up))
    return measured or _estimated_tile(num_rows, num_outputs, num_inputs, gate_up)


def _estimated_tile(num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool) -> LinearTile:
    if num_rows == 1:
        block_outputs = (4 if num_outputs < 8192 else 8) // (2 if gate_up else 1)
        return LinearTile(0, block_outputs, min(1024, triton.next_power_of_2(num_inputs)), 4, 1)
    block_rows = max(16, triton.next_power_of_2(min(num_rows, MAX_ROWS)))
    block_inputs = 64 if num_inputs <= 1024 else 128
    # enough programs for two on each of ~132 multiprocessors, else the smallest tile of the matrix unit
    block_outputs = 16
    while block_outputs < (32 if gate_up else 64) and num_outputs >= 264 * 2 * block_outputs:
        block_outputs *= 2
    return LinearTile(block_rows, block_outputs, block_inputs, 4, 4)


def _wide_tile(num_rows: int, num_inputs: int) -> LinearTile:
    """float32: no matrix unit, so small tiles that stay in registers."""
    if num_rows == 1:
        return LinearTile(0, 4, min(512, triton.next_power_of_2(num_inputs)), 4, 1)
    return LinearTile(16, 32, 32, 4, 3)


def _check(
    x: torch.Tensor, norm_weight: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or weight.dim() != 2 or not weight.is_contiguous() or weight.shape[1] != x.shape[1]:
        raise ValueError(f"a linear needs x [T, K] of contiguous columns and a contiguous weight [N, K], got {x.shape}, {weight.shape}")
    for name, vector, size in (("norm_weight", norm_weight, weight.shape[1]), ("bias", bias, weight.shape[0])):
        if vector is not None and (vector.shape != (size,) or not vector.is_contiguous()):
            raise ValueError(f"{name} must be a contiguous vector of {size}, got {tuple(vector.shape)}")
    if residual is not None and (residual.shape != (x.shape[0], weight.shape[0]) or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous [{x.shape[0]}, {weight.shape[0]}], got {tuple(residual.shape)}")
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in (weight, bias, residual)):
        raise ValueError(f"weight, bias and residual must have the dtype of x, {x.dtype}")


def small_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate_up: bool = False,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """One launch of the module's formula: [T, N], or [T, N/2] with gate_up (then without residual); tile None takes `choose_tile`.

    With float16 rows a norm_weight is refused: x * norm_weight before the scaling leaves the range of float16.
    """
    _check(x, norm_weight, weight, bias, residual)
    if norm_weight is not None and x.dtype == torch.float16:
        raise ValueError("float16 rows must be normalised before small_row_linear")
    if gate_up and (residual is not None or weight.shape[0] % 2):
        raise ValueError("gate_up needs an even number of weight rows and no residual")
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if gate_up else weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    tile = choose_tile(num_rows, num_outputs, num_inputs, gate_up, x.dtype) if tile is None else tile
    shape = {"NUM_OUTPUTS": num_outputs, "NUM_INPUTS": num_inputs, "GATE_UP": gate_up}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **launch_options(x.device)}
    tensors = (x, norm_weight, weight, bias, residual, out)
    output_blocks = triton.cdiv(num_outputs, tile.block_outputs)
    if tile.block_rows == 0:
        if num_rows != 1:
            raise ValueError(f"the vector kernel takes one row, got {num_rows}")
        _vector_kernel[(output_blocks,)](*tensors, eps, **shape, BLOCK_N=tile.block_outputs, BLOCK_K=tile.block_inputs, **options)
        return out
    _matrix_kernel[(output_blocks, triton.cdiv(num_rows, tile.block_rows))](
        *tensors, num_rows, x.stride(0), eps, **shape,
        BLOCK_M=tile.block_rows, BLOCK_N=tile.block_outputs, BLOCK_K=tile.block_inputs, PREFETCH=tile.prefetch_inputs, **options,
    )  # fmt: skip
    return out
