"""Capturing all stages at all sizes and lengths: largest first, one pool of memory, which the smaller ones then fit into."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eaglecli.engine.graph_runner import CaptureError, CaptureReport, GraphRunner
from eaglecli.engine.row_state import HostHints


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """Stages that read the same inputs, the sizes to capture them at, and for which bounds of the rows' lengths."""

    load_padding: Callable[[Any], None]  # fills the inputs of a size with nothing but padding
    runners: Sequence[GraphRunner]
    sizes: Sequence[Any]
    max_lengths: Sequence[int]  # tokens; the largest holds for every batch


def capture_all(groups: Sequence[Sequence[CapturePlan]], hints: HostHints) -> Iterator[CaptureReport]:
    """Capture every runner at every size; yields a report as each is done. Raises CaptureError.

    Plans of one group have sizes of one kind and are captured together. Runs on dummy rows: no request may be running.
    `hints` must hold for every batch to come, but for the length, which the plans say. CUDA only.
    """
    gc.collect()
    pool = torch.cuda.graph_pool_handle()
    for plans in groups:
        for size in sorted({size for plan in plans for size in plan.sizes}, reverse=True):
            for plan in plans:
                if size in plan.sizes:
                    with torch.inference_mode():
                        plan.load_padding(size)
                        reports = [
                            runner.capture(size, replace(hints, max_length=length), pool)
                            for length in sorted(plan.max_lengths, reverse=True)
                            for runner in plan.runners
                        ]
                    yield from reports


def find_capturable_size(plans: Sequence[CapturePlan], sizes: Sequence[int], hints: HostHints) -> int | None:
    """The largest of `sizes` that the memory is enough for, found by trying; None when there is none. Drops all graphs."""
    for size in sorted(sizes, reverse=True):
        _drop(plans)
        try:
            for _ in capture_all([[replace(plan, sizes=[size]) for plan in plans if size in plan.sizes]], hints):
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
