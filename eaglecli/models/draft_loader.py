"""Loads a draft beside its target: checks the fit, fills the layers, shares embedding and head with the target where it can."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eaglecli.models.draft_description import read_tensors
from eaglecli.models.draft_fit import DRAFT_CLASSES, DraftFit, check_draft_fit
from eaglecli.models.draft_layout import ALGORITHM_TITLES
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.fill import fill_from_tensors
from eaglecli.models.loader import LoadedTarget
from eaglecli.models.rope import RopeConfig, rope_tables

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, eq=False)
class LoadedDraft:
    """A draft ready to run. `summary` holds short phrases on what was found and why, `warnings` what deserves a look."""

    model: DraftModel
    fit: DraftFit
    summary: tuple[str, ...]
    warnings: tuple[str, ...]


def load_draft(
    path: Path,
    target: LoadedTarget,
    dtype: torch.dtype,
    device: torch.device | str,
    context_length: int,
    algorithm: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    token_map: Path | None = None,
) -> LoadedDraft:
    """Load the draft in a local folder in the run's dtype onto its device.

    Rotary tables reach the run's `context_length` whatever the draft's own limit. `algorithm` "EAGLE" or "EAGLE3" must
    agree with the file; `overrides` replace keys of its config; `token_map` is an FR-Spec file. Raises ModelError or UserError.
    """
    fit = check_draft_fit(path, target.path, target.config, algorithm, overrides, token_map)
    return build_draft(fit, target, dtype, device, context_length)


def build_draft(fit: DraftFit, target: LoadedTarget, dtype: torch.dtype, device: torch.device | str, context_length: int) -> LoadedDraft:
    """Read the weights of a draft whose fit was checked. Raises ModelError when a file cannot be read."""
    stored_tables = [name for name in (_EMBEDDING, _HEAD) if name in fit.description.shapes]
    own = {name: tensor.to(device, dtype) for name, tensor in _read(fit, stored_tables)}
    embedding, embedding_phrase = _choose_embedding(own.get(_EMBEDDING), target.model.embed_weight)
    head = _head_rows(fit, own[_EMBEDDING] if fit.head == "own embedding" else own.get(_HEAD, target.model.head_weight))
    token_map = None if fit.token_map is None else fit.token_map.to(device)
    tables = rope_tables(fit.config.rope, context_length, device)
    model = DRAFT_CLASSES[fit.config.algorithm](fit.config, tables, embedding, head, token_map, dtype, device)
    views = model.checkpoint_views()
    fill_from_tensors(views, _read(fit, views), str(fit.description.path))
    return LoadedDraft(model, fit, _summary(fit, embedding_phrase), _warnings(fit, dtype, context_length))


def _read(fit: DraftFit, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of these canonical names, q and k rows in half-rotating order."""
    layout = fit.description.layout
    for name, tensor in read_tensors(fit.description.path, {layout.file_names[name]: name for name in names}):
        is_interleaved = layout.has_interleaved_rotary and any(f".{part}_proj." in name for part in "qk")
        yield name, _half_rotating(tensor, fit.config.layer.head_dim) if is_interleaved else tensor


def _half_rotating(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [n * hd, ...] ordered for rotation of neighbours (0, 1), (2, 3), ... to the order that rotates halves (0, hd/2), ..."""
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _choose_embedding(own: torch.Tensor | None, of_target: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The target's table when the file has none or only a copy of it (which saves the memory), else the draft's own."""
    if own is None:
        return of_target, "target's (none in the file)"
    if own.shape[1] == of_target.shape[1] and torch.equal(own[: of_target.shape[0]], of_target):
        return of_target, "target's (the file holds an equal copy)"
    return own, f"own {list(own.shape)}"


def _head_rows(fit: DraftFit, head: torch.Tensor) -> torch.Tensor:
    """The rows that may be proposed: those of the token map, or all that are not padding."""
    if fit.selects_head_rows and fit.token_map is not None:
        return head.index_select(0, fit.token_map.to(head.device))
    return head[: fit.num_head_rows]


# ---- what is told to people ---------------------------------------------------------------------------------------


def _summary(fit: DraftFit, embedding_phrase: str) -> tuple[str, ...]:
    config, layout = fit.config, fit.description.layout
    layers = f"{config.num_layers} layer" + ("s" if config.num_layers > 1 else "")
    taps = ", ".join(map(str, config.taps.boundaries))
    return (
        f"{ALGORITHM_TITLES[config.algorithm]}, {layout.spelling} layout, {layers}",
        f"head {_head_phrase(fit)}",
        f"embedding {embedding_phrase}",
        f"token map {fit.token_map_source}",
        f"taps boundaries {taps} ({config.taps.reason})" if taps else f"feature: {config.taps.reason}",
        f"norms {_norms_phrase(fit)}",
        f"rotary {_rotary_phrase(config.rope)}, from the draft's config",
    )


def _head_phrase(fit: DraftFit) -> str:
    shape = fit.description.shapes.get(_HEAD)
    padding = shape[0] - fit.num_head_rows if shape is not None and not fit.selects_head_rows else 0
    if shape is not None:
        return f"own {list(shape)}" + (f", {padding} padded rows cut off" if padding else "")
    if fit.head == "own embedding":
        return "tied to the draft's own embedding (no lm_head in the file)"
    return "target's (no lm_head in the file)"


def _norms_phrase(fit: DraftFit) -> str:
    config = fit.config
    names = {
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "embedding norm": config.embedding_norm,
        "feature norm": config.feature_norm,
        "norm before the head": config.head_norm,
        "input norm": config.algorithm == "EAGLE" and config.input_norms[0],
        "q and k norms": config.layer.qk_norm,
    }
    used = [name for name, is_used in names.items() if is_used]
    return ", ".join(used) if used else "as published, no options"


def _rotary_phrase(rope: RopeConfig) -> str:
    scaling = "" if rope.kind == "default" else f" factor {rope.factor:g}"
    return f"{rope.kind}{scaling}, base {rope.theta:g}"


def _warnings(fit: DraftFit, dtype: torch.dtype, context_length: int) -> tuple[str, ...]:
    found = list(fit.warnings)
    stored = {str(kind).removeprefix("torch.") for kind in fit.description.dtypes.values() if kind.is_floating_point and kind != dtype}
    if stored:
        found.append(f"draft weights are stored as {' and '.join(sorted(stored))}, cast to the run's {str(dtype).removeprefix('torch.')}")
    if context_length > fit.config.max_position_embeddings:
        found.append(
            f"draft was made for {fit.config.max_position_embeddings} positions and the run allows {context_length}: "
            "text stays right, the accept length may fall beyond"
        )
    return tuple(found)
