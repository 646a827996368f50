"""Small target and draft pairs in Hugging Face layout, written to a folder: CYCLE, TWIN, RAND, E3, and random drafts for any target.

Every writer returns the two folders. All are float32, with a vocabulary of 320 ids: 256 bytes, special tokens, reserved
ones; a byte-level tokenizer with a chat template lies beside every target, so that the command line can run on them.
Greedy choices are well decided (heads are scaled), so that equality of texts is a fair demand in float32.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from eaglecli.models.config import TargetConfig

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
END_OF_TURN_ID = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Tensors = dict[str, torch.Tensor]


class Pair(NamedTuple):
    """The folders of a target and its draft."""

    target_dir: Path
    draft_dir: Path


# ---- checkpoints --------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write config.json and model.safetensors into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """The config and tensors of a folder that `write_checkpoint` wrote."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def change_checkpoint(
    source: Path, folder: Path, config: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """A copy of a checkpoint with some config keys and tensors replaced; the value None removes one."""
    old_config, old_tensors = read_checkpoint(source)
    new_config = {key: value for key, value in {**old_config, **(config or {})}.items() if value is not None}
    new_tensors = {name: tensor for name, tensor in {**old_tensors, **(tensors or {})}.items() if tensor is not None}
    return write_checkpoint(folder, new_config, new_tensors)


def llama_config(
    hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int, **extra: Any
) -> dict[str, Any]:
    """A config.json for a Llama target or for a draft (without its algorithm's own keys)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "intermediate_size": intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN_ID,
        "dtype": "float32",
        **extra,
    }


class Weights:
    """Seeded random weights, each with a standard deviation that keeps the size of what it multiplies."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, num_rows: int, num_columns: int, scale: float = 1.0) -> torch.Tensor:
        """[rows, columns]; rows of unit variance come out with standard deviation `scale`."""
        return torch.randn(num_rows, num_columns, generator=self.generator) * (scale * num_columns**-0.5)

    def signs(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """[rows, columns] of +1 and -1: every row has root mean square 1, so an RMS norm with weight 1 leaves it as it is."""
        return torch.randint(0, 2, (num_rows, num_columns), generator=self.generator).float() * 2 - 1

    def layer(self, prefix: str, config: Mapping[str, Any], scale: float, peak: float = 1.5, input_size: int | None = None) -> Tensors:
        """The tensors of one Llama layer: `scale` sizes what it adds to the stream, `peak` how sharply it attends. Norms are 1."""
        hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        width = input_size or hidden
        return {
            f"{prefix}.self_attn.q_proj.weight": self.matrix(q_size, width, peak),
            f"{prefix}.self_attn.k_proj.weight": self.matrix(kv_size, width, peak),
            f"{prefix}.self_attn.v_proj.weight": self.matrix(kv_size, width),
            f"{prefix}.self_attn.o_proj.weight": self.matrix(hidden, q_size, scale),
            f"{prefix}.mlp.gate_proj.weight": self.matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": self.matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": self.matrix(hidden, inner, scale),
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
        }


def write_target(
    folder: Path, config: Mapping[str, Any], embedding: torch.Tensor, head: torch.Tensor, layers: Tensors, final_norm: float = 1.0
) -> Path:
    """Write a target with a constant final norm weight, and the byte tokenizer beside it."""
    norm = torch.full((config["hidden_size"],), final_norm)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm}
    tensors |= {f"model.{name}": tensor for name, tensor in layers.items()}
    write_tokenizer(folder)
    return write_checkpoint(folder, config, tensors)


# ---- CYCLE --------------------------------------------------------------------------------------------------------


def disjoint_cycles(num_cycles: int = 64, length: int = 5) -> list[list[int]]:
    """Cycles without a common token: whatever a request prints shows which cycle its prompt was in."""
    return [list(range(start, start + length)) for start in range(0, num_cycles * length, length)]


def text_cycle(text: str = "abcdefghijklmnopqrstuvwxyz") -> list[int]:
    """The UTF-8 bytes of a text as one cycle; no byte may occur twice, since each token has one successor."""
    ids = list(text.encode())
    if len(set(ids)) != len(ids):
        raise ValueError(f"{text!r} uses a byte twice")
    return ids


