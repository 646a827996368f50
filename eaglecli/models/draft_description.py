"""What lies in a draft's folder, read from its config and tensor headers; of the tensors only the token tables are loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eaglecli.errors import ModelError
from eaglecli.models.checkpoint import find_weight_files, iterate_tensors, read_json, read_tensor_headers
from eaglecli.models.draft_config import DraftSettings, read_draft_settings, translate_mistral_params
from eaglecli.models.draft_layout import DraftLayout, read_layout

_MISTRAL_WEIGHTS = "consolidated.safetensors"


@dataclass(frozen=True, eq=False)
class DraftDescription:
    """A draft checkpoint before its weights are read. `shapes` and `dtypes` are keyed by canonical tensor name."""

    path: Path
    layout: DraftLayout
    settings: DraftSettings
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    d2t: torch.Tensor | None  # [Vd] offsets from draft to target ids
    t2d: torch.Tensor | None  # [V] membership in the draft vocabulary


def read_draft_description(path: Path, overrides: Mapping[str, Any] | None = None) -> DraftDescription:
    """Describe the draft in a local folder; `overrides` replace keys of its config.

    Raises ModelError when there is no draft that can be served.
    """
    if not path.is_dir():
        raise ModelError(f"draft {path} is not a folder", "a draft is a folder with config.json and model.safetensors or pytorch_model.bin")
    settings = _read_settings(path, overrides)
    headers = read_tensor_headers(_weights_path(path))
    layout = read_layout({name: header.shape for name, header in headers.items()}, str(path))
    by_canonical_name = {canonical: headers[name] for canonical, name in layout.file_names.items()}
    tables = dict(read_tensors(path, {layout.file_names[name]: name for name in ("d2t", "t2d") if name in layout.file_names}))
    return DraftDescription(
        path=path,
        layout=layout,
        settings=settings,
        shapes={name: header.shape for name, header in by_canonical_name.items()},
        dtypes={name: header.dtype for name, header in by_canonical_name.items()},
        d2t=tables.get("d2t"),
        t2d=tables.get("t2d"),
    )


def read_tensors(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a draft folder only the tensors whose file names are keys of `wanted`, under the names that it gives them, on the CPU."""
    if not wanted:
        return
    files = find_weight_files(_weights_path(path))
    if files.kind == "pickle":  # mapped into memory: tensors that are not looked at cost nothing
        yield from ((wanted[name], tensor) for name, tensor in iterate_tensors(_weights_path(path)) if name in wanted)
        return
    for file in files.paths:
        with safe_open(file, framework="pt") as handle:
            yield from ((wanted[name], handle.get_tensor(name)) for name in handle.keys() if name in wanted)  # noqa: SIM118


def _weights_path(path: Path) -> Path:
    """The folder, or the one file in it that carries the weights under Mistral's own file name."""
    mistral_file = path / _MISTRAL_WEIGHTS
    has_usual_file = (path / "model.safetensors").is_file() or (path / "model.safetensors.index.json").is_file()
    return mistral_file if mistral_file.is_file() and not has_usual_file else path


def _read_settings(path: Path, overrides: Mapping[str, Any] | None) -> DraftSettings:
    mistral_file = path / "params.json"
    if mistral_file.is_file() and not (path / "config.json").is_file():
        return read_draft_settings(translate_mistral_params(read_json(mistral_file)), overrides, str(mistral_file))
    return read_draft_settings(read_json(path / "config.json"), overrides, str(path / "config.json"))
