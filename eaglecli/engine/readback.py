"""The one copy from device to host of an iteration, read one iteration late.

Two pinned buffers in turn, each with an event: while the host looks at one, the device fills the other.
"""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from eaglecli.kernels.commit_run import Status


@dataclass(frozen=True, eq=False)
class StepRows:
    """Which rows an iteration ran, and whose they were then: a row may be given to another request before its record is read."""

    prefilled: np.ndarray  # int64 [E] rows whose first token came out
    decoded: np.ndarray  # int64 [B] rows of the verify
    prefilled_owner: np.ndarray  # int64 [E] generation of the row
    decoded_owner: np.ndarray  # int64 [B]
    mode: int  # how the iteration speculated
    has_prefill: bool
    caught_up: bool  # the draft had tokens to catch up with before
    length_class: int  # of its rows, see `graph_sizes.graph_lengths`


@dataclass(frozen=True, eq=False)
class StepResult:
    """An iteration's record on the host: int32 [E + B, W + 3], see `commit_run.RunOutputs`; before it, what `token_logprobs` wrote."""

    rows: StepRows
    record: np.ndarray
    logprobs: np.ndarray  # int32 [E + B, logprob_width], no columns when nobody asked

    def split(self, num_prefilled: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """(record, log-probabilities) of the first tokens, then of the verify."""
        first = self.record[:num_prefilled], self.logprobs[:num_prefilled]
        return first, (self.record[num_prefilled:], self.logprobs[num_prefilled:])


class Readback:
    """Ring of two. `put` enqueues the copy; `take` waits for the oldest and returns it while more than `keep` are pending."""

    def __init__(self, num_rows: int, run_width: int, device: torch.device, logprob_width: int = 0) -> None:
        self._is_cuda = device.type == "cuda"
        self._record_width = run_width + 3
        size = 2 * num_rows * (logprob_width + self._record_width)
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else [None, None]
        self._pending: deque[tuple[StepRows, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._num_puts = 0
        self.waited_s = 0.0  # for the device

    @property
    def is_empty(self) -> bool:
        """Nothing is pending."""
        return not self._pending

    def put(self, rows: StepRows, records: list[torch.Tensor]) -> None:
        """Enqueue one iteration's records, int32 [n, run_width + 3] each, or all of them [n, logprob_width + run_width + 3].

        At most one earlier iteration may be pending.
        """
        record = records[0] if len(records) == 1 else torch.cat(records)
        staged = self._buffers[self._num_puts % 2][: record.numel()].view(record.shape)
        staged.copy_(record, non_blocking=True)
        event = self._events[self._num_puts % 2]
        if event is not None:
            event.record()
        self._pending.append((rows, staged, event))
        self._num_puts += 1

    def take(self, keep: int) -> StepResult | None:
        """The oldest pending result, once more than `keep` are pending; None otherwise."""
        if len(self._pending) <= keep:
            return None
        rows, staged, event = self._pending.popleft()
        if event is not None:
            started = perf_counter()
            event.synchronize()
            self.waited_s += perf_counter() - started
        record = staged.numpy().copy()
        return StepResult(rows, record[:, -self._record_width :], record[:, : -self._record_width])


def host_record(record: torch.Tensor, logprobs: torch.Tensor, num_rows: int, with_logprobs: bool) -> torch.Tensor:
    """int32 [num_rows, ...]: the first rows of a record as the host reads them, in one piece, after their log-probabilities if wanted."""
    return torch.cat([logprobs[:num_rows], record[:num_rows]], dim=1) if with_logprobs else record[:num_rows]


def status_of(record: np.ndarray) -> np.ndarray:
    """int32 [B]: the status column of a record."""
    return record[:, -1]


def emitted_of(record: np.ndarray) -> np.ndarray:
    """int32 [B]: how many tokens of each run belong to the output."""
    return record[:, -2]


def ended(record: np.ndarray) -> np.ndarray:
    """int64: indices of the record's rows whose request ended in it."""
    return np.flatnonzero(status_of(record) != Status.RUNNING)
