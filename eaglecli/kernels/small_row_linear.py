# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Matrix products of a few rows (a decoding step, a tree) with what surrounds them.

    y = norm(x) @ weight^T + bias          x [T, K], weight [N, K]
    out = y | y + residual | silu(y[:, :N/2]) * y[:, N/2:]

The bytes of the weight are the floor of the time: up to 64 rows of a large weight, or 32 of a small one, read it once; more rows
of a small one read it from the L2 again.

*vector* (one row): products and sums on the arithmetic units, the next piece of the weight on its way in registers. The
RMS norm costs no pass over x: the row is scaled by the norm weight as it is loaded, its squares are summed along, and
1 / rms multiplies the finished sums.
*matrix* (more rows): outputs are the long side of the matrix unit's tile and rows of x the short one, so that few rows
waste little, and both operands go from memory to shared memory without passing registers; norms are a launch before.
The tile alone decides in which order inputs are added, never the other rows: a caller that fixes the tile has row invariance.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.last_arrival import arrival_counters, is_last_arrival
from eaglecli.kernels.launch import launch_options
from eaglecli.kernels.linear_tiles import SMALL_WEIGHT_BYTES, LibraryProduct, MatrixTile, VectorTile, choose_tile
from eaglecli.kernels.rms_norm import rms_norm_triton


@triton.jit
def _weight_piece(weight_ptr, outputs, inputs, NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr):
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
    weight = _weight_piece(weight_ptr, outputs, inputs, NUM_OUTPUTS, NUM_INPUTS)
    if GATE_UP:
        up_weight = _weight_piece(up_ptr, outputs, inputs, NUM_OUTPUTS, NUM_INPUTS)
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
        weight = _weight_piece(weight_ptr, outputs, current + BLOCK_K, NUM_OUTPUTS, NUM_INPUTS)
        if GATE_UP:
            this_up_weight = up_weight
            up_weight = _weight_piece(up_ptr, outputs, current + BLOCK_K, NUM_OUTPUTS, NUM_INPUTS)
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


@triton.jit
def _step_pointers(pointer, lines, stride, start, BLOCK_INPUTS: tl.constexpr, PARTS: tl.constexpr):
    """Addresses and input numbers of one step: [lines, inputs], or [parts, lines, inputs / parts]."""
    width: tl.constexpr = BLOCK_INPUTS // PARTS
    if PARTS == 1:
        inputs = (start + tl.arange(0, BLOCK_INPUTS))[None, :]
        offsets = lines.to(tl.int64)[:, None] * stride
    else:
        inputs = (start + tl.arange(0, PARTS)[:, None] * width + tl.arange(0, width)[None, :])[:, None, :]
        offsets = (lines.to(tl.int64) * stride)[None, :, None]
    return pointer + offsets + inputs, inputs


