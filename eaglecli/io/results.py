"""Results to files: a thread writes each line as its request finishes; at the end the lines are put in input order."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eaglecli.errors import ExitCode, UserError
from eaglecli.io.line_file import KeptLines, LineFile
from eaglecli.io.records import RecordError
from eaglecli.io.result_lines import Answer
from eaglecli.io.run_directory import ERRORS, GENERATIONS

WINDOW = 4096
BLOCK = 32  # results that are written at a time: more would keep the interpreter from the engine for too long
GATHER_S = 0.02  # what comes so soon after a result is written with it

Result = Answer | RecordError
MakeLines = Callable[[Sequence[Result]], list[bytes]]


class ResultWriter:
    """Writes answers and errors from a thread of its own. `put` blocks only when thousands of results wait."""

    def __init__(
        self, folder: Path, make_lines: MakeLines, kept_answers: KeptLines | None = None, kept_errors: KeptLines | None = None
    ) -> None:
        """`make_lines`: see `LineMaker.lines`; called from the thread.

        The kept lines are those of an earlier run that is taken up again. Raises UserError when the files cannot be opened.
        """
        try:
            self._generations = LineFile(folder / GENERATIONS, kept_answers)
            self._errors = LineFile(folder / ERRORS, kept_errors)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"--output {folder} cannot be written: {reason}", "name another directory with -o") from error
        self._make_lines = make_lines
        self._queue: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, name="eaglecli-writer", daemon=True)
        self._thread.start()

    def put(self, result: Result) -> None:
        """Hands one result over. Raises UserError if an earlier one could not be written."""
        self._raise_failure()
        while self._queue.qsize() >= WINDOW:
            time.sleep(GATHER_S)
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
        is_open = True
        while is_open:
            block, is_open = self._next_block()
            if self._failure is not None:
                continue  # drained, so that nobody waits for a writer that cannot write
            try:
                if block:
                    self._write(block)
            except BaseException as error:  # kept: the next `put` raises it
                self._failure = error

    def _next_block(self) -> tuple[list[Result], bool]:
        """What waits, and whether more may come."""
        result, block = self._queue.get(), []
        if self._queue.qsize() < BLOCK:
            time.sleep(GATHER_S)
        while result is not None:
            block.append(result)
            if len(block) == BLOCK or self._queue.empty():
                return block, True
            result = self._queue.get()
        return block, False

    def _write(self, block: Sequence[Result]) -> None:
        lines = self._make_lines(block)
        answers, errors = [], []
        for result, line in zip(block, lines, strict=True):
            (errors if isinstance(result, RecordError) else answers).append((result.key.index, result.sample or 0, line))
        self._generations.append(answers)
        self._errors.append(errors)
