"""What an iteration of each mode costs at each batch size, measured before anything runs.

The stages run by graph where they are captured, on rows of one length with slots of their own: what attention takes depends on
lengths, for a wide tree more than for a chain, and padding, which reads and writes one slot, takes longer than rows do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from eaglecli.engine.check_tools import restore
from eaglecli.engine.graph_sizes import padded_size
from eaglecli.engine.iteration import Iteration, named_tensors
from eaglecli.engine.modes import Mode
from eaglecli.engine.row_state import HostHints, RowState
from eaglecli.engine.settings import EngineSettings

_MEASURED_CONTEXT = 256  # tokens; a quarter of the longest context, if that is less
_NUM_BACK_TO_BACK, _NUM_TIMED = 2, 3
_NOT_WRITTEN = ("state.adjustments.counts", "state.adjustments.bias")  # of rows that ask for none; they may be large


class MeasuredRows:
    """Rows as if their prompts had just been run, of an engine that is idle. `restore` gives the state back as it was."""

    def __init__(self, state: RowState, caches: Iterable[torch.Tensor], settings: EngineSettings) -> None:
        """caches [layers, 2, slots, nkv, hd]; slots in use are zeroed, since uninitialised ones may hold NaN."""
        self._state, self._num_rows = state, settings.max_running_requests
        self._changed = {name: tensor for name, tensor in named_tensors("state", state).items() if name not in _NOT_WRITTEN}
        self._found = {name: tensor.clone() for name, tensor in self._changed.items()}
        length = min(settings.context_length // 4, _MEASURED_CONTEXT)
        num_columns = min(length + (_NUM_BACK_TO_BACK + 1) * settings.run_width + settings.lookahead, state.slot_table.shape[1])
        self.length, self.max_length = length, min(num_columns, settings.context_length)
        for cache in caches:
            num_slots = cache.shape[2]
            cache[:, :, : self._num_rows * num_columns + 1] = 0
        slots = torch.arange(self._num_rows * num_columns, device=state.lengths.device) % (num_slots - 1) + 1
        self._slots = slots.view(self._num_rows, num_columns).int()  # a pool too small for all rows is shared

    def deal(self, iteration: Iteration, size: int) -> None:
        """Let `size` rows, the dummy row where there are too few, stand at the same length again and be the iteration's."""
        state, rows = self._state, slice(min(size, self._num_rows))
        state.slot_table[rows, : self._slots.shape[1]] = self._slots[rows]
        state.lengths[rows], state.limits[rows] = self.length, state.context_length
        state.stop_ids[rows] = -1
        flags = (state.finished, state.wants_logprobs, None if state.adjustments is None else state.adjustments.is_adjusted)
        draft = (state.draft_start, state.draft_hidden, state.draft_log_q, state.draft_token)
        for tensor in (state.verified_id, state.temperature, *flags, *draft):
            if tensor is not None:
                tensor[rows] = 0
        iteration.load_rows(np.arange(rows.stop), size)

    def restore(self) -> None:
        """As it was found."""
        restore(self._changed, self._found)


def measured_sizes(graph_sizes: Sequence[int], max_requests: int) -> list[int]:
    """Sizes worth measuring: the smallest, the largest, then those that halve the widest distance."""
    doubling = [1 << power for power in range(max_requests.bit_length()) if 1 << power < max_requests] + [max_requests]
    sizes = doubling
    if graph_sizes:
        padded = (next((size for size in graph_sizes if size >= wanted), max_requests) for wanted in doubling)
        sizes = sorted(set(padded))
    ordered = list(dict.fromkeys((sizes[0], sizes[-1])))
    while len(ordered) < len(sizes):
        done = sorted(sizes.index(size) for size in ordered)
        low, high = max(zip(done, done[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        ordered.append(sizes[(low + high) // 2])
    return ordered


def measure_costs(
    modes: Sequence[Mode], rows: MeasuredRows, graph_sizes: Sequence[int], max_requests: int, hints: HostHints, budget_s: float
) -> dict[tuple[int, int], float]:
    """Seconds by (mode, batch size); two sizes of every mode at least, more while the budget lasts. Only while nothing runs."""
    hints = replace(hints, max_length=rows.max_length)
    started, costs = perf_counter(), {}
    for place, size in enumerate(measured_sizes(graph_sizes, max_requests)):
        for number, mode in enumerate(modes):
            is_needed = place < 2
            if not is_needed and perf_counter() - started > budget_s:
                return costs
            largest = padded_size(mode.max_requests, graph_sizes)
            if is_needed or size <= mode.max_requests:
                measured = min(size, largest)
                if (number, measured) not in costs:
                    costs[number, measured] = _seconds(mode, rows, measured, hints, is_warm=place > 0)
    return costs


def _seconds(mode: Mode, rows: MeasuredRows, size: int, hints: HostHints, is_warm: bool) -> float:
    """The least of a few timings: whatever disturbs one makes it longer. Without a GPU, where one takes long, a single one."""
    device = mode.iteration.buffers.rows.device
    is_cuda = device.type == "cuda"
    if is_cuda or not is_warm:
        _time(mode, rows, size, hints, 1, device)
    num_timed, num_runs = (_NUM_TIMED, _NUM_BACK_TO_BACK) if is_cuda else (1, 1)
    return min(_time(mode, rows, size, hints, num_runs, device) for _ in range(num_timed))


def _time(mode: Mode, rows: MeasuredRows, size: int, hints: HostHints, num_runs: int, device: torch.device) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rows.deal(mode.iteration, size)
    wait()
    started = perf_counter()
    for _ in range(num_runs):
        for runner in mode.runners:
            runner.run_uncounted(size, hints)
    wait()
    return (perf_counter() - started) / num_runs
