"""Where the time of an iteration goes: a pass with clocks in the stages, and one under torch's profiler. Neither is the timed one."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from eaglecli.commands._bench_run import Pass, run_pass
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request
from eaglecli.engine.stage_clock import StageClock, StageSpans
from eaglecli.errors import UserError
from eaglecli.io.bench_statistics import percentiles

DECODE_STAGES = ("draft", "verify", "extend")


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage (percentiles), the host's own per iteration, and the share of time in which no stage ran."""

    stages_ms: dict[str, dict[str, float | None]]
    host_ms: float | None
    idle_share: float | None
    seconds: float

    def describe(self) -> dict[str, Any]:
        """For the results."""
        return {**self.stages_ms, "host": {"mean": self.host_ms}, "idle_share": self.idle_share}


def time_stages(engine: Engine, requests: Sequence[Request], batch_size: int, device: torch.device, timed: Pass) -> StageTimes:
    """One wave of requests with a clock in every stage.

    On a GPU the host's time is that of the `timed` pass: all that it did not wait for the device, most of it beside running kernels;
    without the bench's own counting.
    On a CPU it is what this pass spent outside of stages.
    """
    started, clock = perf_counter(), StageClock(device)
    engine.measure_stages(clock)
    try:
        clocked = run_pass(engine, requests[:batch_size], batch_size, ())
    finally:
        engine.measure_stages(None)
    spans = _by_stage(clock.spans())
    stages_ms = {name: percentiles(span.seconds * 1e3) for name, span in spans.items()}
    busy_s = sum(float(span.seconds.sum()) for span in spans.values())
    ends = np.concatenate([span.end_s for span in spans.values()]) if spans else np.zeros(1)
    idle_share = max(0.0, 1 - busy_s / float(ends.max())) if spans and ends.max() > 0 else None
    if device.type == "cuda":
        host_s, num_iterations = timed.elapsed_s - timed.waited_s - timed.statistics_s, timed.num_iterations
    else:
        host_s, num_iterations = clocked.elapsed_s - busy_s, clocked.num_iterations
    host_ms = host_s / num_iterations * 1e3 if num_iterations else None
    return StageTimes(stages_ms, host_ms, idle_share, perf_counter() - started)


def stage_of(name: str) -> str:
    """What a stage does: `verify 5/1/6` is the stage `verify` of one of several triples."""
    return name.split()[0]


def _by_stage(spans: Mapping[str, StageSpans]) -> dict[str, StageSpans]:
    """The spans of a stage together, whichever triple it ran for."""
    names = {stage: [name for name in spans if stage_of(name) == stage] for stage in map(stage_of, spans)}
    return {
        stage: StageSpans(*(np.concatenate([getattr(spans[name], end) for name in own]) for end in ("begin_s", "end_s")))
        for stage, own in names.items()
    }


def write_trace(engine: Engine, requests: Sequence[Request], batch_size: int, num_steps: int, file: Path) -> None:
    """A chrome trace of `num_steps` iterations of a running batch. Raises UserError when it cannot be written."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    wave = requests[:batch_size]
    num_prompt_tokens = engine.counts.num_prefill_tokens + sum(len(request.prompt_ids) for request in wave)
    for request in wave:
        engine.add(request)
    while engine.counts.num_prefill_tokens < num_prompt_tokens:
        engine.step()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            if not engine.is_idle:
                engine.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    while not engine.is_idle:
        engine.step()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            file.unlink()
        profiler.export_chrome_trace(str(file))
    except (OSError, RuntimeError) as error:
        raise UserError(f"--profile {file.parent} cannot be written: {error}", "name another folder") from error
