"""The shapes of a record, each to a prompt: text, messages, turns, ShareGPT, Alpaca, token ids. OpenAI batch lines: openai_batch.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eaglecli.io.chat_messages import Message, check_unicode, read_messages, read_text
from eaglecli.io.json_record import describe_type
from eaglecli.io.records import RecordFault

MAX_TOKEN_ID = 2**31 - 1
TOKEN_FIELDS = ("prompt_token_ids", "input_ids")
SHAREGPT_ROLES = {
    **{"human": "user", "user": "user", "system": "system"},
    **{"gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bing": "assistant", "bard": "assistant"},
}

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class PromptContent:
    """What is to be answered; one of `text`, `messages`, `turns`, `token_ids` is given. `is_raw`: text that no template may touch."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    turns: tuple[str, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    is_raw: bool = False
    options: Mapping[str, Any] | None = None  # sampling options that the shape keeps in a place of its own


@dataclass(frozen=True)
class Shape:
    """`names`: the field that marks it, the first that is filled. `read(fields, name, allow_blank)` raises RecordFault."""

    names: tuple[str, ...]
    read: Callable[[Fields, str, bool], PromptContent] = field(repr=False)


def _read_prompt(fields: Fields, name: str, allow_blank: bool) -> PromptContent:
    return PromptContent(text=read_text(fields[name], name, allow_blank))


def _read_messages(fields: Fields, name: str, allow_blank: bool) -> PromptContent:
    return PromptContent(messages=read_messages(fields[name], allow_blank))


def _read_turns(fields: Fields, name: str, allow_blank: bool) -> PromptContent:
    """What the user says, turn by turn; the answers between are the model's own."""
    value = fields[name]
    if not isinstance(value, list):
        raise RecordFault("bad_type", f"`{name}` must be an array of strings, not {describe_type(value)}")
    if not value:
        raise RecordFault("empty_prompt", f"empty prompt: `{name}` has no turn")
    return PromptContent(turns=tuple(read_text(turn, f"{name}[{number}]", allow_blank) for number, turn in enumerate(value)))


def _read_sharegpt(fields: Fields, name: str, allow_blank: bool) -> PromptContent:
    """History is kept; an answer at the end is dropped, since it is what is to be generated. One at the beginning is bad."""
    value = fields[name]
    if not isinstance(value, list):
        raise RecordFault("bad_type", f"`{name}` must be an array, not {describe_type(value)}")
    messages = [_sharegpt_message(item, number) for number, item in enumerate(value, start=1)]
    system = fields.get("system")
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    first = next((message["role"] for message in messages if message["role"] != "system"), None)
    if first == "assistant":
        raise RecordFault("unsupported", "the conversation begins with an answer: what was asked is missing")
    return PromptContent(messages=read_messages(messages, allow_blank))


def _sharegpt_message(item: Any, number: int) -> Message:
    if not isinstance(item, dict):
        raise RecordFault("bad_type", f"turn {number} must be an object, not {describe_type(item)}")
    if "from" not in item and "role" in item:
        return item
    speaker = item.get("from")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        shown = f"`{speaker[:40]}`" if isinstance(speaker, str) else describe_type(speaker)
        raise RecordFault("bad_type", f"turn {number}: `from` is {shown}, none of {', '.join(SHAREGPT_ROLES)}")
    return {"role": role, "content": item.get("value")}


def _read_alpaca(fields: Fields, name: str, allow_blank: bool) -> PromptContent:
    """Instruction, blank line, input; an empty or missing input is left out. `output` is never looked at."""
    instruction = read_text(fields[name], name, allow_blank)
    extra = fields.get("input")
    if extra is None or extra == "":
        return PromptContent(text=instruction)
    if not isinstance(extra, str):
        raise RecordFault("bad_type", f"`input` must be a string, not {describe_type(extra)}")
    check_unicode(extra, "`input`")
    return PromptContent(text=f"{instruction}\n\n{extra}")


def _read_tokens(fields: Fields, name: str, allow_blank: bool) -> PromptContent:
    return PromptContent(token_ids=read_token_ids(fields[name], name))


def read_token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids as they are given; whether the model has them is seen later. Raises RecordFault."""
    if not isinstance(value, list):
        raise RecordFault("bad_type", f"`{name}` must be an array of token ids, not {describe_type(value)}")
    if not value:
        raise RecordFault("empty_prompt", f"empty prompt: `{name}` has no token")
    wrong = next((item for item in value if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID), None)
    if wrong is not None or None in value:
        raise RecordFault("bad_type", f"`{name}` must hold token ids (integers from 0), one is {describe_type(wrong)}: {str(wrong)[:40]}")
    return tuple(value)


SHAPES = {
    "prompt": Shape(("prompt",), _read_prompt),
    "messages": Shape(("messages",), _read_messages),
    "sharegpt": Shape(("conversations",), _read_sharegpt),
    "tokens": Shape(TOKEN_FIELDS, _read_tokens),
    "turns": Shape(("turns",), _read_turns),
    "alpaca": Shape(("instruction",), _read_alpaca),
}


SHAPE_OF_FIELD = {name: shape for shape, item in SHAPES.items() for name in item.names}
WEAK_SHAPES = ("alpaca", "turns")


def read_shape(fields: Fields, shapes: tuple[str, ...], allow_blank: bool) -> tuple[str, PromptContent]:
    """(name of the shape, content) of a record that may have one of `shapes`. Raises RecordFault.

    One marking field must be filled. `turns` and `instruction` are common names for other things: they count only where
    nothing else is filled.
    """
    filled: dict[str, str] = {}
    for name, shape in SHAPE_OF_FIELD.items():
        if name in fields and fields[name] is not None and shape in shapes:
            filled.setdefault(shape, name)
    for shape in WEAK_SHAPES:
        if len(filled) > 1:
            filled.pop(shape, None)
    if len(filled) > 1:
        first, second = list(filled.values())[:2]
        raise RecordFault("ambiguous", f"both `{first}` and `{second}` are there; --input-format says which one counts")
    if not filled:
        raise _nothing_to_read(fields, shapes)
    ((shape, name),) = filled.items()
    return shape, SHAPES[shape].read(fields, name, allow_blank)


def _nothing_to_read(fields: Fields, shapes: tuple[str, ...]) -> RecordFault:
    names = [name for shape in shapes for name in SHAPES[shape].names]
    empty = [name for name in names if name in fields]
    if empty:
        return RecordFault("bad_type", f"`{empty[0]}` is null")
    wanted = " or ".join(f"`{name}`" for name in names[: 2 if len(shapes) > 1 else None])
    there = ", ".join(f"`{str(name)[:40]}`" for name in list(fields)[:12]) or "none"
    return RecordFault("missing_prompt", f"no {wanted}; the keys there are: {there}")
