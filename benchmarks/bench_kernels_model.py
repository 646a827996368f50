# ruff: noqa: D101, D102, D103, E402 - a script; the package is found beside it
"""Kernels of the model on one GPU: correct, how fast, which tile is best. No arguments; prints short tables.

    python benchmarks/bench_kernels_model.py

1. Compile everything and compare with float64 references, in worker processes (compiling is most of the time).
2. Every linear of two models and their EAGLE-3 drafts at 1 to 64 rows, tile by tile and by the library, in CUDA graphs over
   weights that the L2 cannot hold. One row is timed with its norm, more rows without (a launch of its own, timed in 3).
3. Attention, rotary store, norm and silu_mul; 4. the whole stack of layers in one graph, with and without dependent launch.
Every section goes on when another fails. Floors: weight bytes / 4.08 TB/s. With OUT set, $OUT/measured_tiles.txt holds the
lines of `linear_tiles.MEASURED_TILES`, of which those of small weights with more than one row are not used: see small_weight_tiles.py.
"""

import itertools
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional

from eaglecli.kernels import attention as attention_module
from eaglecli.kernels import launch
from eaglecli.kernels import linear as linear_module
from eaglecli.kernels.attention import AttentionTile, attention_reference, attention_triton
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.linear import (
    linear_residual,
    linear_residual_reference,
    norm_gate_up,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_reference,
    silu_mul_triton,
)
from eaglecli.kernels.linear_tiles import LibraryProduct, LinearTile, MatrixTile, VectorTile, choose_tile
from eaglecli.kernels.rms_norm import rms_norm, rms_norm_reference
from eaglecli.kernels.rotary_store import rotary_store, rotary_store_reference
from eaglecli.kernels.small_row_linear import small_row_linear

BANDWIDTH_BYTES_PER_US = 4.08e6
DEVICE = "cuda"
STACK_ROWS = (1, 8, 16)
STACK_CONTEXTS = (256, 1024)
NUM_WORKERS = 15
SHARED_MEMORY_BYTES = 220_000
ERROR_LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class ModelShape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.layers * sum(n * k for _, n, k in layer_products(self)) + self.vocab * self.hidden)


SMOLLM2 = ModelShape("smollm2", 30, 576, 9, 3, 64, 1536, 49152)
LLAMA_8B = ModelShape("llama8b", 32, 4096, 32, 8, 128, 14336, 128256)


