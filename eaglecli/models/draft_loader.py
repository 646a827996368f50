"""Loads a draft beside its target: checks the fit, fills the layers, shares embedding and head with the target where it can."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eaglecli.models.checkpoint import iterate_tensors
from eaglecli.models.draft_description import weights_path
from eaglecli.models.draft_fit import DRAFT_CLASSES, DraftFit, check_draft_fit
from eaglecli.models.draft_layout import ALGORITHM_TITLES
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.fill import fill_from_tensors, is_rotary_buffer
from eaglecli.models.loader import LoadedTarget
from eaglecli.models.rope import RopeConfig, rope_tables

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_TOKEN_TABLES = ("d2t", "t2d")  # read with the description


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
    own = {name: torch.empty(fit.description.shapes[name], dtype=dtype, device=device) for name in _own_tables(fit)}
    embedding, embedding_phrase = target.model.embed_weight, "target's (none in the file)"
    head = own.get(_HEAD, target.model.head_weight)
    model = _empty_draft(fit, embedding, head, dtype, device, context_length)
    where = str(fit.description.path)
    fill_from_tensors(model.checkpoint_views() | own, _canonical_tensors(fit), where, _is_left_out)
    if _EMBEDDING in own:
        embedding, embedding_phrase = _choose_embedding(own[_EMBEDDING], target.model.embed_weight)
        model.embed_weight = embedding
    model.head_weight = _head_rows(fit, embedding if fit.head == "own embedding" else head)
    model.vocab_size = model.head_weight.shape[0]
    model.token_map = None if fit.token_map is None else fit.token_map.to(device)
    return LoadedDraft(model, fit, _summary(fit, embedding_phrase), _warnings(fit, dtype, context_length))


def _own_tables(fit: DraftFit) -> list[str]:
    return [name for name in (_EMBEDDING, _HEAD) if name in fit.description.shapes]


def _empty_draft(
    fit: DraftFit, embedding: torch.Tensor, head: torch.Tensor, dtype: torch.dtype, device: torch.device | str, context_length: int
) -> DraftModel:
    tables = rope_tables(fit.config.rope, context_length, device)
    return DRAFT_CLASSES[fit.config.algorithm](fit.config, tables, embedding, head, None, dtype, device)


def _canonical_tensors(fit: DraftFit) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors under canonical names, q and k rows in half-rotating order."""
    layout, config = fit.description.layout, fit.config.layer
    canonical_names = {file_name: name for name, file_name in layout.file_names.items()}
    for file_name, tensor in iterate_tensors(weights_path(fit.description.path)):
        name = canonical_names.get(file_name, file_name)
        if layout.has_interleaved_rotary and any(f".{part}_proj." in name for part in "qk"):
            tensor = _half_rotating(tensor, config.head_dim)
        yield name, tensor


def _half_rotating(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [n * hd, ...] ordered for rotation of neighbours (0, 1), (2, 3), ... to the order that rotates halves (0, hd/2), ..."""
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _is_left_out(name: str) -> bool:
    return name in _TOKEN_TABLES or is_rotary_buffer(name)


def _choose_embedding(own: torch.Tensor, of_target: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The target's table when the file only holds a copy of it (which saves the memory), else the draft's own."""
    rows = of_target.shape[0]
    if own.shape[1] == of_target.shape[1] and torch.equal(own[:rows], of_target):
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
    stored = {str(kind).removeprefix("torch.") for name, kind in fit.description.dtypes.items() if kind.is_floating_point and kind != dtype}
    if stored:
        found.append(f"draft weights are stored as {' and '.join(sorted(stored))}, cast to the run's {str(dtype).removeprefix('torch.')}")
    if context_length > fit.config.max_position_embeddings:
        found.append(
            f"draft was made for {fit.config.max_position_embeddings} positions and the run allows {context_length}: "
            "text stays right, the accept length may fall beyond"
        )
    return tuple(found)
