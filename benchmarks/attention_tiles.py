"""Which tile serves attention best where many rows run: every candidate timed beside the one that is chosen, and the bytes' floor.

    python -m benchmarks.attention_tiles --shape llama-3.1-8b
    python -m benchmarks.attention_tiles --shape smollm2-135m --batch 64 256 --workers 12

A case is (batch, queries a row, masked or causal, lengths). Lengths: `even` 192 keys each, `long` 1,024 each, `mixed` 60 to 400 with
one row of 1,800. Time of one launch within a graph over several layers' caches; the floor is the bytes of keys and values at 4 TB/s.
Candidates are compiled by `--workers` processes first. `kernels.attention.choose_tile` begins from what
is found here; launches one after another overlap, so that iterations of a model have the last word.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import triton

from eaglecli.kernels.attention import AttentionTile, attention_triton
from eaglecli.kernels.attention_inputs import AttentionInputs

SHAPES = {"llama-3.1-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
LENGTHS = ("even", "long", "mixed")
QUERIES = ((1, False), (4, True), (8, True), (16, True), (32, True))
BYTES_PER_S = 4e12
NUM_LAYERS = 4
WIDTH = 2048


@dataclass(frozen=True)
class Case:
    """One problem."""

    batch: int
    num_queries: int
    is_masked: bool
    lengths: str


@dataclass(frozen=True)
class Candidate:
    """One way to solve it; tile None: what `attention_triton` chooses. min_split_keys 0: splits as it chooses."""

    tile: AttentionTile | None
    min_split_keys: int = 0

    def __str__(self) -> str:
        if self.tile is None:
            return "chosen"
        tile = self.tile
        return f"{tile.block_queries}x{tile.block_keys} w{tile.num_warps} s{tile.num_stages}" + (
            f" split {self.min_split_keys}" if self.min_split_keys else ""
        )


def candidates(packed_rows: int) -> Iterator[Candidate]:
    """The chosen one first."""
    yield Candidate(None)
    block_queries = max(16, min(triton.next_power_of_2(packed_rows), 64))
    shapes = [(64, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3, 5)]
    shapes += [(32, warps, stages) for warps in (2, 4) for stages in (1, 3)]
    shapes += [(128, warps, stages) for warps in (4, 8) for stages in (1, 2)]
    for split, (block_keys, warps, stages) in itertools.product((0, 512, 1024), shapes):
        yield Candidate(AttentionTile(block_queries, block_keys, warps, stages), split)


class Problem:
    """Random caches of a few layers, rows at random slots."""

    def __init__(self, case: Case, heads: tuple[int, int, int]) -> None:
        num_heads, num_kv_heads, head_dim = heads
        random = np.random.default_rng(0)
        count, queries = case.batch, case.num_queries
        lens = {"even": np.full(count, 192), "long": np.full(count, 1024), "mixed": random.integers(60, 400, count)}[case.lengths]
        if case.lengths == "mixed":
            lens[count // 2] = 1800
        columns = lens + queries
        slots = 1 + random.permutation(int(columns.sum()))
        table = np.zeros((count, WIDTH), np.int32)
        for row, (end, size) in enumerate(zip(np.cumsum(columns), columns, strict=True)):
            table[row, :size] = slots[end - size : end]
        device = torch.device("cuda")
        cache = torch.randn(NUM_LAYERS, 2, len(slots) + 1, num_kv_heads, head_dim, device=device, dtype=torch.bfloat16)
        self.caches = list(cache)
        self.q = torch.randn(count * queries, num_heads, head_dim, device=device, dtype=torch.bfloat16)
        mask = torch.ones(queries, queries, dtype=torch.bool, device=device).tril().repeat(count, 1, 1) if case.is_masked else None
        integers = {"dtype": torch.int32, "device": device}
        self.inputs = AttentionInputs(
            rows=torch.arange(count, **integers),
            query_start=torch.arange(0, (count + 1) * queries, queries, **integers),
            prefix_lens=torch.from_numpy(lens.astype(np.int32)).to(device),
            slot_table=torch.from_numpy(table).to(device),
            out_slots=torch.zeros(count * queries, **integers),
            positions=torch.zeros(count * queries, **integers),
            tail_mask=mask,
            max_query_len=queries,
            max_prefix_len=WIDTH,
        )
        self.scale = head_dim**-0.5
        self.floor_us = float(lens.sum()) * num_kv_heads * head_dim * 4 / BYTES_PER_S * 1e6

    def run(self, candidate: Candidate) -> None:
        """One launch a layer."""
        split_keys = candidate.min_split_keys
        splits = {"min_split_keys": split_keys, "num_splits": WIDTH // split_keys} if split_keys else {}
        for keys, values in self.caches:
            attention_triton(self.q, keys, values, self.inputs, self.scale, None, tile=candidate.tile, **splits)

    def time_us(self, candidate: Candidate) -> float:
        """Of one launch."""
        self.run(candidate)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                self.run(candidate)
        times = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (4 * NUM_LAYERS))
        return min(times)


def cases(batches: Sequence[int]) -> Iterator[Case]:
    """All of them; trees of 32 nodes not at the largest batches."""
    for lengths, (queries, is_masked), batch in itertools.product(LENGTHS, QUERIES, batches):
        if batch * queries <= 4096 and not (lengths == "long" and queries > 8):
            yield Case(batch, queries, is_masked, lengths)


def compile_part(shape: str, batches: Sequence[int], part: int, parts: int) -> None:
    """Compile every `parts`-th candidate."""
    heads = SHAPES[shape]
    for (queries, is_masked), batch in itertools.product(QUERIES, {min(batches), max(batches)}):
        problem = Problem(Case(batch, queries, is_masked, "even"), heads)
        for candidate in itertools.islice(candidates(queries * heads[0] // heads[1]), part, None, parts):
            problem.run(candidate)
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """A line a case: floor, what is chosen, the best five."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 32, 64, 256])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write all times of all candidates to this file")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compile_part is not None:
        compile_part(options.shape, options.batch, options.compile_part, options.workers)
        return 0
    given = ["--shape", options.shape, "--batch", *map(str, options.batch), "--workers", str(options.workers)]
    command = [sys.executable, "-m", "benchmarks.attention_tiles", *given, "--compile-part"]
    workers = [subprocess.Popen([*command, str(part)]) for part in range(options.workers)]
    if any(worker.wait() for worker in workers):
        return 1
    heads = SHAPES[options.shape]
    found = []
    for case in cases(options.batch):
        problem = Problem(case, heads)
        times = {str(candidate): problem.time_us(candidate) for candidate in candidates(case.num_queries * heads[0] // heads[1])}
        found.append({**asdict(case), "floor_us": problem.floor_us, "times_us": times})
        chosen = times["chosen"]
        best = sorted(times.items(), key=lambda item: item[1])[:5]
        print(
            f"{case.lengths:6}batch {case.batch:4} queries {case.num_queries:3}  floor {problem.floor_us:7.1f}  chosen {chosen:7.1f}  "
            + "  ".join(f"{name} {time_us:.1f}" for name, time_us in best),
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
