"""Capturing all stages at all sizes: largest first, one pool of memory, which the smaller sizes then fit into."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from eaglecli.engine.graph_runner import CaptureError, CaptureReport, GraphRunner
from eaglecli.engine.iteration import Iteration
from eaglecli.engine.row_state import HostHints


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """The stages of one iteration and the sizes to capture them at."""

    iteration: Iteration
    runners: Sequence[GraphRunner]
    sizes: Sequence[int]


def capture_all(plans: Sequence[CapturePlan], hints: HostHints) -> Iterator[CaptureReport]:
    """Capture every runner at every size; yields a report as each is done. Raises CaptureError.

    Runs on dummy rows: no request may be running. `hints` must hold for every batch to come. CUDA only.
    """
    gc.collect()
    pool = torch.cuda.graph_pool_handle()
    for size in sorted({size for plan in plans for size in plan.sizes}, reverse=True):
        for plan in plans:
            if size in plan.sizes:
                with torch.inference_mode():
                    plan.iteration.load_rows(np.zeros(0, np.int64), size)
                    reports = [runner.capture(size, hints, pool) for runner in plan.runners]
                yield from reports


def find_capturable_size(plans: Sequence[CapturePlan], sizes: Sequence[int], hints: HostHints) -> int | None:
    """The largest of `sizes` that the memory is enough for, found by trying; None when there is none. Drops all graphs."""
    for size in sorted(sizes, reverse=True):
        _drop(plans)
        try:
            for _ in capture_all([replace(plan, sizes=[size]) for plan in plans if size in plan.sizes], hints):
                pass
        except CaptureError:
            continue
        finally:
            _drop(plans)
        return size
    return None


def _drop(plans: Sequence[CapturePlan]) -> None:
    for plan in plans:
        for runner in plan.runners:
            runner.drop_graphs()
    torch.cuda.empty_cache()
