"""A small target and random drafts of every kind for the draft tests; weights are under SafeAILab names with numbered layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eaglecli.models.draft_loader import LoadedDraft
from eaglecli.models.loader import LoadedTarget, load_target
from tests import fixtures
from tests.fixtures import VOCAB_SIZE, Tensors, Weights, llama_config
from tests.helpers import new_kv_cache, packed_inputs, scattered_slot_table

HIDDEN = 32
CONTEXT = 64
NUM_TARGET_LAYERS = 8


def write_small_target(folder: Path, **extra: Any) -> Path:
    """A target of 8 layers and hidden size 32 (weights hardly matter to these tests)."""
    config = llama_config(HIDDEN, NUM_TARGET_LAYERS, 4, 2, 48, **extra)
    weights = Weights(1)
    layers: Tensors = {}
    for index in range(NUM_TARGET_LAYERS):
        layers |= weights.layer(f"layers.{index}", config, scale=0.3)
    return fixtures.write_target(folder, config, weights.signs(VOCAB_SIZE, HIDDEN), weights.matrix(VOCAB_SIZE, HIDDEN, 4.0), layers)


def load_small_target(folder: Path, **extra: Any) -> LoadedTarget:
    """The target of `write_small_target`, loaded in float32 on the CPU."""
    return load_target(write_small_target(folder, **extra), torch.float32, "cpu", CONTEXT)


def eagle_config(**extra: Any) -> dict[str, Any]:
    """The config of an EAGLE-1/2 draft in SafeAILab layout."""
    return llama_config(HIDDEN, 1, 4, 2, 48, bias=False, **extra)


def eagle3_config(**extra: Any) -> dict[str, Any]:
    """The config of an EAGLE-3 draft in SafeAILab layout, 64 draft ids."""
    return llama_config(HIDDEN, 1, 4, 2, 48, draft_vocab_size=64, **extra)


def random_layer(weights: Weights, config: Mapping[str, Any], index: int, input_size: int | None = None) -> Tensors:
    """A layer whose norms are random as well, so that one left out or put in shows."""
    tensors = weights.layer(f"layers.{index}", config, scale=0.7, input_size=input_size)
    return {
        name: 0.5 + torch.rand(tensor.shape, generator=weights.generator) if tensor.dim() == 1 else tensor
        for name, tensor in tensors.items()
    }


def random_norm(weights: Weights, size: int) -> torch.Tensor:
    """Norm weights between 0.5 and 1.5."""
    return 0.5 + torch.rand(size, generator=weights.generator)


def eagle_tensors(config: Mapping[str, Any], seed: int = 2) -> Tensors:
    """An EAGLE-1/2 draft: no embedding, no head, no input norm."""
    weights, size = Weights(seed), config["hidden_size"]
    tensors = random_layer(weights, config, 0)
    del tensors["layers.0.input_layernorm.weight"]
    return tensors | {"fc.weight": weights.matrix(size, 2 * size)}


def eagle3_tensors(config: Mapping[str, Any], seed: int = 3, num_states: int = 3, state_size: int = HIDDEN) -> Tensors:
    """An EAGLE-3 draft with its own short head, d2t and t2d; no embedding."""
    weights, size = Weights(seed), config["hidden_size"]
    tensors = random_layer(weights, config, 0, input_size=2 * size)
    tensors |= {"layers.0.hidden_norm.weight": random_norm(weights, size), "norm.weight": random_norm(weights, size)}
    tensors |= {"fc.weight": weights.matrix(size, num_states * state_size), "lm_head.weight": weights.matrix(64, size, 4.0)}
    return tensors | fixtures.vocabulary_tables(fixtures.scattered_ids(64, seed))


def as_midlayer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Layer 0 under the name that SafeAILab and SpecForge give it in EAGLE-3 files."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def random_pairs(feature_size: int, count: int = 12, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [n] and features [n, F]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator), torch.randn(count, feature_size, generator=generator)


def run_draft(draft: LoadedDraft, token_ids: torch.Tensor, hidden: torch.Tensor, chunk: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Feedback and logits of n pairs through a cache with scattered slots, in two chunks; `hidden` is fused or fed back already."""
    model = draft.model
    table = scattered_slot_table(1, CONTEXT)
    cache = new_kv_cache(model.num_layers, CONTEXT + 1, model.num_kv_heads, model.head_dim)
    outputs = []
    for start, end in ((0, chunk), (chunk, len(token_ids))):
        inputs = packed_inputs(table, [start], [end - start])
        outputs.append(model.forward(token_ids[start:end], hidden[start:end].contiguous(), inputs.positions, cache, inputs))
    feedback = torch.cat([output.feedback for output in outputs])
    return feedback, model.logits(torch.cat([output.head_input for output in outputs]))
