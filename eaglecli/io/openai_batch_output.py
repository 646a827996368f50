"""Results as the lines of OpenAI's batch API: answers in one file, failed requests in another (OpenAI, Batch guide)."""

import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eaglecli.io.line_file import read_in_order, replace_with
from eaglecli.io.logprob_fields import chat_logprobs, completion_logprobs
from eaglecli.io.run_directory import BATCH_ERRORS, BATCH_OUTPUT, ERRORS, GENERATIONS

COMPLETIONS_URL = "/v1/completions"


def write_openai_batch(folder: Path, model: str) -> None:
    """Both files, in input order. Samples of one record become the choices of one answer. Raises OSError.

    Each request is in one of the files: one of which a sample failed has failed, its other samples are in generations.jsonl.
    """
    created = int(time.time())
    failed = {_index(line) for line in read_in_order(folder / ERRORS)}
    answers = (
        _answer(list(group), model, created)
        for index, group in itertools.groupby(read_in_order(folder / GENERATIONS), _index)
        if index not in failed
    )
    failures = (_failure(next(group)) for _, group in itertools.groupby(read_in_order(folder / ERRORS), _index))
    replace_with(folder / BATCH_OUTPUT, _lines(answers))
    replace_with(folder / BATCH_ERRORS, _lines(failures))


def _index(line: Mapping[str, Any]) -> int:
    return line["index"]


def _lines(documents: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    return (json.dumps(document, ensure_ascii=False).encode("utf-8") + b"\n" for document in documents)


def _answer(samples: list[dict[str, Any]], model: str, created: int) -> dict[str, Any]:
    first, name = samples[0], _request_name(samples[0])
    is_chat = first.get("url") != COMPLETIONS_URL
    prompt_tokens = first["usage"]["prompt_tokens"]
    completion_tokens = sum(line["usage"]["completion_tokens"] for line in samples)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(line, is_chat) for line in samples],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": _custom_id(first), "response": response, "error": None}


def _choice(line: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": line["text"], "refusal": None}} if is_chat else {"text": line["text"]}
    fields = line.get("logprobs")
    logprobs = None if fields is None else chat_logprobs(fields) if is_chat else completion_logprobs(fields)
    return {"index": line["sample"], **said, "logprobs": logprobs, "finish_reason": line["finish_reason"]}


def _failure(line: Mapping[str, Any]) -> dict[str, Any]:
    error = {"code": line["code"], "message": line["message"]}
    return {"id": f"batch_req_{_request_name(line)}", "custom_id": _custom_id(line), "response": None, "error": error}


def _custom_id(line: Mapping[str, Any]) -> str:
    """The API knows strings alone: any other id is given as its JSON text."""
    return line["id"] if isinstance(line["id"], str) else json.dumps(line["id"], ensure_ascii=False)


def _request_name(line: Mapping[str, Any]) -> str:
    """The same for the same record, whenever the file is made."""
    return hashlib.blake2b(f"{line['index']} {_custom_id(line)}".encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()
