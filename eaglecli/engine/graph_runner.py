"""Captured CUDA graphs of one stage by size and length; where nothing is captured the same padded stage runs eagerly.

`GraphRunner` serves all stages. Sizes of an iteration count requests, those of a prefill are `PrefillSize`. A batch runs at the smallest
captured size that holds it; above the largest it runs at its own size, eagerly, and is counted. A size may be captured for several bounds
of its rows' lengths, since launches are shaped by the bound: the lowest one that holds is replayed.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch

from eaglecli.engine.row_state import HostHints
from eaglecli.engine.stage_clock import StageClock

GraphPool = tuple[int, int]
Size = TypeVar("Size", bound=Any)
FULL_CHECK_PERIOD = 64  # checks of all that a graph relies on, for one in which shapes and dtypes are looked at too


@contextmanager
def model_capture_mode(graph: torch.cuda.CUDAGraph, pool: GraphPool) -> Iterator[None]:
    """Record everything launched inside into `graph`, its memory taken from `pool`.

    The collector stays off meanwhile: freeing a tensor of another stream inside a capture would spoil it.
    """
    torch.cuda.synchronize()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


class CapturableStage(Protocol[Size]):
    """What a graph is captured of: launches that depend on the size alone, over tensors that never move."""

    name: str

    def run(self, size: Size, hints: HostHints) -> None:
        """Launch it."""

    def extent(self, size: Size) -> tuple[int, int]:
        """Requests and tokens of a size, padding included."""


@dataclass(frozen=True)
class CaptureReport:
    """What one captured graph cost."""

    stage: str
    num_requests: int
    num_tokens: int
    max_length: int  # tokens: it serves batches of which no row has more
    warmup_s: float  # first eager run, kernels compiled in it
    capture_s: float
    num_bytes: int  # device memory reserved by the capture, beyond what the pool already had


class CaptureError(Exception):
    """A graph that could not be captured."""

    def __init__(self, stage: str, num_requests: int, num_tokens: int, is_out_of_memory: bool, reason: str) -> None:
        super().__init__(f"the {stage} graph of {num_requests} requests, {num_tokens} tokens: {reason}")
        self.stage = stage
        self.num_requests = num_requests
        self.is_out_of_memory = is_out_of_memory


class StaticTensors:
    """Every tensor whose address, shape and dtype the graphs rely on, by name, and what they were when `freeze` was called.

    The engine checks once an iteration, before its first replay: nothing is moved between two stages. Addresses are compared
    every time, shapes and dtypes now and then: at an unchanged address hardly anything can change them, and reading them costs more.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._list = list(self._tensors.values())
        self._frozen: list[tuple[int, torch.Size, torch.dtype]] = []
        self._addresses: list[int] = []
        self._num_checks = 0

    def freeze(self) -> None:
        """What the tensors are now is what a graph is captured with."""
        self._frozen = self._signature()
        self._addresses = [tensor.data_ptr() for tensor in self._list]

    def check(self) -> None:
        """Raise RuntimeError naming the first tensor that was moved, reshaped or cast since `freeze`, if that was called."""
        if not self._frozen:
            return
        self._num_checks += 1
        if self._num_checks % FULL_CHECK_PERIOD and [tensor.data_ptr() for tensor in self._list] == self._addresses:
            return
        if (found := self._signature()) != self._frozen:
            changed = next(name for name, old, new in zip(self._tensors, self._frozen, found, strict=True) if old != new)
            raise RuntimeError(f"{changed} was moved, reshaped or cast after graphs were captured with it")

    def _signature(self) -> list[tuple[int, torch.Size, torch.dtype]]:
        return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in self._list]


class GraphRunner(Generic[Size]):
    """One stage and its graphs."""

    def __init__(self, stage: CapturableStage[Size], static: StaticTensors) -> None:
        """`static` is shared by the stages of an iteration: what one of them writes, the next one reads at the same place."""
        self.stage = stage
        self.num_graph_runs = 0
        self.num_eager_runs = 0
        self.clock: StageClock | None = None  # measures every run while there is one
        self._static = static
        self._graphs: dict[Size, list[tuple[int, torch.cuda.CUDAGraph]]] = {}  # by size: (longest row, graph), ascending

    @property
    def captured_sizes(self) -> tuple[Size, ...]:
        """Ascending."""
        return tuple(sorted(self._graphs))

    def captured_lengths(self, size: Size) -> tuple[int, ...]:
        """Bounds of the rows' lengths that this size is captured for, ascending."""
        return tuple(length for length, _ in self._graphs.get(size, ()))

    def add_graph(self, size: Size, max_length: int, graph: torch.cuda.CUDAGraph) -> None:
        """Replay `graph` for batches of this size of which no row has more than `max_length` tokens, nor so few that another holds them."""
        others = [pair for pair in self._graphs.get(size, ()) if pair[0] != max_length]
        self._graphs[size] = sorted([*others, (max_length, graph)], key=lambda pair: pair[0])

    def capture(self, size: Size, hints: HostHints, pool: GraphPool) -> CaptureReport:
        """Capture one size for rows of up to `hints.max_length` tokens.

        Runs the stage once eagerly first, so that every kernel variant is compiled before. Raises CaptureError, whatever went wrong.
        """
        try:
            return self._capture(size, hints, pool)
        except Exception as error:
            shortage = _memory_shortage(error)
            if shortage is None:
                raise CaptureError(self.stage.name, *self.stage.extent(size), False, f"{type(error).__name__}: {error}") from error
            reason = " ".join(str(shortage).split())[:200]
        # raised out here: the error of the allocator holds the frames that hold the memory
        raise CaptureError(self.stage.name, *self.stage.extent(size), True, reason)

    def _capture(self, size: Size, hints: HostHints, pool: GraphPool) -> CaptureReport:
        started = perf_counter()
        self.stage.run(size, hints)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the eager run used must not count as the graph's, nor stand in its way
        warmed, reserved = perf_counter(), torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with model_capture_mode(graph, pool):
            self.stage.run(size, hints)
        torch.cuda.synchronize()
        self.add_graph(size, hints.max_length, graph)
        self._static.freeze()
        num_bytes = torch.cuda.memory_reserved() - reserved
        capture_s = perf_counter() - warmed
        return CaptureReport(self.stage.name, *self.stage.extent(size), hints.max_length, warmed - started, capture_s, num_bytes)

    def drop_graphs(self) -> None:
        """Forget all graphs; their memory goes back to the pool."""
        self._graphs.clear()

    def run(self, size: Size, hints: HostHints) -> None:
        """Run that size of the buffers: by graph when one is captured that holds such rows, else eagerly."""
        with self.clock.span(self.stage.name) if self.clock is not None else nullcontext():
            was_graph = self.run_uncounted(size, hints)
        if was_graph:
            self.num_graph_runs += 1
        else:
            self.num_eager_runs += 1

    def run_uncounted(self, size: Size, hints: HostHints) -> bool:
        """The same without a trace in the counts; whether it was a graph."""
        graph = next((graph for length, graph in self._graphs.get(size, ()) if length >= hints.max_length), None)
        if graph is None:
            self.stage.run(size, hints)
        else:
            graph.replay()
        return graph is not None


def _memory_shortage(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The shortage behind an error: ending a capture that ran out of memory may raise another one on top."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error