@triton.jit
def _prefetch(weight_ptr, outputs, first_input, NUM_INPUTS: tl.constexpr, COUNT: tl.constexpr):
    """Ask for COUNT inputs from first_input on of each of `outputs` to be brought to the L2, without waiting for them."""
    line_inputs: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    num_lines: tl.constexpr = triton.next_power_of_2((COUNT + line_inputs - 1) // line_inputs)
    inputs = tl.minimum(first_input + tl.arange(0, num_lines) * line_inputs, NUM_INPUTS - 1)
    pointers = weight_ptr + outputs.to(tl.int64)[:, None] * NUM_INPUTS + inputs[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _weight_step(weight_ptr, outputs, start, NUM_INPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, PARTS: tl.constexpr):
    """The weights of one step; `outputs` must exist."""
    pointers, inputs = _step_pointers(weight_ptr, outputs, NUM_INPUTS, start, BLOCK_INPUTS, PARTS)
    if NUM_INPUTS % BLOCK_INPUTS == 0:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=inputs < NUM_INPUTS, other=0.0, eviction_policy="evict_first")


@triton.jit
def _rows_step(x_ptr, rows, num_rows, x_stride, start, NUM_INPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, PARTS: tl.constexpr):
    """The columns of x of one step, rows last; zero for rows that do not exist."""
    pointers, inputs = _step_pointers(x_ptr, rows, x_stride, start, BLOCK_INPUTS, PARTS)
    exists = (rows < num_rows)[:, None] if PARTS == 1 else (rows < num_rows)[None, :, None]
    if NUM_INPUTS % BLOCK_INPUTS != 0:
        exists = exists & (inputs < NUM_INPUTS)
    x = tl.load(pointers, mask=exists, other=0.0)
    return tl.trans(x) if PARTS == 1 else tl.permute(x, (0, 2, 1))


@triton.jit
def _finish_matrix(
    sums, up_sums, bias_ptr, residual, out_ptr, place, outputs, exists,
    NUM_OUTPUTS: tl.constexpr, GATE_UP: tl.constexpr,
):  # fmt: skip
    """Bias, activation and residual of the sums [rows, outputs], and the store."""
    output_exists = outputs < NUM_OUTPUTS
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
        if GATE_UP:
            up_sums += tl.load(bias_ptr + NUM_OUTPUTS + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    if GATE_UP:
        sums = _silu(sums) * up_sums
    if residual is not None:
        sums += residual.to(tl.float32)
    tl.store(out_ptr + place, sums, mask=exists)


@triton.jit(do_not_specialize=["num_rows"])  # or 1, 16 and other numbers of rows would each be compiled
def _matrix_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr, num_rows, x_stride,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, GATE_UP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows, split); partial is float32 [SPLITS, 2 if GATE_UP else 1, num_rows, NUM_OUTPUTS]."""
    split_inputs: tl.constexpr = (NUM_INPUTS + SPLITS * BLOCK_INPUTS - 1) // (SPLITS * BLOCK_INPUTS) * BLOCK_INPUTS
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = (rows < num_rows)[:, None] & (outputs < NUM_OUTPUTS)[None, :]
    place = rows.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    real_outputs = tl.minimum(outputs, NUM_OUTPUTS - 1)
    up_ptr = weight_ptr + NUM_OUTPUTS * NUM_INPUTS
    if DEPENDENT:
        first_input = tl.program_id(2) * split_inputs
        _prefetch(weight_ptr, real_outputs, first_input, NUM_INPUTS, split_inputs)
        if GATE_UP:
            _prefetch(up_ptr, real_outputs, first_input, NUM_INPUTS, split_inputs)
        gdc_wait()
        gdc_launch_dependents()
    residual = None
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=exists, other=0.0)
    if PARTS == 1:
        sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        up_sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    else:
        sums = tl.zeros((PARTS, BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        up_sums = tl.zeros((PARTS, BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    begin = tl.program_id(2) * split_inputs
    for start in range(begin, tl.minimum(begin + split_inputs, NUM_INPUTS) if SPLITS > 1 else NUM_INPUTS, BLOCK_INPUTS):
        x = _rows_step(x_ptr, rows, num_rows, x_stride, start, NUM_INPUTS, BLOCK_INPUTS, PARTS)
        weight = _weight_step(weight_ptr, real_outputs, start, NUM_INPUTS, BLOCK_INPUTS, PARTS)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
        if GATE_UP:
            up_weight = _weight_step(up_ptr, real_outputs, start, NUM_INPUTS, BLOCK_INPUTS, PARTS)
            up_sums = tl.dot(up_weight, x, up_sums, input_precision="ieee")
    if PARTS > 1:
        sums = tl.sum(sums, 0)
        up_sums = tl.sum(up_sums, 0)
    sums = tl.trans(sums)
    up_sums = tl.trans(up_sums)
    if SPLITS == 1:
        _finish_matrix(sums, up_sums, bias_ptr, residual, out_ptr, place, outputs, exists, NUM_OUTPUTS, GATE_UP)
    else:
        num_sums = num_rows.to(tl.int64) * NUM_OUTPUTS
        split_sums = (2 if GATE_UP else 1) * num_sums
        target = partial_ptr + tl.program_id(2) * split_sums + place
        tl.store(target, sums, mask=exists)
        if GATE_UP:
            tl.store(target + num_sums, up_sums, mask=exists)
        if is_last_arrival(counter_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), SPLITS):
            sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
            up_sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
            for split in tl.static_range(SPLITS):
                source = partial_ptr + split * split_sums + place
                sums += tl.load(source, mask=exists, other=0.0, cache_modifier=".cg")
                if GATE_UP:
                    up_sums += tl.load(source + num_sums, mask=exists, other=0.0, cache_modifier=".cg")
            _finish_matrix(sums, up_sums, bias_ptr, residual, out_ptr, place, outputs, exists, NUM_OUTPUTS, GATE_UP)


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
    tile: VectorTile | MatrixTile | None = None,
) -> torch.Tensor:
    """The module's formula: [T, N], or [T, N/2] with gate_up (then without residual); tile None takes `choose_tile`.

    One launch, and one before it where a matrix tile follows a norm, or float16 rows do: x * norm_weight before the scaling
    leaves the range of float16. ValueError when a shape, a stride or a dtype is not so, or the choice is the library.
    """
    _check(x, norm_weight, weight, bias, residual)
    if gate_up and (residual is not None or weight.shape[0] % 2):
        raise ValueError("gate_up needs an even number of weight rows and no residual")
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if gate_up else weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    tile = choose_tile(num_rows, num_outputs, num_inputs, gate_up, x.dtype) if tile is None else tile
    if isinstance(tile, LibraryProduct):
        raise ValueError(f"small_row_linear needs a tile of its own for {num_rows} rows")
    if norm_weight is not None and (isinstance(tile, MatrixTile) or x.dtype == torch.float16):
        x, norm_weight = rms_norm_triton(x, norm_weight, eps), None
    shape = {"NUM_OUTPUTS": num_outputs, "NUM_INPUTS": num_inputs, "GATE_UP": gate_up}
    if isinstance(tile, VectorTile):
        if num_rows != 1:
            raise ValueError(f"the vector kernel takes one row, got {num_rows}")
        _vector_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
            x, norm_weight, weight, bias, residual, out, eps, **shape, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
            num_warps=tile.num_warps, num_stages=1, **launch_options(x.device, weight.nbytes <= SMALL_WEIGHT_BYTES),
        )  # fmt: skip
        return out
    _launch_matrix(x, weight, bias, residual, out, shape, tile)
    return out


def _launch_matrix(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    shape: dict[str, int],
    tile: MatrixTile,
) -> None:
    num_rows, num_outputs = out.shape
    blocks = (triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows))
    partial, counters = None, None
    if tile.splits > 1:
        partial = torch.empty((tile.splits, weight.shape[0] * num_rows), dtype=torch.float32, device=x.device)
        counters = arrival_counters(blocks[0] * blocks[1], x.device)
    _matrix_kernel[(*blocks, tile.splits)](
        x, weight, bias, residual, out, partial, counters, num_rows, x.stride(0), **shape,
        BLOCK_ROWS=tile.rows, BLOCK_OUTPUTS=tile.outputs, BLOCK_INPUTS=tile.inputs, PARTS=tile.parts, SPLITS=tile.splits,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **launch_options(x.device, weight.nbytes <= SMALL_WEIGHT_BYTES),
    )  # fmt: skip
