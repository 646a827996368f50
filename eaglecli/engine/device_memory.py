"""Memory that is there, and that of engines that nobody uses any more."""

import gc
import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def available_host_bytes() -> int:
    """What the host can give without swapping. Files that were read fill memory and give it back: where the system says so, they count."""
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def release_memory() -> None:
    """Give back what engines held that nobody refers to: their caches are large, and their parts know one another."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
