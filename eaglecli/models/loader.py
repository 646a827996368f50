"""Loads a target model from a folder, a GGUF file, or a config alone (random weights)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from eaglecli.errors import ModelError
from eaglecli.models.checkpoint import find_weight_files, iterate_tensors, read_json, read_tensor_headers
from eaglecli.models.config import TargetConfig, read_target_config
from eaglecli.models.fill import check_headers, fill_from_tensors, fill_with_noise
from eaglecli.models.gguf import gguf_config, is_gguf, read_gguf
from eaglecli.models.target import TargetModel

LoadFormat = Literal["auto", "safetensors", "dummy"]
_HEAD = "lm_head.weight"


@dataclass(frozen=True, eq=False)
class LoadedTarget:
    """A target ready to run. `summary` holds short phrases on what was found and decided."""

    model: TargetModel
    config: TargetConfig
    path: Path
    summary: tuple[str, ...]


def read_target_description(path: Path) -> TargetConfig:
    """The config of a folder, GGUF file or config file, without its weights. Raises ModelError."""
    if is_gguf(path):
        return read_target_config(gguf_config(read_gguf(path)), source=str(path))
    file = path if path.suffix == ".json" else path / "config.json"
    generation_file = file.parent / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else None
    return read_target_config(read_json(file), generation, source=str(file))


def load_target(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    context_length: int | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> LoadedTarget:
    """Load a target in the run's dtype onto its device; rotary tables reach `context_length` (None: the model's own limit).

    `load_format` "safetensors" accepts no other files; "dummy" reads only the config and makes weights from `seed`.
    Raises ModelError.
    """
    config = read_target_description(path)
    context = context_length or config.max_position_embeddings
    if load_format == "dummy":
        model = TargetModel(config, dtype, device, context, own_head=not config.tie_word_embeddings)
        fill_with_noise(model.checkpoint_views(), seed)
        return LoadedTarget(model, config, path, (*_describe(config, context), f"random weights from seed {seed}"))
    _check_format(path, load_format)
    headers = read_tensor_headers(path)
    own_head = _HEAD in headers or not config.tie_word_embeddings
    model = TargetModel(config, dtype, device, context, own_head)
    views = model.checkpoint_views()
    check_headers(views, headers, str(path))
    report = fill_from_tensors(views, iterate_tensors(path), str(path))
    summary = [*_describe(config, context), _head_phrase(own_head, config), f"{report.num_used} tensors"]
    summary += [f"{len(report.ignored)} stored rotary tables left out"] if report.ignored else []
    summary += [_cast_phrase(stored, dtype) for stored in report.stored_dtypes if stored != dtype]
    return LoadedTarget(model, config, path, tuple(summary))


def _check_format(path: Path, load_format: LoadFormat) -> None:
    if load_format == "safetensors" and (is_gguf(path) or find_weight_files(path).kind != "safetensors"):
        raise ModelError(f"{path} holds no safetensors, and the load format is 'safetensors'", "use --load-format auto")


def _describe(config: TargetConfig, context_length: int) -> Iterator[str]:
    layer = config.layer
    heads = f"{layer.num_heads}/{layer.num_kv_heads} heads of {layer.head_dim}"
    yield f"{config.family}, {config.num_layers} layers, hidden size {layer.hidden_size}, {heads}"
    yield f"rotary {config.rope.kind}, base {config.rope.theta:g}, {context_length} positions"
    windows = [window for window in config.windows if window is not None]
    if windows:
        yield f"sliding window {max(windows)} in {len(windows)} of {config.num_layers} layers"


def _head_phrase(own_head: bool, config: TargetConfig) -> str:
    if not own_head:
        return "head tied to the embedding"
    return "own head from the file, although the config ties it" if config.tie_word_embeddings else "own head"


def _cast_phrase(stored: torch.dtype, run: torch.dtype) -> str:
    return f"weights cast from {str(stored).removeprefix('torch.')} to {str(run).removeprefix('torch.')}"