def layer_products(model: ModelShape) -> list[tuple[str, int, int]]:
    """(operation, rows of the weight, columns) of one layer."""
    return [
        ("qkv", (model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden),
        ("o", model.hidden, model.heads * model.head_dim),
        ("gate_up", 2 * model.intermediate, model.hidden),
        ("down", model.hidden, model.intermediate),
    ]


# ---------------------------------------------------------------- timing


def graph_of(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def time_graph(function: Callable[[], object], repeats: int = 7) -> float:
    """Median microseconds of one replay."""
    graph = graph_of(function)
    times = []
    for index in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def poison_free_memory() -> None:
    """What `torch.empty` gives next holds NaN, so an element that a kernel does not write is seen."""
    blocks = [torch.full((size,), float("nan"), device=DEVICE) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)]
    del blocks


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    error = ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


# ---------------------------------------------------------------- linear: operations and candidates


def run_linear(
    operation: str, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, residual: torch.Tensor, tile: LinearTile
) -> torch.Tensor:
    """What `linear.py` does for this tile; norm None: the rows are normalised already."""
    if not isinstance(tile, LibraryProduct):
        if operation in ("o", "down"):
            return small_row_linear(x, weight, residual=residual, tile=tile)
        return small_row_linear(x, weight, norm_weight=norm, eps=1e-5, gate_up=operation == "gate_up", tile=tile)
    if operation in ("o", "down"):
        return torch.addmm(residual, x, weight.t())
    product = functional.linear(x if norm is None else rms_norm(x, norm, 1e-5), weight)
    return silu_mul_triton(product) if operation == "gate_up" else product


MANY_INPUTS_VECTOR = (
    (8, 512, 2), (4, 512, 2), (8, 512, 4), (2, 1024, 2), (4, 1024, 4), (8, 1024, 4), (1, 2048, 8), (2, 2048, 8), (4, 2048, 8),
)  # fmt: skip


def vector_tiles(pairs: int, num_inputs: int, num_outputs: int) -> list[VectorTile]:
    if num_inputs >= 2048:
        choices = MANY_INPUTS_VECTOR
    else:
        whole = 1 << (num_inputs - 1).bit_length()
        choices = tuple(itertools.product((1, 2, 4, 8), (whole,), (4, 8))) + (
            (16, 64, 1),
            (32, 64, 2),
            (64, 64, 4),
            (16, 128, 2),
            (32, 128, 4),
        )
    return [
        VectorTile(outputs, inputs, warps)
        for outputs, inputs, warps in choices
        if 8 <= outputs * inputs * pairs // (32 * warps) <= 64 and num_outputs / outputs < 40_000
    ]


FEW_INPUTS = (
    (16, 64, 4, 6), (16, 128, 4, 5), (16, 256, 4, 3, 4), (16, 512, 4, 2, 4), (16, 512, 8, 3, 8), (32, 128, 4, 5), (32, 256, 4, 3, 4),
    (16, 128, 4, 5, 1, 2), (16, 256, 4, 3, 4, 2), (64, 64, 4, 6), (64, 128, 4, 5), (32, 64, 4, 9),
)  # fmt: skip
MANY_INPUTS = (
    (16, 256, 4, 8), (32, 128, 4, 8), (32, 256, 4, 6), (32, 256, 4, 9), (64, 64, 4, 8), (64, 128, 4, 6), (64, 128, 4, 10),
    (128, 64, 4, 6), (128, 128, 8, 5), (64, 128, 4, 6, 1, 2), (64, 128, 4, 4, 1, 4), (32, 256, 4, 6, 4), (32, 256, 4, 4, 1, 2),
    (32, 128, 4, 5), (64, 256, 4, 3), (32, 64, 4, 6), (64, 64, 4, 6), (64, 64, 4, 4),
)  # fmt: skip
MANY_ROWS = ((64, 64, 4, 6), (64, 128, 4, 5), (128, 64, 8, 5), (64, 128, 4, 4, 1, 4))


def matrix_tiles(num_rows: int, pairs: int, num_inputs: int, num_outputs: int) -> list[MatrixTile]:
    choices = MANY_ROWS if num_rows > 16 else FEW_INPUTS if num_inputs < 2048 else MANY_INPUTS
    rows = max(8, num_rows)
    tiles = []
    for outputs, inputs, warps, stages, *rest in choices:
        shared = stages * 2 * (rows + pairs * outputs) * inputs
        programs = num_outputs // outputs
        splits = rest[1] if len(rest) > 1 else 1
        fits = shared <= SHARED_MEMORY_BYTES and programs < 5000 and (splits == 1 or programs < 200) and (programs >= 32 or outputs <= 64)
        if fits:
            tiles.append(MatrixTile(rows, outputs, inputs, warps, stages, *rest))
    return tiles


def candidate_tiles(num_rows: int, operation: str, num_inputs: int, num_outputs: int) -> list[LinearTile]:
    pairs = 2 if operation == "gate_up" else 1
    own = vector_tiles(pairs, num_inputs, num_outputs) if num_rows == 1 else matrix_tiles(num_rows, pairs, num_inputs, num_outputs)
    return [*own, LibraryProduct()]


def linear_shapes() -> list[tuple[str, str, int, int, bool]]:
    """(name, operation, weight rows, weight columns, is of the target) of both models and of the own layers of their drafts."""
    shapes = []
    for model, draft_vocab in ((SMOLLM2, 11_776), (LLAMA_8B, 32_000)):
        shapes += [(model.name, *product, True) for product in (*layer_products(model), ("head", model.vocab, model.hidden))]
        qkv = layer_products(model)[0][1]
        draft = (("qkv2", qkv, 2 * model.hidden), ("fc", model.hidden, 3 * model.hidden), ("head", draft_vocab, model.hidden))
        shapes += [(f"{model.name[:5]}-d", *product, False) for product in draft]
    return shapes


# ---------------------------------------------------------------- attention inputs


@dataclass(frozen=True)
class AttentionCase:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    prefix_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    tree: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    num_splits: int | None = None
    unowned: int = 0
    bound: int | None = None  # host bound of the prefix, at least the longest


def attention_tensors(case: AttentionCase, layers: int = 1) -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """q, cache [layers, 2, slots, nkv, hd] with NaN in every slot that no row owns, inputs."""
    batch, max_query = len(case.prefix_lens), max(case.query_lens)
    columns = max(case.bound or 0, max(case.prefix_lens)) + max_query + 5
    lens = torch.tensor(case.prefix_lens)
    owned = torch.tensor([p + (max_query if case.tree else q) for p, q in zip(case.prefix_lens, case.query_lens, strict=True)])
    num_slots = int(owned.sum()) + 7
    order = torch.randperm(num_slots - 1)[: int(owned.sum())] + 1
    table = torch.zeros(batch, columns, dtype=torch.int32)
    start = 0
    for row, count in enumerate(owned.tolist()):
        table[row, :count] = order[start : start + count]
        start += count
    cache = torch.randn(layers, 2, num_slots, case.kv_heads, case.head_dim, device=DEVICE, dtype=torch.float32).to(case.dtype)
    unused = torch.ones(num_slots, dtype=torch.bool)
    unused[order] = False
    cache[:, :, unused.to(DEVICE)] = float("nan")
    query_lens = torch.tensor(case.query_lens)
    query_start = torch.cat((torch.zeros(1, dtype=torch.long), query_lens.cumsum(0)))
    runs = [torch.arange(p, p + q) for p, q in zip(case.prefix_lens, case.query_lens, strict=True)]
    positions = torch.cat([*runs, torch.zeros(case.unowned, dtype=torch.long)])
    mask = None
    if case.tree:
        mask = torch.rand(batch, max_query, max_query) < 0.4
        mask = (mask | torch.eye(max_query, dtype=torch.bool)).tril().to(DEVICE)
    num_tokens = int(query_start[-1]) + case.unowned
    q = torch.randn(num_tokens, case.heads, case.head_dim, device=DEVICE).to(case.dtype)
    inputs = AttentionInputs(
        rows=torch.arange(batch, dtype=torch.int32, device=DEVICE),
        query_start=query_start.int().to(DEVICE),
        prefix_lens=lens.int().to(DEVICE),
        slot_table=table.to(DEVICE),
        out_slots=torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE),
        positions=positions.int().to(DEVICE),
        tail_mask=mask,
        max_query_len=max_query,
        max_prefix_len=max(case.bound or 0, max(case.prefix_lens)),
    )
    return q, cache, inputs


