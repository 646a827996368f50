# ruff: noqa: D101, D102, D103, E402 - a script; the package is found beside it
"""Kernels of the model on one GPU: correct, how fast, which tile is best. No arguments; prints short tables.

    python benchmarks/bench_kernels_model.py

1. Compile everything and compare with float64 references, in worker processes (compiling is most of the time).
2. Every linear of two models at 1, 8, 16, 64 rows, tile by tile, in CUDA graphs over weights that the L2 cannot hold.
3. Attention, rotary store and norm; 4. the whole stack of layers in one graph, with and without dependent launch.
Every section goes on when another fails. Floors: weight bytes / 4.08 TB/s. With OUT set, $OUT/measured_tiles.txt holds the
lines of `small_row_linear.MEASURED_TILES`.
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
from dataclasses import asdict, dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional

from eaglecli.kernels import attention as attention_module
from eaglecli.kernels import launch, small_row_linear
from eaglecli.kernels.attention import AttentionTile, attention_reference, attention_triton
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.linear import (
    linear_residual,
    linear_residual_reference,
    norm_gate_up,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_reference,
)
from eaglecli.kernels.rms_norm import rms_norm, rms_norm_reference
from eaglecli.kernels.rotary_store import rotary_store, rotary_store_reference
from eaglecli.kernels.small_row_linear import LinearTile

BANDWIDTH_BYTES_PER_US = 4.08e6
DEVICE = "cuda"
ROW_COUNTS = (1, 8, 16, 64)
NUM_WORKERS = 12
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
    operation: str, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, residual: torch.Tensor, tile: LinearTile | None
) -> object:
    if operation in ("o", "down"):
        return small_row_linear.small_row_linear(x, weight, residual=residual, tile=tile)
    return small_row_linear.small_row_linear(x, weight, norm_weight=norm, eps=1e-5, gate_up=operation == "gate_up", tile=tile)


def candidate_tiles(num_rows: int, operation: str, num_inputs: int, num_outputs: int) -> list[LinearTile]:
    pairs = 2 if operation == "gate_up" else 1
    small = num_inputs < 2048
    tiles = []
    if num_rows == 1:
        widths = (min(2048, 1 << (num_inputs - 1).bit_length()),) if small else (512, 1024, 2048)
        for outputs, inputs, warps in itertools.product((1, 2, 4, 8), widths, (2, 4, 8)):
            per_thread = outputs * inputs * pairs // (32 * warps)
            if (16 if not small else 8) <= per_thread <= 64 and num_outputs / outputs < 40_000:
                tiles.append(LinearTile(0, outputs, inputs, warps, 1))
    rows = max(16, num_rows)
    choices = [(16, 64, 4, 6, 0), (16, 128, 4, 4, 0), (32, 64, 4, 5, 0), (32, 128, 4, 4, 0), (16, 128, 4, 4, 256)]
    if small:
        choices += [(8, 64, 4, 6, 0), (16, 64, 2, 9, 0), (8, 64, 2, 9, 0), (8, 128, 4, 5, 0), (16, 128, 4, 5, 512)]
    else:
        choices += [(16, 256, 4, 3, 0), (16, 256, 4, 4, 0), (32, 256, 4, 3, 0), (32, 128, 4, 6, 0), (64, 64, 4, 5, 0), (64, 128, 4, 3, 0)]
        choices += [(16, 256, 4, 4, 512), (32, 128, 4, 4, 256), (64, 128, 8, 3, 0)]
    if num_rows == 1 and not small:
        choices = [choice for choice in choices if choice[0] <= 32 and choice[1] >= 128]
    for outputs, inputs, warps, stages, prefetch in choices:
        shared = stages * 2 * (rows * inputs + pairs * outputs * inputs)
        if shared <= SHARED_MEMORY_BYTES and rows * inputs <= 64 * 128:
            tiles.append(LinearTile(rows, outputs, inputs, warps, stages, prefetch))
    return tiles


def linear_cases() -> list[tuple[ModelShape, str, int, int, int]]:
    """(model, operation, weight rows, weight columns, rows of x); 8 and 16 rows share their tiles."""
    cases = []
    for model in (SMOLLM2, LLAMA_8B):
        for (operation, n, k), rows in itertools.product([*layer_products(model), ("head", model.vocab, model.hidden)], (1, 8, 64)):
            cases.append((model, operation, n, k, rows))
    return cases


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


def check_attention(case: AttentionCase) -> float:
    q, cache, inputs = attention_tensors(case)
    poison_free_memory()
    out = attention_triton(q, cache[0, 0], cache[0, 1], inputs, case.head_dim**-0.5, case.window, case.num_splits)
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
    for context in (512, 4096):
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


def check_tiles(model: ModelShape, operation: str, n: int, k: int, rows: int) -> float:
    """Every candidate tile of a shape is compiled and compared: worst error / limit."""
    worst = 0.0
    outputs = n // 2 if operation == "gate_up" else n
    x, norm, residual = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((rows, k), (k,), (rows, outputs)))
    weight = (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16()
    if operation in ("o", "down"):
        expected = linear_residual_reference(x.double(), weight.double(), None, residual.double())
    elif operation == "gate_up":
        expected = norm_gate_up_reference(x.double(), norm.double(), 1e-5, weight.double(), None)
    else:
        expected = norm_linear_reference(x.double(), norm.double(), 1e-5, weight.double(), None)
    problems = []
    for tile in candidate_tiles(rows, operation, k, outputs):
        try:
            poison_free_memory()
            worst = max(worst, relative_error(run_linear(operation, x, weight, norm, residual, tile), expected))
        except Exception as error:
            problems.append(f"{tile}: {type(error).__name__} {str(error)[:80]}")
    if problems:
        print(f"  tiles that fail, {model.name} {operation} m={rows}: {problems[:2]} ({len(problems)})", flush=True)
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


def warm_attention(model: ModelShape, index: int) -> float:
    """Compile what the timing of a case needs."""
    return check_attention(attention_timing_cases(model)[index])


def all_checks() -> list[tuple[str, Callable[..., float], tuple]]:
    checks: list[tuple[str, Callable[..., float], tuple]] = []
    checks += [(f"tiles {case[0].name} {case[1]} m={case[4]}", check_tiles, case) for case in linear_cases()]
    checks += [(f"attention {case.name} {case.dtype}", check_attention, (case,)) for case in attention_check_cases()]
    for model in (SMOLLM2, LLAMA_8B):
        checks += [(f"attention timing {model.name} {i}", warm_attention, (model, i)) for i in range(len(attention_timing_cases(model)))]
        checks += [(f"stack {model.name} m={m}", warm_stack, (model, m)) for m in ROW_COUNTS]
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
    order = sorted(range(len(checks)), key=lambda index: not checks[index][0].startswith("tiles"))
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
    print("  shape                     m  us      TB/s  x floor | library us | tile (rows outputs inputs warps stages prefetch)")
    for model, operation, n, k, rows in linear_cases():
        try:
            sweep_shape(model, operation, n, k, rows, pool, best)
        except Exception as error:
            print(f"  {model.name} {operation} m={rows} FAILED {type(error).__name__} {str(error)[:200]}", flush=True)


def sweep_shape(model: ModelShape, operation: str, n: int, k: int, rows: int, pool: torch.Tensor, best: dict) -> None:
    copies = max(1, min(96, 300_000_000 // (n * k)))
    weights = [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(copies)]
    outputs = n // 2 if operation == "gate_up" else n
    x, norm, residual = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((rows, k), (k,), (rows, outputs)))
    results = []
    for tile in candidate_tiles(rows, operation, k, outputs):
        try:
            us = time_graph(lambda tile=tile: [run_linear(operation, x, w, norm, residual, tile) for w in weights], 5) / copies
            results.append((us, tile))
        except Exception:  # reported by the checks
            torch.cuda.synchronize()
    results.sort(key=lambda pair: pair[0])
    library = time_graph(lambda: [functional.linear(x, w) for w in weights], 5) / copies
    us, tile = results[0]
    floor = n * k * 2 / BANDWIDTH_BYTES_PER_US
    default = small_row_linear.choose_tile(rows, outputs, k, operation == "gate_up", torch.bfloat16)
    default_us = next((t for t, candidate in results if candidate == default), float("nan"))
    best[(rows, outputs, k, operation == "gate_up")] = tile
    matrix = next((f" matrix {t:.2f} {tuple(asdict(c).values())}" for t, c in results if c.block_rows), "") if tile.block_rows == 0 else ""
    print(
        f"  {model.name:8}{operation:8}{n:7}x{k:<6}{rows:3} {us:7.2f} {n * k * 2 / us / 1e6:5.2f} {us / floor:6.2f} |{library:8.2f} | "
        f"{tuple(asdict(tile).values())} 2nd {results[1][0]:.2f} default {default_us:.2f}{matrix}",
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
        return time_graph(
            lambda: [attention_triton(q, cache[i, 0], cache[i, 1], inputs, scale, None, num_splits, 0, tile) for i in range(layers)], 5
        ) / layers

    used = sum(case.prefix_lens) + sum(case.query_lens)
    moved = 2 * 2 * used * case.kv_heads * case.head_dim
    text = f"  {model.name:8}{case.name:18} us {measure(None):7.2f} (bytes / BW {moved / BANDWIDTH_BYTES_PER_US:6.2f}) splits"
    if case.name in ("decode 512", "decode 4096", "chain 8 512", "tree 16 512", "decode 512/8192"):
        text += "".join(f" {splits}:{measure(splits):.2f}" for splits in (1, 4, 8, 16, 32))
    print(text, flush=True)


def section_small() -> None:
    for model, rows in itertools.product((SMOLLM2, LLAMA_8B), (1, 64)):
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
    print(f"  {model.name:8} m={rows:3} rms_norm {norm_us:5.2f} us, rotary_store {rotary_us:5.2f} us", flush=True)


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
        self.cos = torch.rand(context + 128, model.head_dim // 2, device=DEVICE)

    def set_rows(self, rows: int, context: int) -> None:
        """64 rows: 64 requests of one token; 8 and 16: one request's tree; 1: one token."""
        model, heads = self.model, (self.model.heads, self.model.kv_heads, self.model.head_dim)
        if rows == 64:
            case = AttentionCase("stack", *heads, (context,) * 64, (1,) * 64)
        else:
            case = AttentionCase("stack", *heads, (context,), (rows,), tree=rows > 1)
        _, self.cache, inputs = attention_tensors(case, len(self.layers))
        starts = inputs.prefix_lens.long()[:, None] + torch.arange(max(case.query_lens), device=DEVICE)
        slots = inputs.slot_table.gather(1, starts).flatten()
        self.inputs = AttentionInputs(**{**vars(inputs), "out_slots": slots.int().contiguous()})
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
    default_choice, default_launch = small_row_linear.choose_tile, launch.dependent_launch_supported

    def best_choice(num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool, dtype: torch.dtype) -> LinearTile:
        bucket = 1 if num_rows == 1 else 8 if num_rows <= 16 else 64
        found = best.get((bucket, num_outputs, num_inputs, gate_up))
        return found or default_choice(num_rows, num_outputs, num_inputs, gate_up, dtype)

    for model in (SMOLLM2, LLAMA_8B):
        floor = model.weight_bytes / BANDWIDTH_BYTES_PER_US
        stack = Stack(model, model.layers, 1, 512)
        for rows in ROW_COUNTS:
            stack.set_rows(rows, 512)
            texts = []
            for name, choice, supported in (
                ("default tiles", default_choice, default_launch),
                ("best tiles", best_choice, default_launch),
                ("best tiles, no dependent launch", best_choice, lambda device: False),
            ):
                try:
                    small_row_linear.choose_tile, launch.dependent_launch_supported = choice, supported
                    us = time_graph(stack.step)
                    same = torch.equal(stack.step(), stack.step())
                    texts.append(f"{name} {us / 1e3:.3f} ms ({us / floor:.2f} x){'' if same else ' NOT REPEATABLE'}")
                except Exception as error:
                    texts.append(f"{name} FAILED {type(error).__name__} {str(error)[:150]}")
                finally:
                    small_row_linear.choose_tile, launch.dependent_launch_supported = default_choice, default_launch
            print(f"  {model.name:8} m={rows:3} floor {floor / 1e3:.3f} ms: " + "; ".join(texts), flush=True)
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
        ("whole stack, context 512", lambda: section_stack(best)),
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
        lines = [f"    {key}: LinearTile{tuple(asdict(tile).values())},\n" for key, tile in best.items()]
        pathlib.Path(os.environ["OUT"], "measured_tiles.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
