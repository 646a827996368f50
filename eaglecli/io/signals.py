"""The first SIGINT or SIGTERM ends a run in order, the second one at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from eaglecli.errors import ExitCode

EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class Interrupted(BaseException):
    """Raised in the main thread by the first signal. No Exception, so that nothing on the way swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = EXIT_CODES[signal.Signals(signal_number)]


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first signal raises Interrupted and hands later ones to the system's own handling. Main thread only."""

    def interrupt(signal_number: int, _: FrameType | None) -> None:
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_DFL)
        raise Interrupted(signal_number)

    before = {number: signal.signal(number, interrupt) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
