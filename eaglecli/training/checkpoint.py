"""Training taken up again: float32 weights, the optimizer and the progress in a folder, in files no larger than asked for.

`state.json` is replaced last and names the files that belong to it, so a killed run leaves the last good state. Weights and
optimizer lie in files of their own: without the latter the training goes on with a fresh optimizer, which warms up again.
Tensors larger than a file are cut by rows.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eaglecli.errors import UserError
from eaglecli.training.draft_module import DraftModule
from eaglecli.training.schedule import TrainProgress

_STATE = "state.json"
_HEADER_BYTES = 16_384  # room for the names and shapes in a file
_TOKEN_IDS = "token_ids"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a folder holds. `optimizer` is None when its files are not there."""

    progress: TrainProgress
    identity: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]  # parameters and buffers of the module by name
    token_ids: torch.Tensor
    optimizer: Mapping[str, torch.Tensor] | None


def save_checkpoint(
    folder: Path,
    module: DraftModule,
    optimizer: torch.optim.Optimizer,
    token_ids: torch.Tensor,
    progress: TrainProgress,
    identity: Mapping[str, Any],
    max_file_bytes: int | None,
) -> None:
    """Write the state of a training; `identity` is what must be the same when it is taken up again."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()} | {_TOKEN_IDS: token_ids.cpu()}
    state = {
        "schema_version": 1,
        "progress": asdict(progress),
        "identity": dict(identity),
        "weights": _save(folder, f"weights-{progress.step:07d}", weights, max_file_bytes),
        "optimizer": _save(folder, f"optimizer-{progress.step:07d}", _moments(module, optimizer), max_file_bytes),
    }
    unfinished = folder / f"{_STATE}.part"
    unfinished.write_text(json.dumps(state, indent=1), encoding="utf-8")
    os.replace(unfinished, folder / _STATE)
    for path in folder.glob("*.safetensors"):
        if path.name not in (*state["weights"], *state["optimizer"]):
            path.unlink()


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """What the folder holds, None when there is no state. Raises UserError when a file of the weights is missing or damaged."""
    if not (folder / _STATE).is_file():
        return None
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        weights = _load(folder, state["weights"])
        has_optimizer = all((folder / name).is_file() for name in state["optimizer"])
        optimizer = _load(folder, state["optimizer"]) if has_optimizer else None
        progress = TrainProgress(**state["progress"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"the checkpoint in {folder} cannot be read: {error}", "restore its files, or start the training anew with --retrain"
        ) from error
    if optimizer is None:
        progress.optimizer_steps = 0
    token_ids = weights.pop(_TOKEN_IDS)
    return Checkpoint(progress, state["identity"], weights, token_ids, optimizer)


def restore(checkpoint: Checkpoint, module: DraftModule, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and optimizer state back where they were."""
    module.load_state_dict(checkpoint.weights)
    if checkpoint.optimizer is None:
        return
    names = [name for name, _ in module.named_parameters()]
    moments = {index: {kind: checkpoint.optimizer[f"{name}.{kind}"] for kind in _MOMENTS} for index, name in enumerate(names)}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def _moments(module: DraftModule, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    states = {name: optimizer.state[parameter] for name, parameter in module.named_parameters() if parameter in optimizer.state}
    return {f"{name}.{kind}": state[kind].detach().cpu() for name, state in states.items() for kind in _MOMENTS}


def _save(folder: Path, stem: str, tensors: Mapping[str, torch.Tensor], max_file_bytes: int | None) -> list[str]:
    """Names of the files written: <stem>-00.safetensors and so on. A piece is called <tensor>@<first row>."""
    limit = None if max_file_bytes is None else max(1, max_file_bytes - _HEADER_BYTES)
    files: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        for first_row, piece in _pieces(tensor, limit):
            size = piece.numel() * piece.element_size()
            if limit is not None and used + size > limit and files[-1]:
                files.append({})
                used = 0
            files[-1][f"{name}@{first_row}"] = piece.contiguous()
            used += size
    names = [f"{stem}-{number:02d}.safetensors" for number in range(len(files))]
    for name, content in zip(names, files, strict=True):
        save_file(content, folder / name)
    return names


def _pieces(tensor: torch.Tensor, limit: int | None) -> list[tuple[int, torch.Tensor]]:
    """(first row, rows) of a tensor cut so that no piece is larger than `limit` bytes, single rows excepted."""
    if limit is None or tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= limit:
        return [(0, tensor)]
    rows = max(1, limit // (tensor[0].numel() * tensor.element_size()))
    return [(start, tensor[start : start + rows]) for start in range(0, len(tensor), rows)]


def _load(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in names:
        for name, piece in load_file(folder / file).items():
            tensor_name, _, first_row = name.rpartition("@")
            pieces.setdefault(tensor_name, []).append((int(first_row), piece))
    ordered = {name: [piece for _, piece in sorted(parts, key=lambda part: part[0])] for name, parts in pieces.items()}
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in ordered.items()}
