"""How long each stage of an iteration takes: by CUDA events on a GPU, by the clock where a stage runs while it is called.

A clock costs launches (two events a stage), so it belongs into a pass of its own, not into the one whose speed is reported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class StageSpans:
    """Where the spans of a stage lie: float64 seconds since the first span of all began."""

    begin_s: np.ndarray
    end_s: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Length of every span."""
        return self.end_s - self.begin_s


class StageClock:
    """Collects spans by stage name."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event] | tuple[str, float, float]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Everything launched inside belongs to one span of stage `name`."""
        begin = self._now()
        yield
        self._spans.append((name, begin, self._now()))  # type: ignore[arg-type]

    def spans(self) -> dict[str, StageSpans]:
        """All spans so far, in order, by stage. Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        first = self._spans[0][1] if self._spans else 0.0
        found: dict[str, list[tuple[float, float]]] = {}
        for name, begin, end in self._spans:
            begin_s = _seconds_between(first, begin)  # events give float32: a span's length is measured by itself
            found.setdefault(name, []).append((begin_s, begin_s + _seconds_between(begin, end)))
        return {name: StageSpans(*np.array(pairs, np.float64).T) for name, pairs in found.items()}

    def _now(self) -> "torch.cuda.Event | float":
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(first: "torch.cuda.Event | float", last: "torch.cuda.Event | float") -> float:
    if isinstance(first, float):
        return last - first  # type: ignore[operator]
    return first.elapsed_time(last) / 1e3  # type: ignore[arg-type]
