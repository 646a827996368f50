"""What people read: notes, warnings and errors on standard error, and the same lines in log files.

Nothing that happens to a message may end a run: a reader that left or a log on a full disk is written to no more.
"""

import sys
import traceback
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

HIDDEN_CATEGORIES = ("Cc", "Cf", "Zl", "Zp", "Cs")  # control, format (bidi overrides), separators, surrogates


@dataclass
class Console:
    """Writes to `stream` (standard error unless told otherwise), to `log_file` from the start, and to a run's log once attached."""

    quiet: bool = False
    color: bool = False
    moves: bool = False  # whether a line may be written over, as a progress bar does
    debug: bool = False
    verbose: bool = False
    stream: TextIO | None = None
    log_file: TextIO | None = None
    print_line: Callable[[str, TextIO], None] | None = None  # set by a progress bar, which must step aside for a line
    _log: TextIO | None = None
    _backlog: list[str] = field(default_factory=list)  # lines said before there was a run's log
    _lost: set[int] = field(default_factory=set)  # streams that cannot be written to any more

    def attach_log(self, log: TextIO | None) -> None:
        """From here on every line also goes to `log`, and so do those said before. None detaches."""
        self._log = log
        if log is not None:
            for line in self._backlog:
                self._put(line, log)
            self._backlog.clear()

    def note(self, message: str) -> None:
        """Something good to know; silent with --quiet."""
        self._write(message, show=not self.quiet)

    def detail(self, message: str) -> None:
        """What only --verbose shows; the log always has it."""
        self._write(message, show=self.verbose and not self.quiet)

    def warning(self, message: str) -> None:
        """Something that may not be what the user wanted."""
        self._write(message, "warning", "33")

    def error(self, message: str, hint: str = "") -> None:
        """Why the command stops, and what to do."""
        self._write(message, "error", "31")
        if hint:
            self._write(hint, "hint", "36")

    def trace(self, error: BaseException) -> None:
        """The traceback: always to the log, to the screen only with --debug."""
        for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
            self._write(line, show=self.debug)

    def _write(self, message: str, label: str = "", style: str = "", show: bool = True) -> None:
        text = visible(message)
        prefix = f"{label}: " if label else ""
        if show:
            colored = f"\x1b[{style};1m{prefix}\x1b[0m" if prefix and self.color else prefix
            self._put(f"{colored}{text}", self.stream or sys.stderr, self.print_line)
        if self.log_file is not None:
            self._put(prefix + text, self.log_file)
        if self._log is not None:
            self._put(prefix + text, self._log)
        else:
            self._backlog.append(prefix + text)

    def _put(self, line: str, stream: TextIO | None, print_line: Callable[[str, TextIO], None] | None = None) -> None:
        if stream is None or id(stream) in self._lost:  # None: the program was started with standard error closed
            return
        try:
            (print_line or _print_line)(line, stream)
        except (OSError, ValueError):  # a closed pipe, a full disk, a stream that was closed
            self._lost.add(id(stream))


def _print_line(line: str, stream: TextIO) -> None:
    stream.write(line + "\n")  # in one piece: the progress thread prints too
    stream.flush()


def visible(text: str) -> str:
    """The text with control and direction characters spelled out: nothing from the data can steer a terminal."""
    return "".join(character if unicodedata.category(character) not in HIDDEN_CATEGORIES else _spelled(character) for character in text)


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
