"""Memory of engines that nobody uses any more."""

import gc

import torch


def release_memory() -> None:
    """Give back what engines held that nobody refers to: their caches are large, and their parts know one another."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