def check_attention(case: AttentionCase, tile: AttentionTile | None = None) -> float:
    q, cache, inputs = attention_tensors(case)
    poison_free_memory()
    out = attention_triton(q, cache[0, 0], cache[0, 1], inputs, case.head_dim**-0.5, case.window, case.num_splits, 0, tile)
    expected = attention_reference(q.double(), cache[0, 0].double(), cache[0, 1].double(), inputs, case.head_dim**-0.5, case.window)
    return relative_error(out, expected) / ERROR_LIMITS[case.dtype]


def attention_check_cases() -> list[AttentionCase]:
    cases = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases += [
            AttentionCase("decode", 32, 8, 128, (511, 8000, 0, 63, 64), (1,) * 5, dtype=dtype),
            AttentionCase("decode smol", 9, 3, 64, (511, 1000, 1), (1,) * 3, dtype=dtype),
            AttentionCase("verify", 32, 8, 128, (700, 3), (8, 8), tree=True, dtype=dtype, unowned=3),
            AttentionCase("tree 64", 8, 2, 96, (130,), (64,), tree=True, dtype=dtype),
            AttentionCase("extend ragged", 8, 8, 80, (100, 0, 64), (70, 3, 129), dtype=dtype, unowned=40),
            AttentionCase("window", 8, 1, 64, (300, 20), (9, 33), window=50, dtype=dtype),
        ]
    cases += [
        AttentionCase("prefill", 32, 8, 128, (0,), (1000,)),
        AttentionCase("window tree", 14, 2, 64, (300, 20), (9, 9), tree=True, window=50),
        AttentionCase("batch 256", 12, 2, 128, tuple(range(256)), (1,) * 256),
    ]
    return cases


