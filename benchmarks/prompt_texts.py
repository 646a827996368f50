"""What the benchmark scripts share: prompts of a JSONL file as token ids, and where two texts part."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eaglecli.errors import UserError

NEAR_TIE_GAP = 1e-3


@dataclass(frozen=True)
class Difference:
    """Where two texts part: `ours` or `theirs` is None where that text has ended."""

    index: int
    ours: int | None
    theirs: int | None


def read_records(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The first `limit` objects of a JSONL file. Raises UserError when there are none or one cannot be used."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        records = [json.loads(line) for line in lines[:limit]]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON lines: {error}") from error
    if not records:
        raise UserError(f"{path} holds no prompts")
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not (record.get("messages") or record.get("prompt")):
            raise UserError(f"{path}, record {number}: neither messages nor prompt")
    return records


def load_reference_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """transformers' own tokenizer of a checkpoint folder or GGUF file."""
    folder, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    return AutoTokenizer.from_pretrained(folder, **options)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> list[int]:
    """Token ids of a record; a bare prompt is one user turn where the model has a chat template."""
    messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return tokenizer(messages[-1]["content"])["input_ids"]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """Where the texts part; None for equal ones."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next((Difference(index, mine, other) for index, (mine, other) in pairs if mine != other), None)
