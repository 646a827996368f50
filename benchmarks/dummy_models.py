"""Targets and drafts of a real shape with random weights, for speed runs where the real weights are not at hand."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from eaglecli.engine.floor import iteration_work
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from tests.fixtures import llama_config, scattered_ids, vocabulary_tables

BANDWIDTH = 4.08e12  # bytes a second of a weight read, measured on one H200 (design.md 10)
DRAFT_VOCAB_SIZE = 32_000
SHAPES = {
    "smollm2": llama_config(576, 30, 9, 3, 1536, vocab_size=49_152, max_position_embeddings=8192, tie_word_embeddings=True),
    "llama8b": llama_config(4096, 32, 32, 8, 14_336, vocab_size=128_256, max_position_embeddings=131_072),
    "tiny": llama_config(64, 4, 4, 2, 128, vocab_size=512),
}


@dataclass(frozen=True, eq=False)
class DummyPair:
    """A target and an EAGLE-3 draft that fits it."""

    target: LoadedTarget
    draft: LoadedDraft

    def floor_s(self, speculation: SpeculationSettings) -> float:
        """Seconds that reading the weights of one iteration takes at best. The cache is left out."""
        return iteration_work(self.target.model, self.draft.model, speculation).weight_bytes / BANDWIDTH


def load_dummy_pair(shape: str, folder: Path, dtype: torch.dtype, device: torch.device, context_length: int) -> DummyPair:
    """Write configs and a random draft under `folder` and load both."""
    target_dir, draft_dir = folder / shape / "target", folder / shape / "draft"
    target_dir.mkdir(parents=True, exist_ok=True)
    (target_dir / "config.json").write_text(json.dumps(SHAPES[shape]))
    target = load_target(target_dir, dtype, device, context_length, "dummy")
    write_dummy_draft(draft_dir, SHAPES[shape], dtype, device)
    return DummyPair(target, load_draft(draft_dir, target, dtype, device, context_length))


def write_dummy_draft(folder: Path, target: dict, dtype: torch.dtype, device: torch.device) -> None:
    """An EAGLE-3 checkpoint of one layer; weights are made on the device, which is faster than on the host."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, head_dim = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    q_size, kv_size = target["num_attention_heads"] * head_dim, target["num_key_value_heads"] * head_dim
    draft_vocab = min(DRAFT_VOCAB_SIZE, target["vocab_size"] // 2)
    sizes = {
        "midlayer.self_attn.q_proj": (q_size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q_size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "fc": (hidden, 3 * hidden),
        "lm_head": (draft_vocab, hidden),
    }
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        f"{name}.weight": torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator).cpu()
        for name, size in sizes.items()
    }
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=dtype)
    tensors |= vocabulary_tables(scattered_ids(draft_vocab, 0, target["vocab_size"]), target["vocab_size"])
    config = {**target, "num_hidden_layers": 1, "draft_vocab_size": draft_vocab, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
