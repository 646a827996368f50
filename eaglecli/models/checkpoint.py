"""Weight files of a checkpoint folder: which they are, what tensors they hold, and the tensors one by one.

Files are found by their exact names. Safetensors goes before pickles, one file before shards. Pickles are read with
`weights_only=True`, which executes nothing. GGUF files are read by `gguf.py`; the functions here pass them on.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from eaglecli.errors import ModelError
from eaglecli.models.gguf import is_gguf, iterate_gguf_tensors, read_gguf

_SAFETENSORS, _SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold a checkpoint's tensors."""

    kind: Literal["safetensors", "pickle"]
    paths: tuple[Path, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError when the file is missing or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}", "a checkpoint folder holds config.json and its weight files") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def find_weight_files(path: Path) -> WeightFiles:
    """The weight files of a folder, or the one file that `path` names. Raises ModelError listing what was looked for."""
    if path.is_file() and path.suffix in (".safetensors", ".bin"):
        return WeightFiles("safetensors" if path.suffix == ".safetensors" else "pickle", (path,))
    if (path / _SAFETENSORS).is_file():
        return WeightFiles("safetensors", (path / _SAFETENSORS,))
    if (path / _SAFETENSORS_INDEX).is_file():
        return WeightFiles("safetensors", _shards(path / _SAFETENSORS_INDEX))
    if (path / _PICKLE).is_file():
        return WeightFiles("pickle", (path / _PICKLE,))
    if (path / _PICKLE_INDEX).is_file():
        return WeightFiles("pickle", _shards(path / _PICKLE_INDEX))
    raise ModelError(
        f"{path} holds no weights; looked for {_SAFETENSORS}, {_SAFETENSORS_INDEX}, {_PICKLE}, {_PICKLE_INDEX}",
        "check that the download is complete",
    )


def read_tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Name -> shape and dtype of every tensor of a checkpoint folder or file, without reading the weights.

    GGUF tensors appear under their Hugging Face names with the dtype they are expanded to.
    """
    if is_gguf(path):
        return {name: TensorHeader(shape, torch.float32) for name, shape in read_gguf(path).shapes().items()}
    files = find_weight_files(path)
    read = _safetensors_headers if files.kind == "safetensors" else _pickle_headers
    headers: dict[str, TensorHeader] = {}
    for file in files.paths:
        headers.update(read(file))
    return headers


def iterate_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint folder or file, on the CPU, read when it is asked for."""
    if is_gguf(path):
        yield from iterate_gguf_tensors(read_gguf(path))
        return
    files = find_weight_files(path)
    for file in files.paths:
        yield from _iterate_safetensors(file) if files.kind == "safetensors" else _load_pickle(file, "cpu").items()


def _shards(index_path: Path) -> tuple[Path, ...]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path} has no weight_map")
    shards = tuple(index_path.parent / name for name in sorted(set(weight_map.values())))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelError(
            f"{index_path.parent} lacks {', '.join(missing)}, named by {index_path.name}", "check that the download is complete"
        )
    return shards


def _safetensors_headers(file: Path) -> dict[str, TensorHeader]:
    headers = {}
    try:
        with safe_open(file, framework="pt") as handle:
            names = handle.keys()
            for name in names:
                part = handle.get_slice(name)
                headers[name] = TensorHeader(tuple(part.get_shape()), _dtype(part.get_dtype(), name, file))
    except SafetensorError as error:
        raise _unreadable(file, error) from error
    return headers


def _dtype(label: str, name: str, file: Path) -> torch.dtype:
    if label not in _DTYPES:
        raise ModelError(f"{file}: tensor {name} has dtype {label}, which is not supported")
    return _DTYPES[label]


def _iterate_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as handle:
            names = handle.keys()
            for name in names:
                yield name, handle.get_tensor(name)
    except SafetensorError as error:
        raise _unreadable(file, error) from error


def _pickle_headers(file: Path) -> dict[str, TensorHeader]:
    return {name: TensorHeader(tuple(tensor.shape), tensor.dtype) for name, tensor in _load_pickle(file, "meta").items()}


def _load_pickle(file: Path, device: str) -> Mapping[str, torch.Tensor]:
    """The tensors of a .bin file; only the zip layout can be mapped into memory instead of read."""
    try:
        content = torch.load(file, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ModelError(f"{file} is no plain table of named tensors", "convert the checkpoint to safetensors")
    return content


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file} cannot be read: {str(error).splitlines()[0]}", "check that the download is complete and holds only weights")
