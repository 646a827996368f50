"""OpenAI batch lines: `custom_id`, `method` POST, `url`, `body` for chat and completions. Parameters hold for their line alone.

A parameter that is not done here is refused by name unless its value asks for nothing. `model` is not compared with the target.
"""

from collections.abc import Mapping
from typing import Any

from eaglecli.io.chat_messages import read_messages, read_text
from eaglecli.io.json_record import describe_type, refuse_repeated_key
from eaglecli.io.record_shapes import Fields, PromptContent, read_token_ids
from eaglecli.io.records import RecordFault
from eaglecli.io.sampling_options import RECORD_CHECKS, option_name, read_options

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_TEMPERATURE = 2.0
MARKING_FIELDS = ("custom_id", "method", "url", "body")
WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}


def is_batch_line(fields: Fields) -> bool:
    """Whether the record has the shape of a batch line, be it a bad one."""
    return "body" in fields and any(name in fields for name in ("custom_id", "method", "url"))


def read_batch_line(fields: Fields, allow_blank: bool) -> PromptContent:
    """The prompt of a line, with the options of its body. Raises RecordFault."""
    identity, method, url, body = (fields.get(name) for name in MARKING_FIELDS)
    if not isinstance(identity, str) or not identity:
        raise RecordFault("bad_type", f"`custom_id` must be a string that is not empty, not {describe_type(identity)}")
    if method != "POST":
        raise RecordFault("unsupported", f"`method` must be POST, not {str(method)[:40]}")
    if url not in (CHAT, COMPLETIONS):
        raise RecordFault("unsupported", f"`url` must be {CHAT} or {COMPLETIONS}, not {str(url)[:80]}")
    if not isinstance(body, dict):
        raise RecordFault("bad_type", f"`body` must be an object, not {describe_type(body)}")
    refuse_repeated_key(body)
    field = "messages" if url == CHAT else "prompt"
    if body.get(field) is None:
        there = ", ".join(f"`{str(name)[:40]}`" for name in list(body)[:12]) or "none"
        raise RecordFault("missing_prompt", f"`body` has no `{field}`; the keys there are: {there}")
    options = _read_body_options({name: value for name, value in body.items() if name != field}, is_chat=url == CHAT)
    if url == CHAT:
        return PromptContent(messages=read_messages(body[field], allow_blank), options=options)
    return _read_completion_prompt(body[field], options, allow_blank)


def _read_completion_prompt(value: Any, options: Mapping[str, Any], allow_blank: bool) -> PromptContent:
    if isinstance(value, list) and value and isinstance(value[0], int):
        return PromptContent(token_ids=read_token_ids(value, "prompt"), options=options)
    if isinstance(value, list) and len(value) != 1 and any(isinstance(item, str) for item in value):
        raise RecordFault("unsupported", f"{len(value)} prompts in one line are not supported: give each a line of its own")
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    return PromptContent(text=read_text(text, "prompt", allow_blank), is_raw=True, options=options)


def _read_body_options(body: Fields, is_chat: bool) -> dict[str, Any]:
    asked = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT and not _is_idle(name, value)}
    wants_no_logprobs = asked.get("logprobs") is False
    if wants_no_logprobs:
        del asked["logprobs"]
    if is_chat:
        asked = _with_chat_logprobs(asked)
    unknown = next((name for name in asked if option_name(name) not in RECORD_CHECKS and name != "max_completion_tokens"), None)
    if unknown is not None:
        raise RecordFault("unsupported", f"`{str(unknown)[:40]}` is not supported")
    options = read_options({"max_new_tokens" if name == "max_completion_tokens" else name: value for name, value in asked.items()})
    if wants_no_logprobs:
        options["logprobs"] = None  # said, not left out: it stands against a flag
    if options.get("temperature", 0) > MAX_TEMPERATURE:
        raise RecordFault("bad_option", f"`temperature` must be a number from 0 up to {MAX_TEMPERATURE:g}, not {options['temperature']:g}")
    return options


def _with_chat_logprobs(asked: dict[str, Any]) -> dict[str, Any]:
    """Chat asks by `logprobs` true and the number `top_logprobs`; elsewhere `logprobs` is the number. Raises RecordFault."""
    wanted, number = asked.pop("logprobs", False), asked.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RecordFault("bad_option", f"`logprobs` must be true or false, not {str(wanted)[:40]}")
    if number and not wanted:
        raise RecordFault("bad_option", "`top_logprobs` needs `logprobs` true")
    return {**asked, "logprobs": number} if wanted else asked


def _is_idle(name: str, value: Any) -> bool:
    return any(value == nothing and type(value) is type(nothing) for nothing in ASKS_FOR_NOTHING.get(name, ()))