def write_cycle(folder: Path, cycles: Sequence[Sequence[int]] | None = None, seed: int = 0, **extra_config: Any) -> Pair:
    """CYCLE: the target continues every token by its successor in a cycle, and an EAGLE-1 draft knows it as well.

    Attention and MLP add nothing, so the stream is the token's embedding; the head's row of a token equals the embedding of
    its predecessor, whose product with itself (H) exceeds all others. Tokens outside the cycles repeat themselves.
    The draft passes the embedding through fc = [I, 0] and shares the head: every proposal is right.
    """
    config = llama_config(64, 1, 4, 2, 64, **extra_config)
    weights = Weights(seed)
    embedding = weights.signs(VOCAB_SIZE, 64)
    successor = torch.arange(VOCAB_SIZE)
    for cycle in disjoint_cycles() if cycles is None else cycles:
        successor[torch.tensor(cycle)] = torch.tensor([*cycle[1:], cycle[0]])
    head = torch.empty_like(embedding)
    head[successor] = embedding
    layer = weights.layer("layers.0", config, scale=0.0)
    target_dir = write_target(folder / "target", config, embedding, head, layer)
    return Pair(target_dir, write_eagle_draft(folder / "draft", config, layer, embedding, torch.eye(64), torch.zeros(64, 64)))


def write_eagle_draft(
    folder: Path,
    config: Mapping[str, Any],
    layer: Tensors,
    embedding: torch.Tensor,
    embedding_part: torch.Tensor,
    feature_part: torch.Tensor,
) -> Path:
    """An EAGLE-1 draft in SafeAILab layout: `layer` without its input norm, fc = [embedding_part, feature_part]."""
    tensors = {name: tensor for name, tensor in layer.items() if not name.endswith("input_layernorm.weight")}
    tensors["embed_tokens.weight"] = embedding
    tensors["fc.weight"] = torch.cat((embedding_part, feature_part), dim=1)
    return write_checkpoint(folder, {**config, "num_hidden_layers": 1, "bias": False}, tensors)


# ---- TWIN ---------------------------------------------------------------------------------------------------------


_RECENT_SIZE = 16  # width of the part of TWIN's stream that summarises recent tokens
_RECENT_DECAY = 0.76  # best factor between that summary at one position and at the next, for rotary base 10,000
_RECENT_OWN_SHARE = 0.245  # share of the token itself in the summary, beside the aged one


def write_twin(
    folder: Path,
    seed: int = 0,
    rotary: Mapping[str, Any] | None = None,
    draft_rotary: Mapping[str, Any] | None = None,
    logit_scale: float = 4.0,
    draft_config: Mapping[str, Any] | None = None,
) -> Pair:
    """TWIN: a one-layer target, and an EAGLE-1 draft that copies its layer.

    The draft has no input norm: with +1/-1 embeddings the target's own input norm changes nothing. It has no final norm
    either: the target's has a constant weight that undoes the average growth of the stream, so the hidden state that the target's
    head sees is nearly the stream itself, as the draft's is.

    Features matter: half of the target's heads only write a summary of recent tokens into a part of the stream of its own
    (its embedding is constant there). The draft lacks these heads. It takes the summary of position i from the feature and ages it by one
    token with fc, which works because the summary decays by about the same factor per position. So acceptance is near full only if
    positions, hidden states and cache are right. What is lost: that factor is approximate, the final norm is not constant, and
    the first token of the prompt is in no draft slot.
    `rotary` are config keys for both models, `draft_rotary` another spelling of them for the draft.
    """
    config = _with_rotary(llama_config(64, 1, 4, 2, 128), rotary)
    weights = Weights(seed)
    embedding, head = weights.signs(VOCAB_SIZE, 64), weights.matrix(VOCAB_SIZE, 64, logit_scale)
    embedding[:, -_RECENT_SIZE:] = 1.0
    head[:, -_RECENT_SIZE:] -= head[:, -_RECENT_SIZE:].mean(1, keepdim=True)  # the constant favours no token
    layer, summary = _twin_layer(weights, config)
    target_dir = write_target(folder / "target", config, embedding, head, layer, final_norm=1.07)
    draft_layer = dict(layer)
    draft_layer["layers.0.self_attn.o_proj.weight"] = layer["layers.0.self_attn.o_proj.weight"].clone()
    draft_layer["layers.0.self_attn.o_proj.weight"][:, 32:] = 0.0
    own_part, feature_part = torch.eye(64) + _RECENT_OWN_SHARE * summary, torch.zeros(64, 64)
    for index in range(64 - _RECENT_SIZE, 64):
        own_part[index, index] -= _RECENT_DECAY  # the constant 1 comes from both inputs, and must come out as 1
        feature_part[index, index] = _RECENT_DECAY
    draft_settings = _with_rotary(config, draft_rotary) | (draft_config or {})
    return Pair(target_dir, write_eagle_draft(folder / "draft", draft_settings, draft_layer, embedding, own_part, feature_part))


