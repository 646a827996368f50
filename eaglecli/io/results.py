"""Results to files: a thread writes each line as its request finishes; at the end the lines are put in input order."""

import json
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import AnswerCounts, describe_answer
from eaglecli.io.line_file import KeptLines, LineFile
from eaglecli.io.logprob_fields import AnswerLogprobs, TokenTexts, logprob_fields
from eaglecli.io.records import RecordError, RecordKey
from eaglecli.io.run_directory import ERRORS, GENERATIONS
from eaglecli.io.stop_strings import answer_text

WINDOW = 4096
_ENCODER = json.JSONEncoder(ensure_ascii=False)  # making one costs more than using it


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


@dataclass(frozen=True)
class Answer:
    """One finished request as it goes to generations.jsonl."""

    key: RecordKey
    token_ids: np.ndarray  # int32 [completion_len], the end token included
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # the stop id or stop string that ended it
    num_prompt_tokens: int
    counts: AnswerCounts
    seed: int
    sample: int
    queue_s: float
    ttft_s: float
    e2e_s: float
    turns: tuple[TurnAnswer, ...] = ()  # of a conversation of several turns: `token_ids` holds those of all, the rest is of the last
    logprobs: AnswerLogprobs | None = None  # of `token_ids`


class ResultWriter:
    """Writes answers and errors from a thread of its own. `put` blocks only when thousands of results wait."""

    def __init__(
        self,
        folder: Path,
        decoder: Decoder | None,
        num_steps: int | None,
        kept_answers: KeptLines | None = None,
        kept_errors: KeptLines | None = None,
    ) -> None:
        """`decoder` may be None only when no answer will come; `num_steps` None means plain decoding: `spec` is null.

        The kept lines are those of an earlier run that is taken up again. Raises UserError when the files cannot be opened.
        """
        try:
            self._generations = LineFile(folder / GENERATIONS, kept_answers)
            self._errors = LineFile(folder / ERRORS, kept_errors)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"--output {folder} cannot be written: {reason}", "name another directory with -o") from error
        self._decoder = decoder
        self._token_texts = TokenTexts(lambda token: decoder.decode_token(token))  # type: ignore[union-attr]
        self._num_steps = num_steps
        self._queue: queue.Queue[Answer | RecordError | None] = queue.Queue(WINDOW)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, name="eaglecli-writer", daemon=True)
        self._thread.start()

    def put(self, result: Answer | RecordError) -> None:
        """Hands one result over. Raises UserError if an earlier one could not be written."""
        self._raise_failure()
        self._queue.put(result)

    def close(self, ordered: bool) -> None:
        """Waits until everything is written, then puts the files in order. Raises UserError.

        May be called again after a call that a signal cut short.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        try:
            for file in (self._generations, self._errors):
                file.close(ordered and self._failure is None)
        except OSError as error:
            self._failure = self._failure or error
        self._raise_failure()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, OSError):
            reason = self._failure.strerror or str(self._failure)
            raise UserError(
                f"the results cannot be written any more: {reason}", "free some space; finished lines are kept", ExitCode.INTERNAL
            ) from self._failure
        if self._failure is not None:
            raise self._failure

    def _write_all(self) -> None:
        while (result := self._queue.get()) is not None:
            if self._failure is not None:
                continue  # drained, so that nobody waits for a writer that cannot write
            try:
                self._write(result)
            except BaseException as error:  # kept: the next `put` raises it
                self._failure = error

    def _write(self, result: Answer | RecordError) -> None:
        if isinstance(result, RecordError):
            self._errors.append(result.key.index, result.sample or 0, _json_line(result.key, error_fields(result)))
        else:
            last = result.turns[-1].token_ids if result.turns else result.token_ids
            text = answer_text(self._decoder.decode, last, result.stop_reason)  # type: ignore[union-attr]
            line = _json_line(result.key, self._answer_fields(result, text))
            if result.key.input_json is not None:
                line = f'{line[:-1]}, "input": {result.key.input_json}}}'
            self._generations.append(result.key.index, result.sample, line)

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
            "spec": None if self._num_steps is None else describe_answer(answer.counts, self._num_steps),
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
