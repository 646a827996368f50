"""Does the host keep up with the GPU? Step and iteration time, host time, and the share of time in which no graph runs.

    python -m benchmarks.host_time                              both shapes, plain and 7/1/8, batch 1, 64 and 256
    python -m benchmarks.host_time --shape smollm2 --batch 1

Random weights (a random draft is hardly ever accepted: an iteration costs the same, only token/s would be better), bfloat16.
`host us` is the time spent in `Engine.step` less the wait for the device. `no graph` is the share of the device's time from the
first replay to the last one's end that lies between replays, by events. `sync` says whether the steady loop runs under
torch.cuda.set_sync_debug_mode("error").
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.dummy_models import SHAPES, DummyPair, load_dummy_pair
from eaglecli.engine.engine import Engine
from eaglecli.engine.graph_runner import GraphRunner
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.row_state import HostHints
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings

CONTEXT = 1024
PROMPT_LEN = 64
CAP = 700
WARMUP_ITERATIONS = 10


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    shape: str
    mode: str
    batch: int
    iteration_ms: float
    floor_ms: float
    host_us: float
    no_graph_share: float
    tokens_per_s: float
    graph_hit_rate: float
    sync: str

    def line(self) -> str:
        """Fixed columns."""
        return (
            f"{self.shape:9}{self.mode:7}{self.batch:6}{self.iteration_ms:14.3f}{self.floor_ms:10.3f}"
            f"{self.iteration_ms / self.floor_ms:9.2f}{self.host_us:10.0f}{self.no_graph_share:10.1%}"
            f"{self.tokens_per_s:11.0f}{self.graph_hit_rate:8.0%}  {self.sync}"
        )


HEADER = (
    f"{'shape':9}{'mode':7}{'batch':>6}{'iteration ms':>14}{'floor ms':>10}{'x floor':>9}{'host us':>10}{'no graph':>10}"
    f"{'token/s':>11}{'graphs':>8}  sync"
)


class WaitingEvent:
    """An event that adds up the time the host waits for it."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event
        self.waited_s = 0.0

    def record(self) -> None:
        """As the event's own."""
        self.event.record()

    def synchronize(self) -> None:
        """As the event's own, timed."""
        started = perf_counter()
        self.event.synchronize()
        self.waited_s += perf_counter() - started


class TimedRunner:
    """Events around every run of a stage."""

    def __init__(self, runner: GraphRunner, spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self.runner, self.spans = runner, spans

    def run(self, size: int, hints: HostHints) -> None:
        """As the runner's own."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.runner.run(size, hints)
        end.record()
        self.spans.append((begin, end))


def open_engine(pair: DummyPair, speculation: SpeculationSettings, batch: int) -> Engine:
    """An engine with `batch` requests past their prompts, its graphs captured."""
    settings = EngineSettings(
        context_length=CONTEXT,
        max_total_tokens=batch * (PROMPT_LEN + CAP + speculation.lookahead + 16) + 16,
        max_running_requests=batch,
        chunked_prefill_size=2048,
        graph_sizes=(batch,),
        speculation=speculation,
    )
    engine = Engine(pair.target.model, pair.draft.model if speculation.num_steps else None, settings)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    random = np.random.default_rng(0)
    for key in range(batch):
        prompt = random.integers(0, engine.vocab_size, PROMPT_LEN).astype(np.int32)
        engine.add(Request(key, prompt, SamplingParams(max_new_tokens=CAP)))
    while engine.counts.num_prefill_tokens < batch * PROMPT_LEN:
        engine.step()
    for _ in range(WARMUP_ITERATIONS):
        engine.step()
    return engine


def measure(pair: DummyPair, shape: str, mode: str, speculation: SpeculationSettings, batch: int, iterations: int) -> Row:
    """One line of the table."""
    engine = open_engine(pair, speculation, batch)
    is_cuda = engine.can_capture
    if is_cuda:
        engine._readback._events = [WaitingEvent(event) for event in engine._readback._events]  # type: ignore[misc]
    tokens_before, seconds, waited_s = _num_tokens(engine), _run(engine, iterations), _waited_s(engine)
    tokens = _num_tokens(engine) - tokens_before
    share = _no_graph_share(engine, iterations // 2) if is_cuda else float("nan")
    sync = _runs_without_sync(engine, iterations // 4) if is_cuda else "no GPU"
    return Row(
        shape,
        mode,
        batch,
        iteration_ms=seconds / iterations * 1e3,
        floor_ms=pair.floor_s(speculation) * 1e3,
        host_us=(seconds - waited_s) / iterations * 1e6,
        no_graph_share=share,
        tokens_per_s=tokens / seconds,
        graph_hit_rate=engine.summary()["graph_hit_rate"],
        sync=sync,
    )


def _run(engine: Engine, iterations: int) -> float:
    started = perf_counter()
    for _ in range(iterations):
        engine.step()
    return perf_counter() - started


def _waited_s(engine: Engine) -> float:
    return sum(getattr(event, "waited_s", 0.0) for event in engine._readback._events)


def _num_tokens(engine: Engine) -> int:
    return int(engine._outputs.num_tokens.sum())


def _no_graph_share(engine: Engine, iterations: int) -> float:
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    runners = engine._runners
    engine._runners = [TimedRunner(runner, spans) for runner in runners]  # type: ignore[misc]
    _run(engine, iterations)
    engine._runners = runners
    torch.cuda.synchronize()
    total = spans[0][0].elapsed_time(spans[-1][1])
    return 1 - sum(begin.elapsed_time(end) for begin, end in spans) / total


def _runs_without_sync(engine: Engine, iterations: int) -> str:
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(engine, iterations)
        return "holds"
    except RuntimeError as error:
        return f"broken: {str(error).splitlines()[0][:80]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attempt(what: str, work: Callable[[], Row]) -> Row | None:
    """The row, or the reason why there is none on stdout."""
    started = perf_counter()
    try:
        row = work()
    except Exception:
        print(f"{what} failed after {perf_counter() - started:.0f} s:", traceback.format_exc(limit=-3), sep="\n", flush=True)
        return None
    print(row.line(), f" ({perf_counter() - started:.0f} s)", flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one run: 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["smollm2", "llama8b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--triple", nargs="+", default=["plain", "7/1/8"], help="steps/topk/draft tokens, or plain")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch", torch.__version__, HEADER, sep="\n", flush=True)
    rows: list[Row | None] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            try:
                pair = load_dummy_pair(shape, Path(folder), dtype, device, CONTEXT)
            except Exception:
                print(f"{shape} cannot be made:", traceback.format_exc(limit=-3), sep="\n", flush=True)
                rows.append(None)
                continue
            for mode in options.triple:
                speculation = PLAIN if mode == "plain" else SpeculationSettings(*map(int, mode.split("/")))
                for batch in options.batch:

                    def work(
                        pair: DummyPair = pair,
                        shape: str = shape,
                        mode: str = mode,
                        batch: int = batch,
                        speculation: SpeculationSettings = speculation,
                    ) -> Row:
                        return measure(pair, shape, mode, speculation, batch, options.iterations)

                    rows.append(attempt(f"{shape} {mode} batch {batch}", work))
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
            del pair
    print("", HEADER, *(row.line() for row in rows if row is not None), sep="\n")
    return int(None in rows)


if __name__ == "__main__":
    sys.exit(main())
