"""Runs an iterator in a thread, a bounded number of items ahead of its consumer, so that reading never holds up the engine."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

WINDOW = 4096
POLL_S = 0.1
READY_POLL_S = 0.001
CLOSE_TIMEOUT_S = 2.0  # a thread that waits for a pipe is left behind: an interrupted run has to end within five seconds

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates over `source` from another thread. An exception of the source is raised where its item would have come."""

    def __init__(self, source: Iterator[Item], window: int = WINDOW) -> None:
        self._queue: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(window)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), name="eaglecli-reader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        while True:
            kind, item = self._queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise item  # type: ignore[misc]
            yield item  # type: ignore[misc]

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Whether the next item, or the end, is there already or comes within `wait_s`."""
        end = time.monotonic() + wait_s
        while self._queue.empty():
            if time.monotonic() >= end:
                return False
            time.sleep(READY_POLL_S)
        return True

    def close(self) -> None:
        """Stops the thread; items read ahead are dropped."""
        self._stopped.set()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _fill(self, source: Iterator[Item]) -> None:
        try:
            for item in source:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # handed over: the consumer raises it
            self._put(("error", error))

    def _put(self, entry: tuple[str, Item | BaseException | None]) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(entry, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False