def _with_rotary(config: Mapping[str, Any], rotary: Mapping[str, Any] | None) -> dict[str, Any]:
    if rotary is None:
        return dict(config)
    return {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "rope_parameters")} | dict(rotary)


def _twin_layer(weights: Weights, config: Mapping[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """TWIN's layer, and the matrix [64, 64] by which one token's embedding enters the summary of recent tokens.

    Heads 0 and 1 (keys and values 0) attend by content and stay out of the summary's part. Heads 2 and 3 (keys and
    values 1) have constant queries and keys, so that rotation alone, the distance, decides what they see: the last few tokens.
    """
    layer, recent = weights.layer("layers.0", config, scale=0.6), slice(64 - _RECENT_SIZE, 64)
    q, k, v, o = (layer[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkvo")
    for weight in (q, k, v):
        weight[:, recent] = 0.0
    for weight, first_row in ((q, 32), (q, 48), (k, 16)):
        weight[first_row : first_row + 16] = 0.0
        weight[first_row + 1 : first_row + 4, -1] = 8**0.5
    o[recent, :32] = 0.0
    o[: 64 - _RECENT_SIZE, 32:] = 0.0
    o[recent, 32:] *= 3.0
    layer["layers.0.mlp.down_proj.weight"][recent] = 0.0
    return layer, (o[:, 32:48] + o[:, 48:]) @ v[16:]


# ---- RAND ---------------------------------------------------------------------------------------------------------


def write_rand(folder: Path, seed: int = 0, logit_scale: float = 8.0, **extra_config: Any) -> Pair:
    """RAND: a random two-layer target and an EAGLE-1 draft with other random weights: nearly every proposal is refused."""
    config = llama_config(64, 2, 4, 2, 128, **extra_config)
    weights = Weights(seed)
    embedding, head = weights.matrix(VOCAB_SIZE, 64, 8.0), weights.matrix(VOCAB_SIZE, 64, logit_scale)
    layers = weights.layer("layers.0", config, scale=1.0) | weights.layer("layers.1", config, scale=1.0)
    target_dir = write_target(folder / "target", config, embedding, head, layers)
    draft_layer = weights.layer("layers.0", config, scale=1.0)
    return Pair(target_dir, write_eagle_draft(folder / "draft", config, draft_layer, embedding, torch.eye(64), weights.matrix(64, 64)))


# ---- E3 -----------------------------------------------------------------------------------------------------------


def scattered_ids(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """`count` distinct target ids in ascending order, int64: a draft vocabulary."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def vocabulary_tables(token_ids: torch.Tensor, vocab_size: int = VOCAB_SIZE) -> Tensors:
    """d2t (offsets) and t2d (membership) of a draft vocabulary in ascending order."""
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": members}


def write_e3(folder: Path, seed: int = 0, draft_vocab_size: int = 64, logit_scale: float = 8.0) -> Pair:
    """E3: an eight-layer target and an EAGLE-3 draft on boundaries 2, 4, 5 with a scattered vocabulary of 64 of the 320 ids.

    The target's layers add little to the token's embedding, so its next token depends mostly on the last one, and head rows
    of the draft vocabulary are longer, so that they are chosen often. The draft's attention is built to
    find the token itself (q and k are the +1/-1 embedding, longest against itself) and to add that embedding to the
    stream; its head holds the target's own rows. The fused features come in small. Some proposals are right, many are not.
    """
    config = llama_config(64, 8, 4, 4, 128)
    weights = Weights(seed)
    embedding, head = weights.signs(VOCAB_SIZE, 64), weights.matrix(VOCAB_SIZE, 64, logit_scale)
    token_ids = scattered_ids(draft_vocab_size, seed)
    head[token_ids] *= 2.0
    layers: Tensors = {}
    for index in range(8):
        layers |= weights.layer(f"layers.{index}", config, scale=0.25)
    target_dir = write_target(folder / "target", config, embedding, head, layers)
    draft_config = {**config, "num_hidden_layers": 1, "draft_vocab_size": draft_vocab_size, "architectures": ["LlamaForCausalLMEagle3"]}
    tensors = _eagle3_layer(weights, draft_config) | vocabulary_tables(token_ids)
    tensors["lm_head.weight"] = head[token_ids]
    return Pair(target_dir, write_checkpoint(folder / "draft", draft_config, tensors))


def _eagle3_layer(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    hidden_size = config["hidden_size"]
    tensors = weights.layer("midlayer", config, scale=0.25, input_size=2 * hidden_size)
    embedding_only = torch.cat((torch.eye(hidden_size), torch.zeros(hidden_size, hidden_size)), dim=1)
    noise = weights.matrix(hidden_size, 2 * hidden_size, 0.1)
    for part, factor in (("q", 2.0), ("k", 1.0), ("v", 1.0)):
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = factor * embedding_only + noise
    tensors["midlayer.self_attn.o_proj.weight"] = 3.0 * torch.eye(hidden_size)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(hidden_size)
    tensors["norm.weight"] = torch.ones(hidden_size)
    tensors["fc.weight"] = weights.matrix(hidden_size, 3 * hidden_size, 0.5)
    return tensors


# ---- random draft for any target ----------------------------------------------------------------------------------


def write_random_draft(target: TargetConfig, folder: Path, seed: int = 0, draft_vocab_size: int | None = 1024) -> Path:
    """An EAGLE-3 draft of random weights that fits `target`: default taps, no embedding, a scattered vocabulary (None: the whole one).

    Needs a target of at least four layers. Proposals are noise, so it stresses refusal on real models.
    """
    size = target.hidden_size
    config = {
        **llama_config(size, 1, target.layer.num_heads, target.num_kv_heads, target.layer.intermediate_size),
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size or target.vocab_size,
        "rms_norm_eps": target.layer.rms_norm_eps,
    }
    weights = Weights(seed)
    tensors = weights.layer("midlayer", config, scale=1.0, input_size=2 * size)
    tensors |= {"midlayer.hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size)}
    tensors["fc.weight"] = weights.matrix(size, 3 * size)
    tensors["lm_head.weight"] = weights.matrix(draft_vocab_size or target.vocab_size, size, 4.0)
    if draft_vocab_size is not None:
        tensors |= vocabulary_tables(scattered_ids(draft_vocab_size, seed, target.vocab_size), target.vocab_size)
    return write_checkpoint(folder, config, tensors)


# ---- tokenizer ----------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose ids 0..255 are the bytes of the UTF-8 text, then special and reserved tokens up to 320 ids."""
    folder.mkdir(parents=True, exist_ok=True)
    special = (*SPECIAL_TOKENS, *(f"<|reserved_{number}|>" for number in range(VOCAB_SIZE - 256 - len(SPECIAL_TOKENS))))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + number, "content": token, **flags} for number, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {_byte_symbol(byte): byte for byte in range(256)}, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _byte_symbol(byte: int) -> str:
    """The character by which byte-level tokenizers write a byte: itself when it is visible, else the next free one from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in visible:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in visible))
