"""What is read from the input and what is said about a record that cannot be used: plain records, no tokenizer, no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ErrorCode = Literal[
    "invalid_json",
    "not_object",
    "encoding",
    "missing_prompt",
    "empty_prompt",
    "bad_type",
    "ambiguous",
    "template",
    "too_long",
    "bad_option",
    "unsupported",
    "duplicate_id",
    "numeric",
]

MAX_RAW_CHARACTERS = 2000


@dataclass(frozen=True)
class RecordKey:
    """Where a record comes from and what it is called: enough to write its result without looking anything up.

    `index` counts all records of the input from 0 (blank lines excluded, bad records counted). `id_json` is the
    record's id as JSON text, so that its type and value survive; it is a generated one where the input has none.
    """

    index: int
    id_json: str
    file: str
    line: int  # physical line, or the number of the row where there are no lines, from 1
    byte_offset: int | None  # of the line's first byte, where it is known
    occurrence: int = 0  # how many earlier records bear the same id
    has_own_id: bool = True
    input_json: str | None = None  # the record as it came, when its fields are to be passed through
    url: str | None = None  # of an OpenAI batch line
    num_cut_prompt_tokens: int = 0  # how much of the prompt was left out because somebody asked for that


class RecordFault(Exception):
    """One record cannot be used: the code and one sentence. It never ends the run by itself."""

    def __init__(self, code: ErrorCode, message: str, byte_offset: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.byte_offset = byte_offset


@dataclass(frozen=True)
class RecordError:
    """A bad record as it goes to errors.jsonl."""

    key: RecordKey
    code: ErrorCode
    message: str
    raw: str
    byte_offset: int | None = None
    is_skipped: bool = False  # left out because somebody asked for that: reported, but no failure of the run
    sample: int | None = None  # the one that failed; None: all samples of the record


@dataclass(frozen=True)
class PromptRecord:
    """A record whose shape is good: one of `text`, `messages`, `turns`, `token_ids` is given, the others are None."""

    key: RecordKey
    raw: str  # first characters of the line, for a later error
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # checked sampling options of this record alone
    turns: tuple[str, ...] | None = None  # what the user says; the model's own answers come between
    token_ids: tuple[int, ...] | None = None
    is_raw: bool = False  # a text that no chat template may touch
    shape: str = "prompt"  # how the record was read: prompt, messages, turns, sharegpt, alpaca, openai-batch, tokens
