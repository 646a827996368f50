"""The tokenizer of a GGUF file splits text as the original does: the splitting rule that the file names, which the loader passes over.

Without it digits after blanks get other ids than in training (ggml-org/llama.cpp names the rules in `tokenizer.ggml.pre`).
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from eaglecli.errors import ModelError

MAGIC = b"GGUF"
MODEL_KEY, PRE_KEY = "tokenizer.ggml.model", "tokenizer.ggml.pre"
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
BYTE_LEVEL_MODEL = "gpt2"
SENTENCE_PIECE = "llama"


def apply_splitting_rule(backend: Any, path: Path) -> None:
    """Gives a tokenizer that was rebuilt from a GGUF file the file's own rule. Raises ModelError for a rule that is not known here."""
    from tokenizers import pre_tokenizers

    model, rule = read_tokenizer_names(path)
    if model == SENTENCE_PIECE:
        return
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules = {"smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]), "gpt-2": byte_level}
    if model != BYTE_LEVEL_MODEL or rule not in rules:
        message = f"the tokenizer of {path} splits text by the rule `{rule}` of the model `{model}`, which is not supported"
        raise ModelError(message, "give the original tokenizer (tokenizer.json) with --tokenizer-path")
    backend.pre_tokenizer = rules[rule]


def read_tokenizer_names(path: Path) -> tuple[str | None, str | None]:
    """(kind of tokenizer, splitting rule) from the head of the file, None for what is not there. Raises ModelError."""
    found: dict[str, str] = {}
    try:
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise ModelError(f"{path} is no GGUF file")
            _, _, num_keys = struct.unpack("<IQQ", stream.read(20))
            for _ in range(num_keys):
                key, value = _read_string(stream), _read_value(stream)
                if key in (MODEL_KEY, PRE_KEY) and isinstance(value, str):
                    found[key] = value
                if len(found) == 2:
                    break
    except (OSError, struct.error, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"the head of {path} cannot be read: {error}") from error
    return found.get(MODEL_KEY), found.get(PRE_KEY)


def _read_value(stream: BinaryIO) -> str | None:
    """A string as such; anything else is stepped over."""
    (kind,) = struct.unpack("<I", stream.read(4))
    if kind == STRING:
        return _read_string(stream)
    if kind != ARRAY:
        stream.seek(SCALAR_BYTES[kind], 1)
        return None
    item_kind, count = struct.unpack("<IQ", stream.read(12))
    if item_kind != STRING:
        stream.seek(SCALAR_BYTES[item_kind] * count, 1)
        return None
    for _ in range(count):
        stream.seek(struct.unpack("<Q", stream.read(8))[0], 1)
    return None


def _read_string(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(length).decode("utf-8")
