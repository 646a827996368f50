"""Captured CUDA graphs of one stage, one a batch size; where nothing is captured the same padded stage runs eagerly.

`GraphRunner` serves all three stages. Sizes count requests. A batch runs at the smallest captured size that holds it;
above the largest it runs at its own size, eagerly, and is counted.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from eaglecli.engine.iteration import Stage
from eaglecli.engine.row_state import HostHints


@contextmanager
def model_capture_mode(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> Iterator[None]:
    """Record everything launched inside into `graph`, its memory taken from `pool`.

    The collector stays off meanwhile: freeing a tensor of another stream inside a capture would spoil it.
    """
    torch.cuda.synchronize()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class CaptureReport:
    """What one captured graph cost."""

    stage: str
    num_requests: int
    num_tokens: int
    warmup_s: float  # first eager run, kernels compiled in it
    capture_s: float
    num_bytes: int  # device memory reserved by the capture, beyond what the pool already had


class GraphRunner:
    """One stage and its graphs."""

    def __init__(self, stage: Stage, pinned: list[torch.Tensor]) -> None:
        """`pinned`: every tensor whose address, shape and dtype a graph will rely on."""
        self.stage = stage
        self.num_graph_runs = 0
        self.num_eager_runs = 0
        self._pinned = pinned
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._signature: list[tuple[int, torch.Size, torch.dtype]] = []

    def capture(self, num_requests: int, hints: HostHints, pool: tuple[int, int]) -> CaptureReport:
        """Capture one size. Runs the stage once eagerly first, so that every kernel variant is compiled before."""
        started = perf_counter()
        self.stage.run(num_requests, hints)
        torch.cuda.synchronize()
        warmed, reserved = perf_counter(), torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with model_capture_mode(graph, pool):
            self.stage.run(num_requests, hints)
        torch.cuda.synchronize()
        self._graphs[num_requests] = graph
        self._signature = _signature(self._pinned)
        num_tokens = num_requests * self.stage.tokens_per_request
        return CaptureReport(
            self.stage.name, num_requests, num_tokens, warmed - started, perf_counter() - warmed, torch.cuda.memory_reserved() - reserved
        )

    def run(self, size: int, hints: HostHints) -> None:
        """Run the first `size` requests of the buffers: by graph when that size is captured, else eagerly."""
        graph = self._graphs.get(size)
        if graph is None:
            self.num_eager_runs += 1
            self.stage.run(size, hints)
            return
        if _signature(self._pinned) != self._signature:
            raise RuntimeError(f"a buffer of the captured {self.stage.name} graphs was moved or reshaped")
        self.num_graph_runs += 1
        graph.replay()


def _signature(tensors: list[torch.Tensor]) -> list[tuple[int, torch.Size, torch.dtype]]:
    return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]


def padded_size(num_requests: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the ascending `sizes` that holds the batch; its own size when none does."""
    return next((size for size in sizes if size >= num_requests), num_requests)
