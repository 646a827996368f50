"""A trained draft in the published EAGLE-3 layout, as SGLang, vLLM, SpecForge and our own loader read it.

Layer ids are written as SpecForge and SGLang do, "output of that layer": one less than the boundary (draft-checkpoints 2.9).
The embedding is the target's and is left out.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eaglecli.errors import UserError
from eaglecli.models.config import TargetConfig
from eaglecli.models.published_draft import eagle3_config
from eaglecli.models.tap_layers import resolve_tap_layers
from eaglecli.training.draft_module import DraftModule, DraftShape
from eaglecli.training.vocabulary import DraftVocabulary


def check_tap_boundaries(boundaries: tuple[int, ...], num_target_layers: int) -> None:
    """Raise UserError unless the layer ids that stand for `boundaries` are read back as these boundaries."""
    shown = ",".join(map(str, boundaries))
    if not boundaries or min(boundaries) < 1 or max(boundaries) > num_target_layers:
        raise UserError(f"--tap-boundaries {shown} must lie between 1 and the target's {num_target_layers} layers")
    found = resolve_tap_layers(_layer_ids(boundaries), "eagle_config", len(boundaries), num_target_layers, "--tap-boundaries")
    if found.boundaries != boundaries:
        read_as = ",".join(map(str, found.boundaries))
        raise UserError(
            f"--tap-boundaries {shown} cannot be written to a draft config: loaders would take them for {read_as}",
            "choose another first boundary: 3 alone is ambiguous",
        )


def export_draft(
    folder: Path, module: DraftModule, vocabulary: DraftVocabulary, target: TargetConfig, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors into `folder`, each replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to("cpu", dtype).contiguous().clone() for name, weight in module.published_weights().items()}
    tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    unfinished = folder / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / "model.safetensors")
    config = _config(module.shape, target, dtype)
    unfinished = folder / "config.json.part"
    unfinished.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / "config.json")


def _config(shape: DraftShape, target: TargetConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json."""
    return {
        **eagle3_config(target, shape.layer, shape.draft_vocab_size, shape.rope_theta, shape.max_position_embeddings),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(_layer_ids(shape.tap_boundaries))},
    }


def _layer_ids(boundaries: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(boundary - 1 for boundary in boundaries)
