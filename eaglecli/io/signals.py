"""The first SIGINT or SIGTERM ends a run in order, the second one at once."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from eaglecli.errors import ExitCode

EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class Interrupted(BaseException):
    """Raised in the main thread by the first signal. No Exception, so that little on the way swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = EXIT_CODES[signal.Signals(signal_number)]
        self.is_taken = False

    def take(self) -> ExitCode:
        """For who catches it inside the block: it is not raised again at the end. Returns the exit code."""
        self.is_taken = True
        return self.exit_code


class FirstSignal:
    """Of an `interruptible` block."""

    def __init__(self) -> None:
        self._raised: Interrupted | None = None

    def interrupt(self, signal_number: int) -> None:
        """Raises Interrupted."""
        self._raised = Interrupted(signal_number)
        raise self._raised

    def check(self) -> None:
        """Raises again what was swallowed on its way: for what is about to take long, and for who holds another exception."""
        if self._raised is not None and not self._raised.is_taken:
            raise self._raised


@contextmanager
def interruptible() -> Iterator[FirstSignal]:
    """Inside, the first signal raises Interrupted and hands later ones to the system's own handling. Main thread only.

    Imports and C extensions swallow it, or make another exception of it: one that nobody took is raised by the block's next
    `check`, at the latest where it ends.
    """
    first = FirstSignal()
    with _first_signal_to(first.interrupt):
        try:
            yield first
        except Interrupted:
            raise
        except BaseException:
            first.check()
            raise
        first.check()


@contextmanager
def ending_at_once(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first signal is told with `say` and ends the process: no exception that an import could swallow. Main thread only."""

    def end(signal_number: int) -> None:
        with suppress(RuntimeError, OSError):  # it came in the middle of a write
            say(f"{signal.Signals(signal_number).name}: stopped at once; whatever was written is kept")
        for stream in (sys.stdout, sys.stderr):
            with suppress(RuntimeError, OSError, ValueError, AttributeError):  # likewise, or closed, or none from the start
                stream.flush()
        os._exit(EXIT_CODES[signal.Signals(signal_number)])

    with _first_signal_to(end):
        yield


@contextmanager
def _first_signal_to(handle: Callable[[int], None]) -> Iterator[None]:
    def handle_first(signal_number: int, _: FrameType | None) -> None:
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_DFL)
        handle(signal_number)

    before = {number: signal.signal(number, handle_first) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
