"""Our figures beside those that SGLang 0.5.17 and vLLM 0.26.0 reached under the same conditions, and beside the floor.

    python -m benchmarks.peers_table --shape llama-3.1-8b
    python -m benchmarks.peers_table --shape smollm2-135m --mode plain K5 --batch 1 8

Conditions (project file perf-anchors.md, "Measured on one H200"): random weights, 64 random prompt ids, 256 output tokens, greedy, end
of text ignored, all requests submitted at once, time with prefill, best of two passes after a warm-up of the same batch (one, where a
pass takes seconds). EAGLE-3 with simulated acceptance: chains of 5 (2.88 tokens a step) and 7 (5.40), tree 5/4/16 (2.88). The peers'
figures are of that one card; on another kind of GPU only the ratio to the floor, measured in the same run, means anything.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from eaglecli.commands._bench_engine import BenchModels, find_bench_models, load_bench_models, open_bench_engine
from eaglecli.commands._bench_prompts import read_prompts
from eaglecli.commands._bench_run import Pass, in_simulated_step, run_pass, warm_up
from eaglecli.commands._bench_settings import BenchOptions, with_bench_defaults
from eaglecli.commands._open_engine import find_device
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import GenerateSettings, resolve_settings
from eaglecli.engine.device_memory import release_memory
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from eaglecli.io.console import Console

PROMPT_LEN, OUTPUT_LEN = 64, 256
SECONDS_FOR_TWO_PASSES = 3.0  # a pass that takes longer is not repeated: its noise is small beside it


@dataclass(frozen=True)
class Mode:
    """A triple and the accept length that is simulated with it."""

    speculation: SpeculationSettings
    accept_length: float | None


MODES = {
    "plain": Mode(PLAIN, None),
    "K5": Mode(SpeculationSettings(5, 1, 6), 2.88),
    "K7": Mode(SpeculationSettings(7, 1, 8), 5.40),
    "tree": Mode(SpeculationSettings(5, 4, 16), 2.88),
}
BATCHES = (1, 8, 32, 64, 256)
# Output token/s of SGLang and of vLLM by batch size; an absent engine was not measured.
PEERS: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    ("smollm2-135m", "plain"): {"SGLang": (781, 6178, 21467, 38724, 93840), "vLLM": (551, 3200, 9114, 18739, 29434)},
    ("smollm2-135m", "K5"): {"SGLang": (538, 4435, 17175, 31261, 94916), "vLLM": (520, 3463, 18887, 30478, 24904)},
    ("smollm2-135m", "tree"): {"SGLang": (545, 4395, 15907, 26498, 37418)},
    ("llama-3.1-8b", "plain"): {"SGLang": (207.6, 1596, 5749, 10091, 20708), "vLLM": (203.8, 1576, 5678, 9930, 20772)},
    ("llama-3.1-8b", "K5"): {"SGLang": (430, 3310, 9560, 12465, 14451), "vLLM": (376, 2698, 8629, 11490, 13856)},
    ("llama-3.1-8b", "tree"): {"SGLang": (358, 2459, 4404, 4838, 4972)},
    ("llama-3.1-8b", "K7"): {"SGLang": (749, 5409, 14943, 17801, 21049), "vLLM": (636, 4588, 13217, 16799, 20443)},
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    shape: str
    mode: str
    batch: int
    tokens_per_s: float
    accept_length: float | None
    step_ms: float | None
    floor_ms: float
    peer: str | None
    peer_tokens_per_s: float | None
    seconds: float

    def line(self) -> str:
        """Fixed columns."""
        ratio = f"{self.tokens_per_s / self.peer_tokens_per_s:8.2f}" if self.peer_tokens_per_s else f"{'-':>8}"
        peer = f"{self.peer_tokens_per_s:10.0f}  {self.peer:7}" if self.peer_tokens_per_s else f"{'-':>10}  {'':7}"
        accept = f"{self.accept_length:8.3f}" if self.accept_length else f"{'-':>8}"
        step = (
            f"{self.step_ms:9.3f}{self.floor_ms:10.3f}{self.step_ms / self.floor_ms:9.2f}" if self.step_ms else f"{'-':>9}{'-':>10}{'-':>9}"
        )
        return f"{self.mode:6}{self.batch:6}{self.tokens_per_s:11.0f}{peer}{ratio}{accept}{step}{self.seconds:7.1f}"


HEADER = (
    f"{'mode':6}{'batch':>6}{'token/s':>11}{'best peer':>10}  {'':7}{'ratio':>8}{'accept':>8}{'step ms':>9}{'floor ms':>10}{'x floor':>9}"
    f"{'took s':>7}"
)


def best_peer(shape: str, mode: str, batch: int) -> tuple[str | None, float | None]:
    """The faster of the two and its figure."""
    figures = PEERS.get((shape, mode), {})
    if batch not in BATCHES or not figures:
        return None, None
    return max(((name, rates[BATCHES.index(batch)]) for name, rates in figures.items()), key=lambda item: item[1])


def measure_mode(
    models: BenchModels, settings: GenerateSettings, shape: str, name: str, batches: Sequence[int], requests: list[Request]
) -> list[Row]:
    """All batch sizes of one mode, in one engine."""
    mode, started = MODES[name], time.perf_counter()
    opened = open_bench_engine(models, settings, SpeculationPlan(mode.speculation), batches, requests, mode.accept_length)
    print(f"{name}: engine and graphs in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    rows = []
    for batch in batches:
        started = time.perf_counter()
        wave = requests[:batch] if mode.accept_length is None else in_simulated_step(requests[:batch], mode.accept_length)
        best = best_pass(opened.engine, wave)
        step_s = best.steady_window(batch).decode_step_s
        work = models.work(mode.speculation)
        floor_s = work.floor_s(models.speed, batch, PROMPT_LEN + OUTPUT_LEN / 2, best.totals.accept_length or 1.0)
        row = Row(
            shape,
            name,
            batch,
            best.output_throughput,
            best.totals.accept_length if mode.accept_length else None,
            float(np.median(step_s)) * 1e3 if len(step_s) else None,
            floor_s * 1e3,
            *best_peer(shape, name, batch),
            seconds=time.perf_counter() - started,
        )
        rows.append(row)
        print(row.line(), flush=True)
    return rows


def best_pass(engine: Engine, wave: Sequence[Request]) -> Pass:
    """After one warm-up of the same batch."""
    warm_up(engine, wave, len(wave), num_warmups=1)
    best = run_pass(engine, wave, len(wave), ())
    if best.elapsed_s < SECONDS_FOR_TWO_PASSES:
        again = run_pass(engine, wave, len(wave), ())
        best = min(best, again, key=lambda done: done.elapsed_s)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="llama-3.1-8b, smollm2-135m, or tiny to try the script")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--chunked-prefill-size", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also write the rows to this file, a line each")
    options = parser.parse_args(arguments)
    given = {
        "target": options.shape,
        "draft": "dummy",
        "load_format": "dummy",
        "context_length": options.context_length,
        "chunked_prefill_size": options.chunked_prefill_size,
        "cuda_graph_bs": sorted(options.batch),
    }
    bench_options = BenchOptions(random_input_len=PROMPT_LEN, random_output_len=OUTPUT_LEN)
    settings = with_bench_defaults(resolve_settings(given, None, find_device), bench_options)
    found, fit = find_bench_models(settings)
    models = load_bench_models(found, fit, settings)
    speed = models.speed
    device = torch.cuda.get_device_name() if models.device.type == "cuda" else "cpu"
    print(f"{options.shape} on {device}, {models.dtype}; loaded in {models.load_s:.1f} s")
    print(
        f"measured: copy {speed.copy_bytes_per_s / 1e12:.2f} TB/s, weights x vector {speed.weight_bytes_per_s / 1e12:.2f} TB/s, "
        f"{speed.flops / 1e12:.0f} TFLOP/s"
    )
    print(HEADER, flush=True)
    requests = list(read_prompts(bench_options, settings, found, max(options.batch), Console(quiet=True)).requests)
    rows: list[Row] = []
    for name in options.mode:
        rows += measure_mode(models, settings, options.shape, name, sorted(options.batch), requests)
        release_memory()
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