def attention_timing_cases(model: ModelShape) -> list[AttentionCase]:
    heads = (model.heads, model.kv_heads, model.head_dim)
    cases = [AttentionCase("decode 512/8192", *heads, (512,), (1,), bound=8192)]
    for context in (256, 512, 4096):
        cases += [
            AttentionCase(f"decode {context}", *heads, (context,), (1,)),
            AttentionCase(f"chain 8 {context}", *heads, (context,), (8,)),
            AttentionCase(f"tree 16 {context}", *heads, (context,), (16,), tree=True),
        ]
    cases += [
        AttentionCase("decode x64 1024", *heads, (1024,) * 64, (1,) * 64),
        AttentionCase("tree 16 x16 1024", *heads, (1024,) * 16, (16,) * 16, tree=True),
        AttentionCase("prefill 2048", *heads, (0,), (2048,)),
    ]
    return cases


# ---------------------------------------------------------------- correctness


def check_linear(dtype: torch.dtype, rows: int, n: int, k: int) -> float:
    worst = 0.0
    x, norm, bias, residual = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((rows, k), (k,), (n,), (rows, n)))
    weight = (torch.randn(n, k, device=DEVICE) * k**-0.5).to(dtype)
    wide = [tensor.double() for tensor in (x, norm, weight, bias, residual)]
    pairs = [
        (lambda: norm_linear(x, norm, 1e-5, weight, bias), norm_linear_reference(wide[0], wide[1], 1e-5, wide[2], wide[3])),
        (lambda: norm_linear(x, None, 1e-5, weight, None), norm_linear_reference(wide[0], None, 1e-5, wide[2], None)),
        (lambda: linear_residual(x, weight, None, residual), linear_residual_reference(wide[0], wide[2], None, wide[4])),
        (lambda: norm_gate_up(x, norm, 1e-5, weight, bias), norm_gate_up_reference(wide[0], wide[1], 1e-5, wide[2], wide[3])),
    ]
    for function, expected in pairs:
        poison_free_memory()
        worst = max(worst, relative_error(function(), expected))
    return worst / ERROR_LIMITS[dtype]


