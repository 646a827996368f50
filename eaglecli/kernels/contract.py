"""The check every launcher makes of its arguments: a kernel addresses memory by shape and trusts nobody else's."""

import torch


def require(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError unless `tensor` is contiguous with this dtype and shape (-1: any size)."""
    fits = tensor.dim() == len(shape) and all(want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True))
    if not (fits and tensor.dtype == dtype and tensor.is_contiguous()):
        have = f"{tensor.dtype} {list(tensor.shape)}" + ("" if tensor.is_contiguous() else ", not contiguous")
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, got {have}")


def require_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is a floating-point matrix whose columns are adjacent in memory."""
    if tensor.dim() != 2 or not tensor.is_floating_point() or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        raise ValueError(f"{name} must be a floating-point matrix with adjacent columns, got {tensor.dtype} {list(tensor.shape)}")
