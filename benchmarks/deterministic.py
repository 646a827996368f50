"""What --enable-deterministic-inference costs, and that it holds: the same requests in both modes, plain and drafted, at several batches.

    python -m benchmarks.deterministic                          SmolLM2's shape, batch 1, 16 and 64
    python -m benchmarks.deterministic --shape llama8b --batch 1 32
    python -m benchmarks.deterministic --tiles                  products of candidate tiles: their bits and their times

Random weights: their scores lie close together, so that texts follow the last bits; every other request is greedy, the others sample at
temperature 1. Every row is one run with graphs after a run that warms it up: token/s of both modes, and how many texts differ from those
of the first row of their mode. In deterministic mode one that differs makes the exit code 7. The prefill stands apart: many rows are
where one tile for all costs most.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.dummy_models import SHAPES, DummyPair, load_dummy_pair
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.errors import ExitCode
from eaglecli.kernels.linear_tiles import ROW_INVARIANT_TILE, MatrixTile
from eaglecli.kernels.model_kernels import FASTEST, ROW_INVARIANT
from eaglecli.kernels.row_invariant_linear import row_invariant_linear_triton
from eaglecli.models.kernel_choice import use_kernels

CONTEXT = 1024
CHUNK = 2048
TRIPLES = (None, (5, 1, 6), (3, 4, 16))
TILES = (ROW_INVARIANT_TILE, MatrixTile(16, 64, 128, 4, 4), MatrixTile(64, 64, 64, 4, 4), MatrixTile(128, 128, 64, 8, 3))
Texts = list[list[int]]


@dataclass(frozen=True)
class Timed:
    """One run."""

    prefill_tokens_per_s: float
    tokens_per_s: float
    texts: Texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiles", action="store_true", help="compare tiles instead")
    options = parser.parse_args(arguments)
    if options.tiles:
        compare_tiles(getattr(torch, options.dtype))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        pair = load_dummy_pair(options.shape, Path(folder), getattr(torch, options.dtype), torch.device(options.device), CONTEXT)
    requests = make_requests(max(options.batch), options.prompt_len, options.new_tokens, pair.target.config.vocab_size)
    first: dict[bool, Texts] = {}
    num_wrong = 0
    print(f"{'mode':14}{'triple':9}{'batch':>6}{'prefill token/s':>17}{'token/s':>10}{'other texts':>13}")
    for triple in TRIPLES:
        for batch in options.batch:
            for deterministic in (False, True):
                run = run_once(pair, triple, batch, deterministic, requests)
                reference = first.setdefault(deterministic, run.texts)
                others = sum(ours != theirs for ours, theirs in zip(run.texts, reference, strict=True))
                num_wrong += others if deterministic else 0
                mode, name = ("deterministic" if deterministic else "fastest"), "plain" if triple is None else "/".join(map(str, triple))
                print(f"{mode:14}{name:9}{batch:6}{run.prefill_tokens_per_s:17.0f}{run.tokens_per_s:10.0f}{others:13}", flush=True)
    return int(ExitCode.CHECK_FAILED if num_wrong else ExitCode.OK)


def make_requests(count: int, prompt_len: int, new_tokens: int, vocab_size: int) -> list[Request]:
    """Prompts of random ids, of lengths that differ a little, each with a seed of its own."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, vocab_size, prompt_len + number % 7).astype(np.int32) for number in range(count)]
    return [
        Request(number, prompt, SamplingParams(temperature=number % 2, seed=number, max_new_tokens=new_tokens))
        for number, prompt in enumerate(prompts)
    ]


def run_once(pair: DummyPair, triple: tuple[int, int, int] | None, batch: int, deterministic: bool, requests: Sequence[Request]) -> Timed:
    """The second of two runs of all requests, at most `batch` at a time. `triple` None is plain decoding."""
    for model in (pair.target.model, pair.draft.model):
        use_kernels(model, ROW_INVARIANT if deterministic else FASTEST)  # type: ignore[arg-type]
    speculation = SpeculationSettings(*triple) if triple else PLAIN
    settings = EngineSettings(
        context_length=CONTEXT,
        max_total_tokens=batch * (CONTEXT + 64),
        max_running_requests=batch,
        chunked_prefill_size=CHUNK,
        speculation=speculation,
        graph_sizes=(batch,),
        is_deterministic=deterministic,
    )
    engine = Engine(pair.target.model, pair.draft.model if triple else None, settings)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    generate(engine, requests[:batch])
    prompts_only = [Request(item.key, item.prompt_ids, SamplingParams(max_new_tokens=1)) for item in requests]
    prefill_s, _ = generate(engine, prompts_only)
    seconds, texts = generate(engine, requests)
    return Timed(sum(len(item.prompt_ids) for item in requests) / prefill_s, sum(map(len, texts)) / (seconds - prefill_s), texts)


def generate(engine: Engine, requests: Sequence[Request]) -> tuple[float, Texts]:
    """Seconds, and texts in the order of the requests."""
    started = perf_counter()
    texts = {completion.request.key: completion.output_ids.tolist() for completion in engine.generate(requests)}
    return perf_counter() - started, [texts[request.key] for request in requests]


def compare_tiles(dtype: torch.dtype) -> None:
    """For shapes of real layers: whether a candidate tile gives the bits of the chosen one, and microseconds for 1, 64 and 2,048 rows."""
    print(f"{'outputs x inputs':20}{'tile':>34}{'same bits':>11}{'1':>9}{'64':>9}{'2048':>9} us")
    for outputs, inputs in ((960, 576), (576, 1536), (6144, 4096), (4096, 14_336), (128_256, 4096)):
        weight = torch.randn(outputs, inputs, device="cuda").to(dtype) * inputs**-0.5
        x = torch.randn(2048, inputs, device="cuda").to(dtype)
        expected = row_invariant_linear_triton(x, None, 0.0, weight, None)
        for tile in TILES:

            def product(count: int, tile: MatrixTile = tile, x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
                return row_invariant_linear_triton(x[:count], None, 0.0, weight, None, tile=tile)

            is_same = all(torch.equal(product(count), expected[:count]) for count in (1, 64, 2048))
            times = "".join(f"{microseconds(product, count):9.1f}" for count in (1, 64, 2048))
            shape, name = f"{outputs} x {inputs}", f"{tile.rows}x{tile.outputs}x{tile.inputs}, {tile.num_warps} warps"
            print(f"{shape:20}{name:>34}{is_same!s:>11}{times}", flush=True)


def microseconds(product: Callable[[int], torch.Tensor], count: int, repeats: int = 20) -> float:
    """Of one call, by events over `repeats` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        product(count)
    start.record()
    for _ in range(repeats):
        product(count)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / repeats


if __name__ == "__main__":
    sys.exit(main())
