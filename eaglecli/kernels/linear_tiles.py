"""Which kernel, and which tile of it, computes a product with a weight matrix: a table of measurements and an estimate."""

from dataclasses import dataclass

import torch
import triton

MAX_ROWS = 64  # more rows go to the library, but for those of small weights where launches overlap
SMALL_WEIGHT_BYTES = 8 << 20  # read in 2 us: where launches cost as much as that, our own take part in dependent launch


@dataclass(frozen=True)
class VectorTile:
    """One row of x; one program computes `outputs` outputs, `inputs` inputs at a time."""

    outputs: int
    inputs: int
    num_warps: int


@dataclass(frozen=True)
class MatrixTile:
    """One program computes `outputs` x `rows`, `inputs` inputs at a time, num_stages steps on their way.

    parts: the inputs of a step are divided among this many groups of warps (few outputs: shorter chains of products).
    splits: the inputs are divided among this many programs, the last of which adds the parts up.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    parts: int = 1
    splits: int = 1


@dataclass(frozen=True)
class LibraryProduct:
    """The library's product, with the norm and the activation as launches of their own."""


LinearTile = VectorTile | MatrixTile | LibraryProduct

# (rows up to, tile) for small weights, found in whole iterations: `benchmarks/RESULTS.md`, run 12
_SMALL_WEIGHT_TILES = (
    (8, MatrixTile(8, 16, 256, 4, 3, parts=4)),
    (32, MatrixTile(16, 64, 64, 4, 6)),
    (256, MatrixTile(32, 64, 64, 4, 6)),
    (512, MatrixTile(64, 64, 128, 4, 4)),
)

# One tile for every number of rows: a row's numbers then do not depend on the other rows, nor on how many there are.
ROW_INVARIANT_TILE = MatrixTile(16, 32, 128, 4, 4)
_WIDE_MATRIX_TILE = MatrixTile(16, 32, 32, 4, 3)

