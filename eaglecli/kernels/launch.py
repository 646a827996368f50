"""Dependent launch: the next kernel of a stream starts while the last one drains (CUDA compute capability 9 and later).

A kernel that takes part calls `gdc_launch_dependents`, and every program of it `gdc_wait` before it touches anything an earlier
kernel wrote or still reads, or ends; then completion stays transitive along the stream, and kernels without the attribute may
stand between. Only tensors that no kernel of the stream writes (weights) may be read before `gdc_wait`.

Programs that wait occupy their multiprocessor: those of a kernel that needs whole multiprocessors (a large weight) would be
packed onto the first ones that fall free. So only kernels with little work per program take part. For the same reason attention, products
of more than one row and `start_dependent` let the next kernel start only once their own wait is over; attention when programs without
work have ended, too. Norms, activations and products of one row, which leave room, let it start at once: measured, see
`benchmarks/RESULTS.md`, run 12.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def dependent_launch_supported(device: torch.device) -> bool:
    """Whether kernels on this device may overlap the kernel before them."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, is_small: bool = True) -> dict[str, bool]:
    """Keyword arguments of every launch: the kernel's DEPENDENT flag and the launcher's attribute; a kernel not is_small takes no part."""
    if is_small and dependent_launch_supported(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr):  # noqa: ANN201 - a part of kernels
    """The first statement of a kernel that has nothing to read before the kernels before it have ended."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
