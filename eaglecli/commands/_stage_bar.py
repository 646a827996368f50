"""Progress of one long stage with a known or unknown end: a bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

from eaglecli.io.console import Console

_PLAIN_INTERVAL_S = 10.0


class StageBar:
    """Use as a context manager. `mode`: auto, bar, plain or none."""

    def __init__(self, console: Console, mode: str, label: str, total: int | None, unit: str) -> None:
        self._console, self._label, self._total = console, label, total
        mode = ("bar" if console.moves else "plain") if mode == "auto" else mode
        self._mode = "none" if console.quiet else mode
        self._done, self._said_s, self._bar = 0, time.monotonic(), None
        if self._mode == "bar":
            self._bar = _open_bar(console, label, total, unit)

    def __enter__(self) -> "StageBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
            self._console.print_line = None

    def advance(self, count: int, text: str) -> None:
        """`count` more are done; `text` is what else there is to tell."""
        self._done += count
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            with contextlib.suppress(OSError):  # nobody looks any more: the run goes on
                self._bar.update(count)
        elif self._mode == "plain" and time.monotonic() - self._said_s >= _PLAIN_INTERVAL_S:
            self._said_s = time.monotonic()
            of = "" if self._total is None else f"/{self._total}"
            self._console.note(f"{self._label}: {self._done}{of}, {text}")


def _open_bar(console: Console, label: str, total: int | None, unit: str) -> Any:
    from tqdm import tqdm

    stream = console.stream or sys.stderr
    bar = tqdm(total=total, desc=label, file=stream, unit=unit, dynamic_ncols=True, leave=True)
    console.print_line = lambda line, target: bar.write(line, file=target)
    return bar
