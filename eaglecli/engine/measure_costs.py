"""What an iteration of each mode costs at each batch size, measured before anything runs.

The stages run on padding alone, by graph where they are captured: the same launches as ever. The dummy row is given a context
meanwhile: what attention takes depends on it, and for a wide tree more than for a chain.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from eaglecli.engine.modes import Mode
from eaglecli.engine.row_state import HostHints

MEASURED_CONTEXT = 512  # tokens; a quarter of the longest context, if that is less
_NUM_BACK_TO_BACK, _NUM_TIMED = 2, 3


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
    modes: Sequence[Mode], graph_sizes: Sequence[int], max_requests: int, hints: HostHints, budget_s: float
) -> dict[tuple[int, int], float]:
    """Seconds by (mode, batch size); two sizes of every mode at least, more while the budget lasts. Only while nothing runs."""
    started, costs = perf_counter(), {}
    for place, size in enumerate(measured_sizes(graph_sizes, max_requests)):
        for number, mode in enumerate(modes):
            is_needed = place < 2
            if not is_needed and perf_counter() - started > budget_s:
                return costs
            largest = max((other for other in graph_sizes if other <= mode.max_requests), default=mode.max_requests)
            if is_needed or size <= mode.max_requests:
                measured = min(size, largest)
                if (number, measured) not in costs:
                    costs[number, measured] = _seconds(mode, measured, hints, is_warm=place > 0)
    return costs


def _seconds(mode: Mode, size: int, hints: HostHints, is_warm: bool) -> float:
    """The least of a few timings: whatever disturbs one makes it longer. Without a GPU, where one takes long, a single one."""
    mode.iteration.load_padding(size)
    device = mode.iteration.buffers.rows.device
    is_cuda = device.type == "cuda"
    if is_cuda or not is_warm:
        _time(mode, size, hints, 1, device)
    num_timed, num_runs = (_NUM_TIMED, _NUM_BACK_TO_BACK) if is_cuda else (1, 1)
    return min(_time(mode, size, hints, num_runs, device) for _ in range(num_timed))


def _time(mode: Mode, size: int, hints: HostHints, num_runs: int, device: torch.device) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = perf_counter()
    for _ in range(num_runs):
        for runner in mode.runners:
            runner.run_uncounted(size, hints)
    wait()
    return (perf_counter() - started) / num_runs
