"""Linears with their prologues and epilogues against float64 references."""

import itertools

import pytest
import torch

from eaglecli.kernels import linear, linear_tiles
from eaglecli.kernels.linear import (
    linear_residual_reference,
    linear_residual_triton,
    norm_gate_up_reference,
    norm_gate_up_triton,
    norm_linear_reference,
    norm_linear_triton,
    silu_mul_triton,
)
from eaglecli.kernels.linear_tiles import MAX_ROWS, ROW_INVARIANT_TILE, LibraryProduct, LinearTile, MatrixTile, VectorTile, choose_tile
from eaglecli.kernels.small_row_linear import small_row_linear
from tests.kernels.closeness import GPU_DTYPES, assert_near, poison_free_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_TILES = [
    VectorTile(4, 32, 4),
    VectorTile(1, 128, 2),
    MatrixTile(16, 16, 32, 4, 3),
    MatrixTile(8, 32, 64, 4, 3),
    MatrixTile(16, 16, 64, 4, 3, parts=4),
    MatrixTile(16, 16, 32, 4, 3, splits=2),
    MatrixTile(32, 16, 32, 2, 2, parts=2, splits=4),
]


def tensors(rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {"x": (rows, inputs), "norm": (inputs,), "weight": (outputs, inputs), "bias": (outputs,), "residual": (rows, outputs)}
    drawn = {name: torch.randn(*shape, device=DEVICE) for name, shape in shapes.items()}
    drawn["weight"] *= inputs**-0.5
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def check_all(rows: int, outputs: int, inputs: int, with_bias: bool, dtype: torch.dtype = torch.float32) -> None:
    t = tensors(rows, outputs, inputs, dtype)
    w = {name: tensor.double() for name, tensor in t.items()}
    bias, wide_bias = (t["bias"], w["bias"]) if with_bias else (None, None)
    poison_free_memory(DEVICE)
    assert_near(
        norm_linear_triton(t["x"], t["norm"], 1e-5, t["weight"], bias),
        norm_linear_reference(w["x"], w["norm"], 1e-5, w["weight"], wide_bias),
    )
    assert_near(
        norm_linear_triton(t["x"], None, 1e-5, t["weight"], bias), norm_linear_reference(w["x"], None, 1e-5, w["weight"], wide_bias)
    )
    assert_near(
        linear_residual_triton(t["x"], t["weight"], bias, t["residual"]),
        linear_residual_reference(w["x"], w["weight"], wide_bias, w["residual"]),
    )
    assert_near(
        norm_gate_up_triton(t["x"], t["norm"], 1e-5, t["weight"], bias),
        norm_gate_up_reference(w["x"], w["norm"], 1e-5, w["weight"], wide_bias),
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 34, 80), (2, 70, 33), (17, 34, 100), (MAX_ROWS + 1, 34, 40)])
def test_each_operation_equals_its_reference(rows: int, outputs: int, inputs: int, with_bias: bool) -> None:
    check_all(rows, outputs, inputs, with_bias)


@pytest.mark.parametrize("tile", SMALL_TILES)
def test_every_tile_computes_the_same_function(tile: LinearTile) -> None:
    t = tensors(1 if isinstance(tile, VectorTile) else 35, 38, 75)
    gate_up = small_row_linear(t["x"], t["weight"], norm_weight=t["norm"], eps=1e-6, bias=t["bias"], gate_up=True, tile=tile)
    wide = {name: tensor.double() for name, tensor in t.items()}
    assert_near(gate_up, norm_gate_up_reference(wide["x"], wide["norm"], 1e-6, wide["weight"], wide["bias"]))
    out = small_row_linear(t["x"], t["weight"], residual=t["residual"], tile=tile)
    assert_near(out, linear_residual_reference(wide["x"], wide["weight"], None, wide["residual"]))


def test_with_a_fixed_tile_a_row_does_not_depend_on_the_other_rows() -> None:
    t = tensors(20, 40, 160)
    together = small_row_linear(t["x"], t["weight"], norm_weight=t["norm"], eps=1e-5, tile=ROW_INVARIANT_TILE)
    alone = small_row_linear(t["x"][17:18], t["weight"], norm_weight=t["norm"], eps=1e-5, tile=ROW_INVARIANT_TILE)
    assert torch.equal(together[17:18], alone)


def test_a_nan_row_stays_alone() -> None:
    t = tensors(5, 20, 40)
    clean = norm_linear_triton(t["x"], t["norm"], 1e-5, t["weight"], None)
    t["x"][2] = float("nan")
    out = norm_linear_triton(t["x"], t["norm"], 1e-5, t["weight"], None)
    others = [0, 1, 3, 4]
    assert out[2].isnan().all()
    assert torch.equal(out[others], clean[others])


def test_rows_of_a_wider_tensor_are_read_with_their_stride() -> None:
    t = tensors(3, 20, 96)
    x, weight = t["x"][:, 32:64], t["weight"][:, :32].contiguous()
    assert_near(norm_linear_triton(x, None, 0.0, weight, None), norm_linear_reference(x.double(), None, 0.0, weight.double(), None))


