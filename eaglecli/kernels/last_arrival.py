# ruff: noqa: ANN001, ANN201 - Triton infers the types of a kernel's arguments
"""Merging inside one launch: of the programs that share a result, the last to arrive adds the parts of all.

Each program stores its part, then calls `is_last_arrival`; the one that gets true reads every part, in a fixed order, so the
result does not depend on who was last. It also sets the counter back to zero, so counters are zero between launches and a
graph can be replayed. Kernels that use one device's counters must follow one another: one stream, and `gdc_wait` first.
"""

import functools

import torch
import triton
import triton.language as tl

_MAX_COUNTERS = 1 << 16


@triton.jit
def is_last_arrival(counter_ptr, num_programs):
    """Whether num_programs - 1 programs arrived before this one; their stores are then visible to all threads of this one."""
    tl.debug_barrier()  # the stores of all threads come before the arrival
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@functools.cache
def _shared_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` zeros, int32: the same tensor at every call, or a new one (and a launch to clear it) when very many are needed."""
    if count > _MAX_COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _shared_counters(device)
