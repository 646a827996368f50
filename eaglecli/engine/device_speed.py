"""What the device can do, measured where the run is measured: copying, reading weights, multiplying matrices.

The weights of a product of one row are read once and used once, as in a decode step, so its rate is the bandwidth that floors are made of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn import functional

from eaglecli.engine.device_memory import available_host_bytes

_MATRIX = {"cuda": (28_672, 4096), "cpu": (8192, 1024)}  # outputs x inputs of a weight
_WEIGHT_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}  # of all weights, read one after the other: no cache holds them
_SIDE = {"cuda": 8192, "cpu": 512}  # of the square matrices of the large product
_NUM_REPEATS = {"cuda": 5, "cpu": 3}  # the first one may compile or plan
_LEAST_CALLS = {"cuda": 8, "cpu": 1}  # enqueued together: launching takes the host a tenth of such a kernel's time


@dataclass(frozen=True)
class DeviceSpeed:
    """Best of a few repeats each."""

    copy_bytes_per_s: float  # bytes read and bytes written
    weight_bytes_per_s: float  # weights x vector
    flops: float  # of a large product, multiplications and additions


def measure_device(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Takes 1 GiB of a GPU or 512 MiB of the host for a moment (less where memory is short), and about a second at most."""
    copy_rate, weight_rate = _memory_rates(device, dtype)
    side = _SIDE[device.type]
    square = torch.ones(side, side, dtype=dtype, device=device)
    product_s = _best_s(lambda call: square @ square, device, 1)
    return DeviceSpeed(copy_rate, weight_rate, 2 * float(side) ** 3 / product_s)


def _memory_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second of a copy, and of weights times a vector, one weight after the other."""
    num_rows, inner = _MATRIX[device.type]
    num_bytes = num_rows * inner * dtype.itemsize
    count = max(2, min(_WEIGHT_BYTES[device.type], _free_bytes(device) // 4) // num_bytes)
    weights = torch.ones(count, num_rows, inner, dtype=dtype, device=device)
    vector = torch.ones(1, inner, dtype=dtype, device=device)
    copy_s = _best_s(lambda call: weights[(call + count // 2) % count].copy_(weights[call % count]), device, count)
    read_s = _best_s(lambda call: functional.linear(vector, weights[call % count]), device, count)
    return 2 * num_bytes / copy_s, num_bytes / read_s


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()


def _best_s(work: Callable[[int], object], device: torch.device, num_different: int) -> float:
    """Seconds of one call; `work` is told its number, and does something else in so many calls in a row."""
    calls = range(max(num_different, _LEAST_CALLS[device.type]))
    return min(_seconds(work, device, calls) for _ in range(_NUM_REPEATS[device.type])) / len(calls)


def _seconds(work: Callable[[int], object], device: torch.device, calls: range) -> float:
    if device.type != "cuda":
        started = perf_counter()
        for call in calls:
            work(call)
        return perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        work(call)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