# (rows up to: 1, 2, 4 .. 64; outputs; inputs; gate and up) -> the fastest in bfloat16 on an H200, by benchmarks/bench_kernels_model.py
MEASURED_TILES: dict[tuple[int, int, int, bool], LinearTile] = {
    (1, 576, 576, False): VectorTile(4, 1024, 4),
    (1, 960, 576, False): VectorTile(1, 1024, 4),
    (1, 1536, 576, True): VectorTile(2, 1024, 4),
    (1, 11776, 576, False): VectorTile(8, 1024, 4),
    (2, 11776, 576, False): MatrixTile(8, 64, 64, 4, 6, 1, 1),
    (4, 11776, 576, False): MatrixTile(8, 64, 64, 4, 6, 1, 1),
    (8, 11776, 576, False): MatrixTile(8, 64, 64, 4, 6, 1, 1),
    (16, 11776, 576, False): MatrixTile(16, 64, 64, 4, 6, 1, 1),
    (1, 49152, 576, False): LibraryProduct(),
    (2, 49152, 576, False): LibraryProduct(),
    (4, 49152, 576, False): LibraryProduct(),
    (8, 49152, 576, False): LibraryProduct(),
    (16, 49152, 576, False): MatrixTile(16, 64, 64, 4, 6, 1, 1),
    (32, 49152, 576, False): MatrixTile(32, 64, 64, 4, 6, 1, 1),
    (64, 49152, 576, False): LibraryProduct(),
    (1, 960, 1152, False): VectorTile(2, 2048, 8),
    (1, 576, 1536, False): VectorTile(1, 2048, 8),
    (1, 576, 1728, False): VectorTile(1, 2048, 8),
    (1, 4096, 4096, False): VectorTile(1, 2048, 8),
    (2, 4096, 4096, False): MatrixTile(8, 64, 128, 4, 4, 1, 4),
    (4, 4096, 4096, False): MatrixTile(8, 64, 128, 4, 4, 1, 4),
    (8, 4096, 4096, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (16, 4096, 4096, False): MatrixTile(16, 64, 128, 4, 10, 1, 1),
    (32, 4096, 4096, False): MatrixTile(32, 64, 128, 4, 5, 1, 1),
    (64, 4096, 4096, False): LibraryProduct(),
    (1, 6144, 4096, False): VectorTile(2, 2048, 8),
    (2, 6144, 4096, False): MatrixTile(8, 64, 128, 4, 6, 1, 1),
    (4, 6144, 4096, False): MatrixTile(8, 64, 128, 4, 6, 1, 1),
    (8, 6144, 4096, False): MatrixTile(8, 64, 128, 4, 6, 1, 1),
    (16, 6144, 4096, False): MatrixTile(16, 64, 128, 4, 6, 1, 1),
    (32, 6144, 4096, False): MatrixTile(32, 64, 128, 4, 5, 1, 1),
    (64, 6144, 4096, False): LibraryProduct(),
    (1, 14336, 4096, True): VectorTile(1, 2048, 8),
    (2, 14336, 4096, True): MatrixTile(8, 64, 256, 4, 3, 1, 1),
    (4, 14336, 4096, True): MatrixTile(8, 64, 256, 4, 3, 1, 1),
    (8, 14336, 4096, True): MatrixTile(8, 64, 256, 4, 3, 1, 1),
    (16, 14336, 4096, True): MatrixTile(16, 64, 64, 4, 8, 1, 1),
    (32, 14336, 4096, True): MatrixTile(32, 64, 64, 4, 6, 1, 1),
    (64, 14336, 4096, True): MatrixTile(64, 64, 64, 4, 6, 1, 1),
    (1, 32000, 4096, False): VectorTile(2, 2048, 8),
    (2, 32000, 4096, False): MatrixTile(8, 64, 64, 4, 4, 1, 1),
    (4, 32000, 4096, False): MatrixTile(8, 64, 64, 4, 4, 1, 1),
    (8, 32000, 4096, False): MatrixTile(8, 64, 64, 4, 4, 1, 1),
    (16, 32000, 4096, False): MatrixTile(16, 64, 64, 4, 4, 1, 1),
    (1, 128256, 4096, False): VectorTile(8, 1024, 4),
    (2, 128256, 4096, False): MatrixTile(8, 64, 256, 4, 3, 1, 1),
    (4, 128256, 4096, False): MatrixTile(8, 64, 256, 4, 3, 1, 1),
    (8, 128256, 4096, False): MatrixTile(8, 64, 256, 4, 3, 1, 1),
    (16, 128256, 4096, False): MatrixTile(16, 64, 64, 4, 6, 1, 1),
    (32, 128256, 4096, False): MatrixTile(32, 128, 64, 8, 5, 1, 1),
    (64, 128256, 4096, False): MatrixTile(64, 128, 64, 8, 5, 1, 1),
    (1, 6144, 8192, False): VectorTile(8, 512, 2),
    (2, 6144, 8192, False): MatrixTile(8, 64, 128, 4, 6, 1, 1),
    (4, 6144, 8192, False): MatrixTile(8, 64, 128, 4, 6, 1, 1),
    (8, 6144, 8192, False): MatrixTile(8, 64, 128, 4, 6, 1, 1),
    (16, 6144, 8192, False): MatrixTile(16, 64, 128, 4, 6, 1, 1),
    (1, 4096, 12288, False): VectorTile(8, 512, 4),
    (2, 4096, 12288, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (4, 4096, 12288, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (8, 4096, 12288, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (16, 4096, 12288, False): MatrixTile(16, 64, 128, 4, 10, 1, 1),
    (1, 4096, 14336, False): VectorTile(2, 1024, 2),
    (2, 4096, 14336, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (4, 4096, 14336, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (8, 4096, 14336, False): MatrixTile(8, 32, 256, 4, 6, 4, 1),
    (16, 4096, 14336, False): MatrixTile(16, 64, 128, 4, 10, 1, 1),
    (32, 4096, 14336, False): MatrixTile(32, 64, 128, 4, 4, 1, 4),
    (64, 4096, 14336, False): LibraryProduct(),
}


def choose_tile(
    num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool, dtype: torch.dtype, launches_overlap: bool = True
) -> LinearTile:
    """The tile of a shape. num_outputs counts the outputs written, half the weight's rows for gate and up."""
    if dtype not in (torch.bfloat16, torch.float16):
        return _wide_tile(num_rows, num_inputs) if num_rows <= MAX_ROWS else LibraryProduct()
    is_small = (2 if gate_up else 1) * num_outputs * num_inputs * dtype.itemsize <= SMALL_WEIGHT_BYTES
    most_rows = _SMALL_WEIGHT_TILES[-1][0] if is_small and launches_overlap else MAX_ROWS
    if num_rows > most_rows:
        return LibraryProduct()
    if is_small and num_rows > 1:
        return next(tile for up_to, tile in _SMALL_WEIGHT_TILES if num_rows <= up_to)
    measured = MEASURED_TILES.get((triton.next_power_of_2(num_rows), num_outputs, num_inputs, gate_up))
    return measured or _estimated_tile(num_rows, num_outputs, num_inputs, gate_up)


def _estimated_tile(num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool) -> LinearTile:
    """A guess from the measured shapes; 132 multiprocessors."""
    if num_rows == 1:
        outputs = (4 if num_outputs < 8192 else 8) // (2 if gate_up else 1)
        return VectorTile(outputs, min(1024, triton.next_power_of_2(num_inputs)), 4)
    if num_rows > 16:
        return LibraryProduct()
    rows = 8 if num_rows <= 8 else 16
    if num_inputs < 2048:
        return MatrixTile(rows, 16 if num_outputs < 32 * 132 else 64, 128, 4, 4)
    outputs = 64 if num_outputs >= 64 * 132 else 32
    return MatrixTile(rows, outputs, 128 if gate_up else 256, 4, 5)


def _wide_tile(num_rows: int, num_inputs: int) -> LinearTile:
    """float32: no matrix unit, so small tiles that stay in registers."""
    if num_rows == 1:
        return VectorTile(4, min(512, triton.next_power_of_2(num_inputs)), 4)
    return _WIDE_MATRIX_TILE


def row_invariant_tile(dtype: torch.dtype) -> MatrixTile:
    """The one tile that `row_invariant_linear` uses in this dtype."""
    return ROW_INVARIANT_TILE if dtype in (torch.bfloat16, torch.float16) else _WIDE_MATRIX_TILE
