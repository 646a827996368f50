"""Capturing all stages at all sizes: largest first, one pool of memory, which the smaller sizes then fit into."""

import gc
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from eaglecli.engine.graph_runner import CaptureError, CaptureReport, GraphRunner
from eaglecli.engine.iteration import Iteration
from eaglecli.engine.row_state import HostHints


def capture_sizes(iteration: Iteration, runners: Sequence[GraphRunner], sizes: Sequence[int], hints: HostHints) -> Iterator[CaptureReport]:
    """Capture every runner at every size; yields a report as each is done. Raises CaptureError.

    Runs on dummy rows: no request may be running. `hints` must hold for every batch to come. CUDA only.
    """
    gc.collect()
    pool = torch.cuda.graph_pool_handle()
    for size in sorted(sizes, reverse=True):
        with torch.inference_mode():
            iteration.load_rows(np.zeros(0, np.int64), size)
            reports = [runner.capture(size, hints, pool) for runner in runners]
        yield from reports


def find_capturable_size(iteration: Iteration, runners: Sequence[GraphRunner], sizes: Sequence[int], hints: HostHints) -> int | None:
    """The largest of `sizes` that the memory is enough for, found by trying; None when there is none. Drops all graphs."""
    for size in sorted(sizes, reverse=True):
        _drop(runners)
        try:
            for _ in capture_sizes(iteration, runners, [size], hints):
                pass
        except CaptureError:
            continue
        finally:
            _drop(runners)
        return size
    return None


def _drop(runners: Sequence[GraphRunner]) -> None:
    for runner in runners:
        runner.drop_graphs()
    torch.cuda.empty_cache()
