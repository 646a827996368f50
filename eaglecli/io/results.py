"""Results to files: a thread writes each line as its request finishes; at the end the lines are put in input order.

A line is written whole and flushed, so an interrupted run leaves whole lines. Putting in order is a copy and an atomic rename.
"""

import json
import os
import queue
import threading
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import AnswerCounts, describe_answer
from eaglecli.io.records import RecordError, RecordKey
from eaglecli.io.run_directory import ERRORS, GENERATIONS

WINDOW = 4096
LINE_SEPARATORS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\u0085": "\\u0085"})


class Decoder(Protocol):
    """What turns token ids into text."""

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of int32 [n] ids."""
        ...


@dataclass(frozen=True)
class Answer:
    """One finished request as it goes to generations.jsonl."""

    key: RecordKey
    token_ids: np.ndarray  # int32 [completion_len], the end token included
    finish_reason: Literal["stop", "length"]
    stop_token_id: int | None
    num_prompt_tokens: int
    counts: AnswerCounts
    seed: int
    sample: int
    queue_s: float
    ttft_s: float
    e2e_s: float


class LineFile:
    """A JSON-lines file that is appended to and remembers where each record's line lies (24 bytes a line)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: BinaryIO = path.open("wb")
        self._places = array("q")  # index, sample, length of each line, in file order

    def append(self, index: int, sample: int, line: str) -> None:
        """Writes one line, given without its newline, and hands it to the system: a killed run keeps it."""
        data = line.translate(LINE_SEPARATORS).encode("utf-8") + b"\n"
        self._stream.write(data)
        self._stream.flush()
        self._places.extend((index, sample, len(data)))

    def close(self, ordered: bool) -> None:
        """Flushes to disk; with `ordered` the lines are put in the order of (index, sample)."""
        os.fsync(self._stream.fileno())
        self._stream.close()
        places = np.frombuffer(self._places, dtype=np.int64).reshape(-1, 3)
        order = np.lexsort((places[:, 1], places[:, 0]))
        if ordered and not np.array_equal(order, np.arange(len(order))):
            self._rewrite(places[:, 2], order)

    def _rewrite(self, lengths: np.ndarray, order: np.ndarray) -> None:
        starts = np.cumsum(lengths) - lengths
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self.path.open("rb") as source, temporary.open("wb") as sorted_file:
            for line in order:
                source.seek(int(starts[line]))
                sorted_file.write(source.read(int(lengths[line])))
            sorted_file.flush()
            os.fsync(sorted_file.fileno())
        os.replace(temporary, self.path)


class ResultWriter:
    """Writes answers and errors from a thread of its own. `put` blocks only when thousands of results wait."""

    def __init__(self, folder: Path, decoder: Decoder | None, num_steps: int | None) -> None:
        """`decoder` may be None only when no answer will come; `num_steps` None means plain decoding: `spec` is null."""
        self._generations = LineFile(folder / GENERATIONS)
        self._errors = LineFile(folder / ERRORS)
        self._decoder = decoder
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
        """Waits until everything is written, then puts the files in order. Raises UserError."""
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
            self._errors.append(result.key.index, 0, _json_line(result.key, error_fields(result)))
        else:
            text = self._decoder.decode(self._text_ids(result))  # type: ignore[union-attr]
            self._generations.append(result.key.index, result.sample, _json_line(result.key, self._answer_fields(result, text)))

    @staticmethod
    def _text_ids(answer: Answer) -> np.ndarray:
        """Without the token that ended the answer, special or not."""
        ends = answer.finish_reason == "stop" and len(answer.token_ids) and answer.token_ids[-1] == answer.stop_token_id
        return answer.token_ids[:-1] if ends else answer.token_ids

    def _answer_fields(self, answer: Answer, text: str) -> dict[str, Any]:
        return {
            "index": answer.key.index,
            "file": answer.key.file,
            "line": answer.key.line,
            "sample": answer.sample,
            "text": text,
            "token_ids": answer.token_ids.tolist(),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_token_id,
            "usage": {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": len(answer.token_ids)},
            "spec": None if self._num_steps is None else describe_answer(answer.counts, self._num_steps),
            "seed": answer.seed,
            "timing": {"queue_s": answer.queue_s, "ttft_s": answer.ttft_s, "e2e_s": answer.e2e_s},
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
    }


def _json_line(key: RecordKey, fields: dict[str, Any]) -> str:
    """The id goes in as the text it came as, so that no number is rounded."""
    return f'{{"id": {key.id_json}, {json.dumps(fields, ensure_ascii=False)[1:]}'
