"""Fills a model's weights, from a checkpoint's tensors or from seeded noise.

A model tells which checkpoint name fills which part of its weights (`checkpoint_views`). Every view must be filled and
every tensor used: a tensor that silently stays behind, or a weight at random values, only shows as bad output.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from eaglecli.errors import ModelError
from eaglecli.models.checkpoint import TensorHeader

_DUMMY_STD = 0.02
_SHOWN_NAMES = 5


@dataclass(frozen=True)
class FillReport:
    """What a fill did: how many tensors it used, the names it was allowed to leave out, the floating dtypes it found."""

    num_used: int
    ignored: tuple[str, ...]
    stored_dtypes: tuple[torch.dtype, ...]


def is_rotary_buffer(name: str) -> bool:
    """Old checkpoints store the rotary frequencies, which eaglecli computes."""
    return name.endswith("rotary_emb.inv_freq")


def check_headers(
    views: Mapping[str, torch.Tensor],
    headers: Mapping[str, TensorHeader],
    source: str,
    may_ignore: Callable[[str], bool] = is_rotary_buffer,
) -> None:
    """Compare names and shapes before anything is read. Raises ModelError naming what is missing, unknown or misshapen."""
    _refuse_missing([name for name in views if name not in headers], source)
    extra = [name for name in headers if name not in views and not may_ignore(name)]
    if extra:
        raise ModelError(f"{source} holds {_listed(extra)}, for which this architecture has no use", "check config.json")
    for name, view in views.items():
        _check_tensor(name, headers[name].shape, headers[name].dtype, view, source)


def fill_from_tensors(
    views: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: str,
    may_ignore: Callable[[str], bool] = is_rotary_buffer,
) -> FillReport:
    """Copy tensors into the views of their names, cast to the views' dtype and device. Raises ModelError as `check_headers`."""
    filled: set[str] = set()
    ignored: list[str] = []
    dtypes: dict[torch.dtype, None] = {}
    for name, tensor in tensors:
        if name in views:
            _check_tensor(name, tuple(tensor.shape), tensor.dtype, views[name], source)
            views[name].copy_(tensor)
            filled.add(name)
            dtypes[tensor.dtype] = None
        elif may_ignore(name):
            ignored.append(name)
        else:
            raise ModelError(f"{source} holds {name}, for which this architecture has no use", "check config.json")
    _refuse_missing([name for name in views if name not in filled], source)
    return FillReport(len(filled), tuple(ignored), tuple(dtypes))


def fill_with_noise(views: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Seeded normal weights made on the views' own device, norms one: for speed runs without a checkpoint."""
    device = next(iter(views.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in views.items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
        else:
            view.normal_(0.0, _DUMMY_STD, generator=generator)


def _check_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, view: torch.Tensor, source: str) -> None:
    if shape != tuple(view.shape):
        raise ModelError(f"{source}: {name} has shape {list(shape)}, expected {list(view.shape)}", "check the sizes in config.json")
    if dtype.itemsize < 2 or not dtype.is_floating_point:
        raise ModelError(f"{source}: {name} is stored as {dtype}, which is a quantized format", "use the unquantized checkpoint")


def _refuse_missing(names: list[str], source: str) -> None:
    if names:
        raise ModelError(f"{source} lacks {_listed(names)}", "config.json and weights belong to different models, or a file is incomplete")


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