def linear_tensors(operation: str, n: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, norm weight, residual."""
    outputs = n // 2 if operation == "gate_up" else n
    x, norm, residual = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((rows, k), (k,), (rows, outputs)))
    return x, norm, residual


def check_tiles(name: str, operation: str, n: int, k: int, rows: int) -> float:
    """Every candidate tile of a shape is compiled and compared: worst error / limit. `rows` less one are given when there are several."""
    worst = 0.0
    x, norm, residual = linear_tensors(operation, n, k, max(1, rows - 1))
    weight = (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16()
    if operation in ("o", "down"):
        expected = linear_residual_reference(x.double(), weight.double(), None, residual.double())
    elif operation == "gate_up":
        expected = norm_gate_up_reference(x.double(), norm.double(), 1e-5, weight.double(), None)
    else:
        expected = norm_linear_reference(x.double(), norm.double(), 1e-5, weight.double(), None)
    problems = []
    for tile in candidate_tiles(rows, operation, k, expected.shape[1]):
        try:
            poison_free_memory()
            error = relative_error(run_linear(operation, x, weight, norm, residual, tile), expected)
            if not error <= ERROR_LIMITS[torch.bfloat16]:
                problems.append(f"{tile}: error {error:.3g}")
        except Exception as failure:
            problems.append(f"{tile}: {type(failure).__name__} {str(failure)[:80]}")
            continue
        worst = max(worst, error)
    if problems:
        print(f"  tiles that fail, {name} {operation} {n}x{k} m={rows}: {problems[:2]} ({len(problems)})", flush=True)
    return worst / ERROR_LIMITS[torch.bfloat16]


def check_rotary(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, tokens: int, with_norm: bool) -> float:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    positions = torch.randint(0, 100, (tokens,), device=DEVICE, dtype=torch.int32)
    cos, sin = torch.randn(2, 100, head_dim // 2, device=DEVICE)
    slots = torch.randperm(tokens + 9, device=DEVICE)[:tokens].int()
    norms = [torch.randn(head_dim, device=DEVICE).to(dtype) if with_norm else None for _ in range(2)]
    caches = [torch.zeros(tokens + 9, kv_heads, head_dim, device=DEVICE, dtype=dtype) for _ in range(2)]
    wide_caches = [cache.double() for cache in caches]
    poison_free_memory()
    q = rotary_store(qkv, positions, cos, sin, slots, *caches, *norms, 1e-5)
    wide_norms = [None if norm is None else norm.double() for norm in norms]
    expected = rotary_store_reference(qkv.double(), positions, cos.double(), sin.double(), slots, *wide_caches, *wide_norms, 1e-5)
    errors = [relative_error(a, b) for a, b in zip((q, *caches), (expected, *wide_caches), strict=True)]
    return max(errors) / ERROR_LIMITS[dtype]


def check_norm(dtype: torch.dtype, rows: int, width: int) -> float:
    x, weight = torch.randn(rows, width, device=DEVICE).to(dtype), torch.randn(width, device=DEVICE).to(dtype)
    poison_free_memory()
    return relative_error(rms_norm(x, weight, 1e-5), rms_norm_reference(x.double(), weight.double(), 1e-5)) / ERROR_LIMITS[dtype]


def attention_tiles(case: AttentionCase) -> list[AttentionTile | None]:
    """None: the tile that is chosen."""
    if not is_swept(case):
        return [None]
    tiles = [AttentionTile(16, 64, 4, stages) for stages in (1, 2, 3, 5)]
    tiles += [AttentionTile(16, 32, 4, 2), AttentionTile(16, 32, 2, 2), AttentionTile(16, 64, 2, 2), AttentionTile(16, 128, 4, 2)]
    if max(case.query_lens) * case.heads // case.kv_heads > 32:
        tiles.append(AttentionTile(64, 64, 8 if case.tree else 4, 3))
    return [None, *tiles]


def is_swept(case: AttentionCase) -> bool:
    return len(case.prefix_lens) == 1 and max(case.prefix_lens) in (256, 512) and case.bound is None


def warm_attention(model: ModelShape, index: int) -> float:
    """Compile what the timing of a case needs; every tile against the reference."""
    case = attention_timing_cases(model)[index]
    return max(check_attention(case, tile) for tile in attention_tiles(case))


def all_checks() -> list[tuple[str, Callable[..., float], tuple]]:
    checks: list[tuple[str, Callable[..., float], tuple]] = []
    for (name, operation, n, k, is_target), rows in itertools.product(linear_shapes(), (1, 8, 16, 32, 64)):
        if is_target or rows <= 16:
            checks.append((f"tiles {name} {operation} m={rows}", check_tiles, (name, operation, n, k, rows)))
    checks += [(f"attention {case.name} {case.dtype}", check_attention, (case,)) for case in attention_check_cases()]
    for model in (SMOLLM2, LLAMA_8B):
        checks += [(f"attention timing {model.name} {i}", warm_attention, (model, i)) for i in range(len(attention_timing_cases(model)))]
        checks += [(f"stack {model.name} m={m}", warm_stack, (model, m)) for m in STACK_ROWS]
    for dtype in ERROR_LIMITS:
        checks += [(f"linear {dtype} m={m}", check_linear, (dtype, m, 770, 328)) for m in (1, 5, 33, 64, 100)]
        rotary_cases = ((64, 5, True), (80, 99, False), (128, 3, True))
        checks += [(f"rotary {dtype} {hd}", check_rotary, (dtype, 14, 2, hd, tokens, norm)) for hd, tokens, norm in rotary_cases]
        checks += [(f"norm {dtype}", check_norm, (dtype, 5, 576)), (f"norm {dtype}", check_norm, (dtype, 3, 4096))]
    return checks


def run_check(index: int) -> tuple[str, float, str]:
    name, function, arguments = all_checks()[index]
    try:
        torch.manual_seed(index)
        return name, function(*arguments), ""
    except Exception:
        return name, float("inf"), traceback.format_exc(limit=-3)[-700:]


def section_correctness() -> None:
    checks = all_checks()
    order = sorted(range(len(checks)), key=lambda index: not checks[index][0].startswith(("tiles", "attention timing")))
    failed = 0
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        for name, error, trace in pool.imap_unordered(run_check, order):
            if not error <= 1.0:
                failed += 1
                print(f"  FAILED {name}: error / limit {error:.3g} {trace if failed <= 6 else ''}", flush=True)
    print(f"  {len(checks) - failed} of {len(checks)} checks hold", flush=True)


# ---------------------------------------------------------------- linear sweep


def section_linear(best: dict) -> None:
    pool = torch.empty(700_000_000, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)
    print("  shape                     m  us      TB/s  x floor | library us | 1st; 2nd; 3rd; what is chosen now", flush=True)
    for name, operation, n, k, is_target in linear_shapes():
        eight: list[LinearTile] = []
        for rows in (1, 8, 2, 4, 16, 32, 64) if is_target else (1, 8, 2, 4, 16):
            try:
                outputs = n // 2 if operation == "gate_up" else n
                tiles = [*eight[:4], LibraryProduct()] if rows in (2, 4) else candidate_tiles(rows, operation, k, outputs)
                results = sweep_shape(operation, n, k, rows, tiles, pool)
                best[(rows, outputs, k, operation == "gate_up")] = results[0][1]
                if rows == 8:
                    eight = [tile for _, tile in results if isinstance(tile, MatrixTile)]
                print_sweep(f"{name:8}{operation:8}{n:7}x{k:<6}{rows:3}", operation, n, k, rows, results)
            except Exception as error:
                print(f"  {name} {operation} m={rows} FAILED {type(error).__name__} {str(error)[:200]}", flush=True)


def sweep_shape(operation: str, n: int, k: int, rows: int, tiles: list[LinearTile], pool: torch.Tensor) -> list[tuple[float, LinearTile]]:
    """(microseconds, tile), fastest first; the best few are timed a second time."""
    copies = max(1, min(96, 300_000_000 // (n * k)))
    weights = [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(copies)]
    x, norm, residual = linear_tensors(operation, n, k, rows)
    given_norm = norm if rows == 1 else None

    def measure(tile: LinearTile, repeats: int) -> float:
        return time_graph(lambda: [run_linear(operation, x, weight, given_norm, residual, tile) for weight in weights], repeats) / copies

    results = []
    for tile in tiles:
        try:
            results.append((measure(tile, 3), tile))
        except Exception:  # reported by the checks
            torch.cuda.synchronize()
    results.sort(key=lambda pair: pair[0])
    results[:3] = sorted(((measure(tile, 7), tile) for _, tile in results[:3]), key=lambda pair: pair[0])
    return results


def tile_text(tile: LinearTile) -> str:
    return f"{type(tile).__name__[0]}{','.join(str(number) for number in astuple(tile))}"


def print_sweep(title: str, operation: str, n: int, k: int, rows: int, results: list[tuple[float, LinearTile]]) -> None:
    us = results[0][0]
    floor = n * k * 2 / BANDWIDTH_BYTES_PER_US
    library = next((t for t, tile in results if isinstance(tile, LibraryProduct)), float("nan"))
    chosen = choose_tile(rows, n // 2 if operation == "gate_up" else n, k, operation == "gate_up", torch.bfloat16)
    chosen_us = next((t for t, tile in results if tile == chosen), float("nan"))
    texts = [f"{tile_text(tile)} {t:.2f}" for t, tile in results[:3]]
    print(
        f"  {title} {us:7.2f} {n * k * 2 / us / 1e6:5.2f} {us / floor:6.2f} |{library:8.2f} | {'; '.join(texts)}; "
        f"now {tile_text(chosen)} {chosen_us:.2f}",
        flush=True,
    )


# ---------------------------------------------------------------- attention and small kernels


def section_attention() -> None:
    for model in (SMOLLM2, LLAMA_8B):
        for case in attention_timing_cases(model):
            try:
                time_attention(model, case)
            except Exception as error:
                print(f"  {model.name} {case.name} FAILED {type(error).__name__} {str(error)[:200]}", flush=True)


def time_attention(model: ModelShape, case: AttentionCase) -> None:
    layers = 8
    q, cache, inputs = attention_tensors(case, layers)
    scale = case.head_dim**-0.5

    def measure(num_splits: int | None, tile: AttentionTile | None = None) -> float:
        return (
            time_graph(
                lambda: [attention_triton(q, cache[i, 0], cache[i, 1], inputs, scale, None, num_splits, 0, tile) for i in range(layers)], 5
            )
            / layers
        )

    used = sum(case.prefix_lens) + sum(case.query_lens)
    moved = 2 * 2 * used * case.kv_heads * case.head_dim
    text = f"  {model.name:8}{case.name:18} us {measure(None):7.2f} (bytes / BW {moved / BANDWIDTH_BYTES_PER_US:6.2f})"
    if is_swept(case):
        results = []
        for tile, splits in itertools.product(attention_tiles(case), (None, 4, 8)):
            if tile is not None:
                results.append((measure(splits, tile), f"{','.join(map(str, astuple(tile)))}/{splits}"))
        results.sort()
        text += " best " + "; ".join(f"{name} {us:.2f}" for us, name in results[:5])
    print(text, flush=True)


def section_small() -> None:
    for model, rows in itertools.product((SMOLLM2, LLAMA_8B), (1, 8, 64)):
        time_small(model, rows)


def time_small(model: ModelShape, rows: int) -> None:
    x = torch.randn(rows, model.hidden, device=DEVICE).bfloat16()
    weight = torch.randn(model.hidden, device=DEVICE).bfloat16()
    norm_us = time_graph(lambda: [rms_norm(x, weight, 1e-5) for _ in range(50)]) / 50
    qkv = torch.randn(rows, (model.heads + 2 * model.kv_heads) * model.head_dim, device=DEVICE).bfloat16()
    k_cache, v_cache = torch.zeros(2, rows + 1, model.kv_heads, model.head_dim, device=DEVICE, dtype=torch.bfloat16)
    index = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    cos = torch.rand(128, model.head_dim // 2, device=DEVICE)
    rotary_us = time_graph(lambda: [rotary_store(qkv, index, cos, cos, index, k_cache, v_cache, None, None, 1e-5) for _ in range(50)]) / 50
    gate_up = torch.randn(rows, 2 * model.intermediate, device=DEVICE).bfloat16()
    silu_us = time_graph(lambda: [silu_mul_triton(gate_up) for _ in range(50)]) / 50
    print(f"  {model.name:8} m={rows:3} rms_norm {norm_us:5.2f} us, rotary_store {rotary_us:5.2f}, silu_mul {silu_us:5.2f}", flush=True)


# ---------------------------------------------------------------- whole stack


class Stack:
    """The kernel sequence of a model with random weights: layers, final norm, head."""

    def __init__(self, model: ModelShape, layers: int, rows: int, context: int) -> None:
        self.model, self.rows = model, rows
        scale = 0.5 * model.hidden**-0.5
        self.layers = [
            [torch.empty(n, k, dtype=torch.bfloat16, device=DEVICE).normal_(std=scale) for _, n, k in layer_products(model)]
            for _ in range(layers)
        ]
        self.head = torch.empty(model.vocab, model.hidden, dtype=torch.bfloat16, device=DEVICE).normal_(std=scale)
        self.norm = torch.ones(model.hidden, dtype=torch.bfloat16, device=DEVICE)
        self.set_rows(rows, context)
        self.cos = torch.rand(max(STACK_CONTEXTS) + 128, model.head_dim // 2, device=DEVICE)

    def set_rows(self, rows: int, context: int) -> None:
        """One request: a token, or a tree of `rows`."""
        model = self.model
        case = AttentionCase("stack", model.heads, model.kv_heads, model.head_dim, (context,), (rows,), tree=rows > 1)
        _, self.cache, inputs = attention_tensors(case, len(self.layers))
        starts = inputs.prefix_lens.long()[:, None] + torch.arange(max(case.query_lens), device=DEVICE)
        slots = inputs.slot_table.gather(1, starts).flatten()
        self.inputs = replace(inputs, out_slots=slots.int().contiguous())
        self.x = torch.randn(rows, model.hidden, device=DEVICE).bfloat16()

    def step(self) -> torch.Tensor:
        x, inputs, model = self.x, self.inputs, self.model
        for index, (qkv_weight, o_weight, gate_up_weight, down_weight) in enumerate(self.layers):
            k_cache, v_cache = self.cache[index, 0], self.cache[index, 1]
            qkv = norm_linear(x, self.norm, 1e-5, qkv_weight, None)
            q = rotary_store(qkv, inputs.positions, self.cos, self.cos, inputs.out_slots, k_cache, v_cache, None, None, 1e-5)
            out = attention_module.attention(q, k_cache, v_cache, inputs, model.head_dim**-0.5, None)
            x = linear_residual(out, o_weight, None, x)
            x = linear_residual(norm_gate_up(x, self.norm, 1e-5, gate_up_weight, None), down_weight, None, x)
        return norm_linear(x, self.norm, 1e-5, self.head, None)


def warm_stack(model: ModelShape, rows: int) -> float:
    logits = Stack(model, 2, rows, 512).step()
    return 0.0 if bool(logits.isfinite().all()) else float("inf")


def section_stack(best: dict) -> None:
    default_choice, default_launch = linear_module.choose_tile, launch.dependent_launch_supported

    def best_choice(
        num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool, dtype: torch.dtype, launches_overlap: bool
    ) -> LinearTile:
        found = best.get((1 << (num_rows - 1).bit_length(), num_outputs, num_inputs, gate_up))
        return found or default_choice(num_rows, num_outputs, num_inputs, gate_up, dtype, launches_overlap)

    variants = (
        ("best tiles", best_choice, default_launch),
        ("no dependent launch", best_choice, lambda device: False),
        ("tiles of now", default_choice, default_launch),
        ("library only", lambda *_: LibraryProduct(), default_launch),
    )
    for model in (SMOLLM2, LLAMA_8B):
        floor = model.weight_bytes / BANDWIDTH_BYTES_PER_US
        stack = Stack(model, model.layers, 1, STACK_CONTEXTS[0])
        for rows, context in itertools.product(STACK_ROWS, STACK_CONTEXTS):
            stack.set_rows(rows, context)
            texts = []
            for name, choice, supported in variants:
                try:
                    linear_module.choose_tile, launch.dependent_launch_supported = choice, supported
                    us = time_graph(stack.step)
                    same = torch.equal(stack.step(), stack.step())
                    texts.append(f"{name} {us / 1e3:.3f} ms ({us / floor:.2f} x){'' if same else ' NOT REPEATABLE'}")
                except Exception as error:
                    texts.append(f"{name} FAILED {type(error).__name__} {str(error)[:150]}")
                finally:
                    linear_module.choose_tile, launch.dependent_launch_supported = default_choice, default_launch
            print(f"  {model.name:8} m={rows:3} context {context:5} floor {floor / 1e3:.3f} ms: " + "; ".join(texts), flush=True)
        del stack
        torch.cuda.empty_cache()


def main() -> None:
    started = time.perf_counter()
    best: dict = {}
    sections: list[tuple[str, Callable[[], None]]] = [
        ("correctness (error / limit)", section_correctness),
        ("linear", lambda: section_linear(best)),
        ("attention", section_attention),
        ("small kernels", section_small),
        ("whole stack", lambda: section_stack(best)),
    ]
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for name, section in sections:
        print(f"== {name} [{time.perf_counter() - started:.0f} s]", flush=True)
        try:
            section()
        except Exception:
            traceback.print_exc(limit=-4)
    print(f"== done [{time.perf_counter() - started:.0f} s]")
    if os.environ.get("OUT"):
        lines = [f"    {key}: {type(tile).__name__}({', '.join(map(str, astuple(tile)))}),\n" for key, tile in best.items()]
        pathlib.Path(os.environ["OUT"], "measured_tiles.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
