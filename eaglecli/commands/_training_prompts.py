"""Prompts of the trainer: the records of its input files as token ids, and the opening under which the target writes its own."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from eaglecli.errors import UserError
from eaglecli.io.console import Console
from eaglecli.io.prompts import InputSelection, read_prompts
from eaglecli.io.record_ids import IdPlan
from eaglecli.io.records import PromptRecord, RecordFault
from eaglecli.io.tokenizer import PromptTokenizer

_PLACEHOLDER = "PLACEHOLDER"
_BLOCK_BYTES = 1 << 20


def hash_files(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file. Raises UserError for one that cannot be read."""
    return [_hash_file(path) for path in paths]


def encode_prompts(paths: Sequence[Path], tokenizer: PromptTokenizer, console: Console) -> Iterator[np.ndarray]:
    """int32 ids of every good record; bad ones are counted and told. Of several turns the first is taken."""
    num_bad, first_reason = 0, ""
    for record in read_prompts(InputSelection(tuple(map(str, paths))), IdPlan()):
        try:
            if not isinstance(record, PromptRecord):
                raise RecordFault(record.code, record.message)
            yield _encode(record, tokenizer)
        except RecordFault as fault:
            num_bad += 1
            first_reason = first_reason or f"{record.key.file}, line {record.key.line}: {fault.message}"
    if num_bad:
        console.warning(f"{num_bad} records cannot be used and are left out; the first: {first_reason}")


def encode_text(text: str, tokenizer: PromptTokenizer) -> np.ndarray:
    """A text as one user message, or as it is when there is no chat template."""
    return tokenizer.encode_messages([{"role": "user", "content": text}]) if tokenizer.has_chat_template else tokenizer.encode_text(text)


def user_turn_prefix(tokenizer: PromptTokenizer) -> np.ndarray:
    """int32 ids of the chat template up to where the user's words begin. Raises UserError when it has no such place."""
    if not tokenizer.has_chat_template:
        raise UserError("--self-prompts needs a chat template and the tokenizer has none", "give prompts with --prompts")
    before, found, _ = tokenizer.render([{"role": "user", "content": _PLACEHOLDER}]).partition(_PLACEHOLDER)
    prefix = tokenizer.encode_text(before)
    if not found or not len(prefix):
        raise UserError("--self-prompts cannot find the user's turn in the chat template", "give prompts with --prompts")
    return prefix


def _encode(record: PromptRecord, tokenizer: PromptTokenizer) -> np.ndarray:
    if record.token_ids is not None:
        return np.array(record.token_ids, np.int32)
    if record.messages is not None:
        if not tokenizer.has_chat_template:
            raise RecordFault("template", "`messages` need a chat template and the tokenizer has none")
        return tokenizer.encode_messages(record.messages)
    text = record.text if record.turns is None else record.turns[0]
    assert text is not None
    return tokenizer.encode_text(text) if record.is_raw else encode_text(text, tokenizer)


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UserError(f"--prompts {path} cannot be read: {error.strerror or error}", "check the path") from error
    return digest.hexdigest()
