"""Progress on standard error: a moving bar on a terminal, one plain line every few seconds elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from eaglecli.io.console import Console
from eaglecli.io.eta import EtaEstimator, Workload, clock

PLAIN_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.1
BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit}s [{elapsed}{postfix}]"


class Progress:
    """Counts finished records and shows them with tokens per second, the time that is left and the accept length so far."""

    def __init__(
        self,
        console: Console,
        mode: str,
        total: int,
        already_done: int = 0,
        interval_s: float = PLAIN_INTERVAL_S,
        look: Callable[[], Workload] | None = None,
        counted: str = "record",
    ) -> None:
        """`mode`: auto, bar, plain or none. A plain line comes every `interval_s`, whether a record finished meanwhile or not.

        `look` says where the run stands; it is called from another thread. None: nobody knows, the time left is not shown.
        `counted` names what the `total` counts.
        """
        self._console = console
        self._total, self._done, self._num_tokens = total, already_done, 0
        self._counted = counted
        self._accept_length: float | None = None
        self._start = self._shown_s = time.perf_counter()
        self._look, self._eta = look, EtaEstimator(self._start)
        self._stopped = threading.Event()
        mode = ("bar" if console.moves else "plain") if mode == "auto" else mode
        self._mode = "none" if console.quiet else mode
        self._bar = _open_bar(console.stream or sys.stderr, total, already_done, counted) if self._mode == "bar" else None
        if self._bar is not None:
            console.print_line = lambda line, target: self._bar.write(line, file=target)
        if self._mode == "plain":
            threading.Thread(target=self._say_now_and_then, args=(interval_s,), name="eaglecli-progress", daemon=True).start()

    def record_done(self, num_tokens: int, accept_length: float | None) -> None:
        """One record finished, well (its tokens) or badly (0 tokens)."""
        self._done += 1
        self._num_tokens += num_tokens
        self._accept_length = accept_length
        if self._bar is not None and time.perf_counter() - self._shown_s >= BAR_INTERVAL_S:
            self._show()

    def close(self) -> None:
        """Ends the bar or the lines."""
        self._stopped.set()
        if self._bar is not None:
            self._show()
            with contextlib.suppress(OSError):
                self._bar.close()
            self._bar = self._console.print_line = None

    def _show(self) -> None:
        self._shown_s = time.perf_counter()
        self._bar.set_postfix_str(self._rates(), refresh=False)
        with contextlib.suppress(OSError):  # nobody looks any more: the run goes on
            self._bar.update(self._done - self._bar.n)

    def _say_now_and_then(self, interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            self._console.note(f"{self._done}/{self._total} {self._counted}s, {self._rates()}")

    def _rates(self) -> str:
        now = time.perf_counter()
        work = Workload(num_output_tokens=self._num_tokens) if self._look is None else self._look()
        seconds_left = self._eta.seconds_left(work, now)
        parts = [f"{work.num_output_tokens / max(now - self._start, 1e-9):.1f} token/s"]
        if seconds_left is not None and self._done < self._total:
            parts.append(f"{clock(seconds_left)} left")
        if self._accept_length:
            parts.append(f"accept length {self._accept_length:.2f}")
        return ", ".join(parts)


def _open_bar(stream: TextIO, total: int, already_done: int, counted: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=already_done, file=stream, unit=counted, dynamic_ncols=True, leave=True, bar_format=BAR_FORMAT)
