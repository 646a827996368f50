"""Results to lines: an answer or an error as the JSON of its line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from eaglecli.io.accept_statistics import AnswerCounts, describe_answer
from eaglecli.io.logprob_fields import AnswerLogprobs, TokenTexts, logprob_fields
from eaglecli.io.records import RecordError, RecordKey
from eaglecli.io.stop_strings import answer_text

_ENCODER = json.JSONEncoder(ensure_ascii=False)  # making one costs more than using it
_LINE_SEPARATORS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\u0085": "\\u0085"})


class Decoder(Protocol):
    """What turns token ids into text."""

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of int32 [n] ids."""
        ...

    def decode_token(self, token_id: int) -> str:
        """Text of one token alone, control tokens included."""
        ...


@dataclass(frozen=True, eq=False)
class TurnAnswer:
    """The answer to one turn of several."""

    token_ids: np.ndarray
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # the stop id or stop string that ended it
    num_prompt_tokens: int


@dataclass(eq=False)  # not frozen: one is made a record, and freezing so many fields takes longer than filling them
class Answer:
    """One finished request as it goes to generations.jsonl."""

    key: RecordKey
    token_ids: np.ndarray  # int32 [completion_len], the end token included
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # the stop id or stop string that ended it
    num_prompt_tokens: int
    counts: AnswerCounts | None  # None with plain decoding
    seed: int
    sample: int
    queue_s: float
    ttft_s: float
    e2e_s: float
    turns: tuple[TurnAnswer, ...] = ()  # of a conversation of several turns: `token_ids` holds those of all, the rest is of the last
    logprobs: AnswerLogprobs | None = None  # of `token_ids`


class LineMaker:
    """Makes lines of results. It knows no file, so it can work in another process."""

    def __init__(self, decoder: Decoder | None, num_steps: int | None) -> None:
        """`decoder` may be None only when no answer will come; `num_steps` None means plain decoding: `spec` is null."""
        self._decoder, self._num_steps = decoder, num_steps
        self._token_texts = TokenTexts(lambda token: decoder.decode_token(token))  # type: ignore[union-attr]

    def lines(self, results: Sequence[Answer | RecordError]) -> list[bytes]:
        """The line of each, without its newline."""
        return [self._line(result).translate(_LINE_SEPARATORS).encode("utf-8") for result in results]

    def _line(self, result: Answer | RecordError) -> str:
        if isinstance(result, RecordError):
            return _json_line(result.key, error_fields(result))
        last = result.turns[-1].token_ids if result.turns else result.token_ids
        text = answer_text(self._decoder.decode, last, result.stop_reason)  # type: ignore[union-attr]
        line = _json_line(result.key, self._answer_fields(result, text))
        if result.key.input_json is None:
            return line
        return f'{line[:-1]}, "input": {result.key.input_json}}}'

    def _answer_fields(self, answer: Answer, text: str) -> dict[str, Any]:
        usage = {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": len(answer.token_ids)}
        if answer.key.num_cut_prompt_tokens:
            usage["cut_prompt_tokens"] = answer.key.num_cut_prompt_tokens
        return {
            "index": answer.key.index,
            "file": answer.key.file,
            "line": answer.key.line,
            "sample": answer.sample,
            "text": text,
            "token_ids": answer.token_ids.tolist(),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **self._logprob_fields(answer),
            "usage": usage,
            "spec": None if self._num_steps is None or answer.counts is None else describe_answer(answer.counts, self._num_steps),
            "seed": answer.seed,
            "timing": {"queue_s": answer.queue_s, "ttft_s": answer.ttft_s, "e2e_s": answer.e2e_s},
            **({"turns": [self._turn_fields(turn) for turn in answer.turns]} if answer.turns else {}),
            **({"url": answer.key.url} if answer.key.url else {}),
        }

    def _logprob_fields(self, answer: Answer) -> dict[str, Any]:
        return {} if answer.logprobs is None else {"logprobs": logprob_fields(answer.token_ids, answer.logprobs, self._token_texts)}

    def _turn_fields(self, turn: TurnAnswer) -> dict[str, Any]:
        return {
            "text": answer_text(self._decoder.decode, turn.token_ids, turn.stop_reason),  # type: ignore[union-attr]
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop_reason,
            "usage": {"prompt_tokens": turn.num_prompt_tokens, "completion_tokens": len(turn.token_ids)},
        }


def error_fields(error: RecordError) -> dict[str, Any]:
    """The fields of an error line after its id."""
    key = error.key
    return {
        "index": key.index,
        "file": key.file,
        "line": key.line,
        "byte_offset": key.byte_offset if error.byte_offset is None else error.byte_offset,
        "code": error.code,
        "message": error.message,
        "raw": error.raw,
        **({"skipped": True} if error.is_skipped else {}),
        **({} if error.sample is None else {"sample": error.sample}),
    }


def _json_line(key: RecordKey, fields: dict[str, Any]) -> str:
    """The id goes in as the text it came as, so that no number is rounded."""
    return f'{{"id": {key.id_json}, {_ENCODER.encode(fields)[1:]}'
