"""Runs an iterator of blocks in a thread, a bounded number ahead of its consumer, so that reading never holds up the engine."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

POLL_S = 0.1
READY_POLL_S = 0.001
CLOSE_TIMEOUT_S = 2.0  # a thread that waits for a pipe is left behind: an interrupted run has to end within five seconds

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates over the items of the blocks of `source`. An exception of the source is raised where its block would have come."""

    def __init__(self, source: Iterator[Sequence[Item]], window: int) -> None:
        """`window`: so many blocks wait for their consumer."""
        self._queue: queue.Queue[Sequence[Item] | BaseException | None] = queue.Queue(window)
        self._block: deque[Item] = deque()  # what is left of the one that was taken last
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), name="eaglecli-reader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        while True:
            while self._block:
                yield self._block.popleft()
            block = self._queue.get()
            if block is None:
                return
            if isinstance(block, BaseException):
                raise block
            self._block.extend(block)

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Whether the next item, or the end, is there already or comes within `wait_s`."""
        if self._block:
            return True
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

    def _fill(self, source: Iterator[Sequence[Item]]) -> None:
        try:
            for block in source:
                if not self._put(block):
                    return
            self._put(None)
        except BaseException as error:  # handed over: the consumer raises it
            self._put(error)

    def _put(self, entry: Sequence[Item] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(entry, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False
