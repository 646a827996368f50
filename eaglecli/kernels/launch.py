"""Dependent launch: the next kernel of a stream starts while the last one drains (CUDA compute capability 9 and later).

A kernel that takes part calls `gdc_launch_dependents` and, before it touches anything an earlier kernel wrote or still
reads, `gdc_wait`; then completion stays transitive along the stream, and kernels without the attribute may stand between.
Only tensors that no kernel of the stream writes (weights) may be read before `gdc_wait`.
"""

import torch


def dependent_launch_supported(device: torch.device) -> bool:
    """Whether kernels on this device may overlap the kernel before them."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of every launch: the kernel's DEPENDENT flag and the launcher's attribute."""
    if dependent_launch_supported(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
