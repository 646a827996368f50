"""The checks that make a list of messages a conversation which can be rendered and answered."""

import json
from collections.abc import Mapping
from typing import Any

from eaglecli.io.json_record import describe_type, refuse_repeated_key
from eaglecli.io.records import RecordFault

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROLES_THAT_ASK = ("user", "tool", "function")
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"

Message = Mapping[str, Any]


def read_messages(value: Any, allow_blank: bool = False) -> tuple[Message, ...]:
    """Checked messages whose contents are strings. Raises RecordFault."""
    if not isinstance(value, list):
        raise RecordFault("bad_type", f"`messages` must be an array, not {describe_type(value)}")
    if not value:
        raise RecordFault("empty_prompt", "empty prompt: `messages` has no message")
    messages = tuple(_read_message(message, number, allow_blank) for number, message in enumerate(value, start=1))
    last = messages[-1]["role"]
    if last not in ROLES_THAT_ASK:
        raise RecordFault("unsupported", f"the last message has the role {last}: there is nothing to answer")
    return messages


def read_text(value: Any, name: str, allow_blank: bool = False) -> str:
    """A prompt's text, unchanged. Raises RecordFault when it is no string, no Unicode, or blank."""
    if not isinstance(value, str):
        raise RecordFault("bad_type", f"`{name}` must be a string, not {describe_type(value)}")
    check_unicode(value, f"`{name}`" if name != "prompt" else "the prompt")
    if not allow_blank and is_blank(value):
        raise RecordFault("empty_prompt", "empty prompt" if name == "prompt" else f"empty prompt: `{name}` has no text")
    return value


def is_blank(text: str) -> bool:
    """Nothing to be seen: white space and zero-width characters alone."""
    return not text.strip().strip(INVISIBLE).strip()


def check_unicode(text: str, what: str) -> None:
    """Raises RecordFault for half of a surrogate pair, which no file and no tokenizer can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordFault("encoding", f"{what} is not valid Unicode: a lone surrogate \\u{ord(text[error.start]):04x}") from None


def _read_message(message: Any, number: int, allow_blank: bool) -> Message:
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
    if role == "user" and not allow_blank and is_blank(content or ""):
        raise RecordFault("empty_prompt", f"empty prompt: {where} has no text")
    for name, item in message.items():
        if name != "content":
            check_unicode(json.dumps(item, ensure_ascii=False, default=str), f"`{name[:40]}` of {where}")
    return {**message, "content": content}


def _read_content(message: Message, where: str) -> str | None:
    """A string as it is; text parts joined in order with nothing between; None only beside tool calls."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, list):
        content = "".join(_read_part(part, where) for part in content)
    if not isinstance(content, str):
        state = f"must be a string, not {describe_type(content)}" if "content" in message else "is missing"
        raise RecordFault("bad_type", f"{where}: `content` {state}")
    check_unicode(content, where)
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