def test_float16_rows_may_leave_the_range_of_float16_before_they_are_scaled() -> None:
    x = torch.full((2, 64), 30_000.0, dtype=torch.float16, device=DEVICE)
    norm = torch.full((64,), 4.0, dtype=torch.float16, device=DEVICE)
    weight = torch.eye(64, dtype=torch.float16, device=DEVICE)
    out = norm_linear_triton(x, norm, 1e-5, weight, None)
    expected = torch.full((2, 64), 4.0, dtype=torch.float64, device=DEVICE)
    assert_near(out, expected)
    assert_near(small_row_linear(x[:1], weight, norm_weight=norm, eps=1e-5, tile=VectorTile(4, 32, 4)), expected[:1])


@pytest.mark.parametrize("rows", [2, MAX_ROWS + 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_residual_is_written_only_where_it_may_be(rows: int, with_bias: bool) -> None:
    t = tensors(rows, 20, 40)
    bias, before = t["bias"] if with_bias else None, t["residual"].clone()
    kept = linear_residual_triton(t["x"], t["weight"], bias, t["residual"])
    assert torch.equal(t["residual"], before)
    written = linear_residual_triton(t["x"], t["weight"], bias, t["residual"], overwrite=True)
    assert_near(written, kept.double())
    if rows > MAX_ROWS and not with_bias:
        assert written.data_ptr() == t["residual"].data_ptr(), "the library's product with a sum was given a place of its own"


def test_silu_mul_of_odd_widths() -> None:
    gate_up = torch.randn(3, 2 * 1027, device=DEVICE)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(silu_mul_triton(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_chosen_tiles_are_powers_of_two_and_fit_the_shared_memory(dtype: torch.dtype) -> None:
    shapes = [(576, 576), (960, 576), (1536, 576), (49152, 576), (4096, 14336), (14336, 4096), (128256, 4096), (70, 33)]
    for rows, (outputs, inputs), gate_up in itertools.product((2, 8, 16, 17, 40, 64, 65, 256, 500), shapes, (False, True)):
        tile = choose_tile(rows, outputs, inputs, gate_up, dtype)
        if isinstance(tile, MatrixTile):
            assert all(size & (size - 1) == 0 for size in (tile.rows, tile.outputs, tile.inputs, tile.parts))
            staged = tile.rows * tile.inputs + (2 if gate_up else 1) * tile.outputs * tile.inputs
            assert tile.num_stages * staged * dtype.itemsize <= 227 * 1024
        else:
            assert isinstance(tile, LibraryProduct)


def test_one_row_takes_the_vector_kernel_and_many_rows_of_large_weights_the_library() -> None:
    assert isinstance(choose_tile(1, 6144, 4096, False, torch.bfloat16), VectorTile)
    assert isinstance(choose_tile(1, 770, 320, False, torch.bfloat16), VectorTile)
    assert isinstance(choose_tile(MAX_ROWS + 1, 6144, 4096, False, torch.bfloat16), LibraryProduct)


def test_rows_between_measured_counts_take_the_next_measured_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = MatrixTile(8, 64, 64, 4, 4)
    monkeypatch.setitem(linear_tiles.MEASURED_TILES, (8, 7000, 3300, False), tile)
    assert choose_tile(5, 7000, 3300, False, torch.bfloat16) == tile
    assert choose_tile(9, 7000, 3300, False, torch.bfloat16) != tile


def test_small_weights_keep_their_own_kernel_for_more_rows() -> None:
    """Where a launch costs as much as the reading of the weight, being launched early is worth more than the library's tiles."""
    at = {rows: choose_tile(rows, 1536, 576, True, torch.bfloat16) for rows in (1, 2, 8, 9, 33, 256, 257, 512, 513)}
    assert isinstance(at[1], VectorTile) and isinstance(at[513], LibraryProduct)
    assert at[2] == at[8] != at[9] != at[33] == at[256] != at[257] == at[512]
    assert isinstance(at[512], MatrixTile)
    assert isinstance(choose_tile(65, 4096, 1100, False, torch.bfloat16), LibraryProduct)  # 9 MB
    assert isinstance(choose_tile(65, 576, 576, False, torch.float32), LibraryProduct)
    assert isinstance(choose_tile(65, 576, 576, False, torch.bfloat16, launches_overlap=False), LibraryProduct)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_library_computes_the_same_function(monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    monkeypatch.setattr(linear, "choose_tile", lambda *_: LibraryProduct())
    check_all(3, 34, 40, with_bias)


@pytest.mark.parametrize("broken", ["width", "bias", "residual", "dtype", "gate_up", "vector", "library"])
def test_a_broken_contract_is_a_value_error(broken: str) -> None:
    t = tensors(2, 6, 8)
    arguments = {
        "width": {"weight": torch.zeros(6, 9)},
        "bias": {"bias": torch.zeros(5)},
        "residual": {"residual": torch.zeros(3, 6)},
        "dtype": {"bias": torch.zeros(6, dtype=torch.float64)},
        "gate_up": {"residual": torch.zeros(2, 6), "gate_up": True},
        "vector": {"tile": VectorTile(4, 32, 4)},
        "library": {"tile": LibraryProduct()},
    }[broken]
    with pytest.raises(ValueError, match=r"must|needs|takes"):
        small_row_linear(**{"x": t["x"], "weight": t["weight"], **arguments})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 15, 16, 31, 64, 65, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (770, 328), (4096, 2048), (1026, 1024)])
def test_compiled_kernels_equal_the_reference(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    check_all(rows, outputs, inputs, with_bias=rows % 2 == 0, dtype=dtype)
