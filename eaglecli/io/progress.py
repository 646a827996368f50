"""Progress on standard error: a moving bar on a terminal, one plain line now and then elsewhere."""

import sys
import time
from typing import Any, TextIO

from eaglecli.io.console import Console

PLAIN_INTERVAL_S = 10.0


class Progress:
    """Counts finished records and shows them with tokens per second and the accept length so far."""

    def __init__(self, console: Console, mode: str, total: int, already_done: int = 0) -> None:
        """`mode`: auto, bar, plain or none."""
        self._console = console
        self._total, self._done, self._num_tokens = total, already_done, 0
        self._accept_length: float | None = None
        self._start = self._last_line = time.perf_counter()
        stream = console.stream or sys.stderr
        mode = ("bar" if stream.isatty() else "plain") if mode == "auto" else mode
        self._mode = "none" if console.quiet else mode
        self._bar = _open_bar(stream, total, already_done) if self._mode == "bar" else None
        if self._bar is not None:
            console.print_line = lambda line, target: self._bar.write(line, file=target)

    def record_done(self, num_tokens: int, accept_length: float | None) -> None:
        """One record finished, well (its tokens) or badly (0 tokens)."""
        self._done += 1
        self._num_tokens += num_tokens
        self._accept_length = accept_length
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix_str(self._rates(), refresh=False)
        elif self._mode == "plain" and time.perf_counter() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.perf_counter()
            self._console.note(f"{self._done}/{self._total} records, {self._rates()}")

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
            self._console.print_line = None

    def _rates(self) -> str:
        rate = self._num_tokens / max(time.perf_counter() - self._start, 1e-9)
        return f"{rate:.1f} token/s" + (f", accept length {self._accept_length:.2f}" if self._accept_length else "")


def _open_bar(stream: TextIO, total: int, already_done: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=already_done, file=stream, unit="record", dynamic_ncols=True, leave=True)
