"""An engine whose iterations take a set time and no CPU: what a run's own process does beside a GPU can be tried without one."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.host_cost import END_ID, NUM_STEPS, InstantStages, open_engine
from eaglecli.commands._open_engine import OpenedEngine
from eaglecli.engine.engine import Engine
from eaglecli.engine.readback import StepResult, StepRows
from eaglecli.engine.settings import SpeculationSettings


class PacedStages(InstantStages):
    """Stages that hand out tokens, which the host can have when the iteration is over: one runs while the host looks at the other."""

    def __init__(self, engine: Engine, iteration_s: float) -> None:
        super().__init__(engine)
        self._iteration_s, self._end_s = iteration_s, 0.0
        self._ends_s: deque[float] = deque()  # of what waits to be read
        self._put, self._take = engine._readback.put, engine._readback.take

    def run(self, size: int, hints: object) -> None:
        """As `GraphRunner.run`: enqueues."""
        super().run(size, hints)
        self._end_s = max(time.perf_counter(), self._end_s) + self._iteration_s

    def put(self, rows: StepRows, records: list[torch.Tensor]) -> None:
        """As `Readback.put`."""
        self._put(rows, records)
        self._ends_s.append(self._end_s)

    def take(self, keep: int) -> StepResult | None:
        """As `Readback.take`: waits."""
        if len(self._ends_s) > keep:
            time.sleep(max(0.0, self._ends_s.popleft() - time.perf_counter()))
        return self._take(keep)


def open_paced_engine(folder: Path, iteration_s: float, vocab_size: int) -> OpenedEngine:
    """256 rows, 512 tokens of context, three tokens an iteration; answers of 128 tokens."""
    engine = open_engine(folder)
    engine.attention = replace(engine.attention, needs_host_lengths=False)  # so that an iteration is in flight, as on a GPU
    stages = PacedStages(engine, iteration_s)
    engine._runners = [stages]  # type: ignore[list-item]
    engine._readback.put, engine._readback.take = stages.put, stages.take  # type: ignore[method-assign]
    speculation = SpeculationSettings(NUM_STEPS, 1, NUM_STEPS + 1)
    return OpenedEngine(engine, 512, (END_ID,), speculation, 16, {}, (), vocab_size=vocab_size)
