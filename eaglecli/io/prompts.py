"""Records of the input: from a parsed object to a prompt text or a list of messages, with its id and its sampling options."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eaglecli.io.json_record import describe_type, parse_record, raw_excerpt, refuse_repeated_key
from eaglecli.io.lines import Line, read_lines
from eaglecli.io.record_ids import IdPlan, generated_id
from eaglecli.io.records import PromptRecord, RecordError, RecordFault, RecordKey
from eaglecli.io.sampling_options import read_options

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROLES_THAT_ASK = ("user", "tool", "function")
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"


@dataclass(frozen=True)
class InputSelection:
    """Which records are taken and how they are read; `offset` and `limit` count records, bad ones included."""

    path: Path
    input_format: str = "auto"
    offset: int = 0
    limit: int | None = None


def read_prompts(selection: InputSelection, ids: IdPlan, digest: Any = None) -> Iterator[PromptRecord | RecordError]:
    """Every selected record of the file, good or bad, in file order. `index` counts from the file's start.

    Raises UserError when the file itself cannot be read; a bad record is yielded, never raised.
    """
    end = None if selection.limit is None else selection.offset + selection.limit
    counter = ids.counter()
    for index, line in enumerate(read_lines(selection.path, digest)):
        if end is not None and index >= end:
            return
        record = read_record(line, index, selection, ids)
        record = replace(record, key=counter.number(record.key))
        if index >= selection.offset:
            yield record


def read_record(line: Line, index: int, selection: InputSelection, ids: IdPlan) -> PromptRecord | RecordError:
    """One line as a prompt record or as an error record."""
    key = RecordKey(index, generated_id(ids.prefix, index), str(selection.path), line.number, line.byte_offset, has_own_id=False)
    try:
        fields = parse_record(line)
        key = _with_own_id(key, fields)
        text, messages = read_prompt(fields, selection.input_format)
        return PromptRecord(key, raw_excerpt(line), text, messages, read_options(fields))
    except RecursionError:
        return RecordError(key, "invalid_json", "not usable JSON: nested too deeply", raw_excerpt(line), line.byte_offset)
    except RecordFault as fault:
        offset = line.byte_offset if fault.byte_offset is None else fault.byte_offset
        return RecordError(key, fault.code, fault.message, raw_excerpt(line), offset)


def read_prompt(fields: Mapping[str, Any], input_format: str) -> tuple[str | None, tuple[Mapping[str, Any], ...] | None]:
    """(text, None) or (None, messages). Raises RecordFault."""
    names = ("prompt", "messages") if input_format == "auto" else (input_format,)
    filled = [name for name in names if fields.get(name) is not None]
    if len(filled) == 2:
        raise RecordFault("ambiguous", "both `prompt` and `messages` are there; --input-format says which one counts")
    if not filled:
        raise _nothing_to_read(fields, names)
    value = fields[filled[0]]
    if filled[0] == "prompt":
        return _read_text(value), None
    return None, _read_messages(value)


def _nothing_to_read(fields: Mapping[str, Any], names: tuple[str, ...]) -> RecordFault:
    wanted = " or ".join(f"`{name}`" for name in names)
    empty = [name for name in names if name in fields]
    if empty:
        return RecordFault("bad_type", f"`{empty[0]}` is null")
    there = ", ".join(f"`{str(name)[:40]}`" for name in list(fields)[:12]) or "none"
    return RecordFault("missing_prompt", f"no {wanted}; the keys there are: {there}")


def _with_own_id(key: RecordKey, fields: Mapping[str, Any]) -> RecordKey:
    value = fields.get("id")
    if value is None or value == "":
        return key
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RecordFault("bad_type", "the id is not a finite number") from None
    _check_unicode(text, "the id")
    return replace(key, id_json=text, has_own_id=True)


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise RecordFault("bad_type", f"`prompt` must be a string, not {describe_type(value)}")
    _check_unicode(value, "the prompt")
    if is_blank(value):
        raise RecordFault("empty_prompt", "empty prompt")
    return value


def _read_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise RecordFault("bad_type", f"`messages` must be an array, not {describe_type(value)}")
    if not value:
        raise RecordFault("empty_prompt", "empty prompt: `messages` has no message")
    messages = tuple(_read_message(message, number) for number, message in enumerate(value, start=1))
    last = messages[-1]["role"]
    if last not in ROLES_THAT_ASK:
        raise RecordFault("unsupported", f"the last message has the role {last}: there is nothing to answer")
    return messages


def _read_message(message: Any, number: int) -> Mapping[str, Any]:
    where = f"message {number}"
    if not isinstance(message, dict):
        raise RecordFault("bad_type", f"{where} must be an object, not {describe_type(message)}")
    refuse_repeated_key(message)
    role = message.get("role")
    if not isinstance(role, str):
        raise RecordFault("bad_type", f"{where}: `role` must be a string, not {describe_type(role)}")
    if role not in ROLES:
        raise RecordFault("bad_type", f"{where}: role `{role[:40]}` is none of {', '.join(ROLES)}")
    content = _read_content(message, where)
    if role == "user" and is_blank(content or ""):
        raise RecordFault("empty_prompt", f"empty prompt: {where} has no text")
    for name, item in message.items():
        if name != "content":
            _check_unicode(json.dumps(item, ensure_ascii=False), f"`{name[:40]}` of {where}")
    return {**message, "content": content}


def _read_content(message: Mapping[str, Any], where: str) -> str | None:
    """A string as it is; text parts joined in order with nothing between; None only beside tool calls."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, list):
        content = "".join(_read_part(part, where) for part in content)
    if not isinstance(content, str):
        state = f"must be a string, not {describe_type(content)}" if "content" in message else "is missing"
        raise RecordFault("bad_type", f"{where}: `content` {state}")
    _check_unicode(content, where)
    return content


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise RecordFault("bad_type", f"{where}: a part of `content` must be an object with a `type`")
    if kind != "text":
        raise RecordFault("unsupported", f"{where}: content of type `{kind[:40]}` is not supported, only text is")
    if not isinstance(part.get("text"), str):
        raise RecordFault("bad_type", f"{where}: the `text` of a part must be a string, not {describe_type(part.get('text'))}")
    return part["text"]


def is_blank(text: str) -> bool:
    """Nothing to be seen: white space and zero-width characters alone."""
    return not text.strip().strip(INVISIBLE).strip()


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordFault("encoding", f"{what} is not valid Unicode: a lone surrogate \\u{ord(text[error.start]):04x}") from None
