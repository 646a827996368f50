"""What the device can do, measured where the run is measured: copying, reading weights, multiplying matrices.

The weights of a product of one row are read once and used once, as in a decode step, so its rate is the bandwidth that floors are made of.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn import functional

_NUM_REPEATS = {"cuda": 6, "cpu": 3}  # the first one may compile or plan
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceSpeed:
    """Best of a few repeats each."""

    copy_bytes_per_s: float  # bytes read and bytes written
    weight_bytes_per_s: float  # weights x vector
    flops: float  # of a large product, multiplications and additions


def measure_device(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Takes 2 GiB of a GPU (less when it is short of memory) or 64 MiB of the host for a moment, and well below a second."""
    if device.type == "cuda":
        num_bytes = min(_GIB, torch.cuda.mem_get_info(device)[0] // 4)
        inner, side = 4096, 8192
    else:
        num_bytes, inner, side = 1 << 25, 1024, 512
    copy_rate, weight_rate = _memory_rates(num_bytes // (inner * dtype.itemsize), inner, dtype, device)
    square = torch.ones(side, side, dtype=dtype, device=device)
    product_s = _best_s(lambda: square @ square, device)
    return DeviceSpeed(copy_rate, weight_rate, 2 * float(side) ** 3 / product_s)


def _memory_rates(num_rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Bytes a second of a copy and of a weight [num_rows, inner], far larger than any cache, times a vector."""
    weight = torch.ones(num_rows, inner, dtype=dtype, device=device)
    copied, vector = torch.empty_like(weight), torch.ones(1, inner, dtype=dtype, device=device)
    num_bytes = weight.numel() * dtype.itemsize
    copy_s = _best_s(lambda: copied.copy_(weight), device)
    read_s = _best_s(lambda: functional.linear(vector, weight), device)
    return 2 * num_bytes / copy_s, num_bytes / read_s


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = math.inf
    for _ in range(_NUM_REPEATS[device.type]):
        best = min(best, _seconds(work, device))
    return best


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = perf_counter()
        work()
        return perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
