"""Ends that only the text shows: rows whose output is shown to a watch after each iteration, and cut where the watch says.

The device knows nothing of them: such a row runs on until the host has read its record, at most one iteration more, which
is dropped like that of any row which has ended. So the text cannot depend on how many tokens an iteration brings.
"""

import numpy as np

from eaglecli.engine.outputs import OutputBuffers
from eaglecli.engine.request import Request, StopWatch
from eaglecli.kernels.commit_run import Status


class StopWatches:
    """The watches of R rows. Rows without one cost nothing but a look into a bool array."""

    def __init__(self, num_rows: int) -> None:
        self._is_watched = np.zeros(num_rows, bool)
        self._watches: list[StopWatch | None] = [None] * num_rows

    def begin(self, row: int, request: Request) -> None:
        """A row is given to a request: its watch, if it asks for one, has seen nothing yet."""
        self._watches[row] = request.make_stop_watch() if request.make_stop_watch is not None else None
        self._is_watched[row] = self._watches[row] is not None

    def end(self, row: int) -> None:
        """The row's request has ended."""
        self._is_watched[row], self._watches[row] = False, None

    def cut(self, rows: np.ndarray, status: np.ndarray, outputs: OutputBuffers) -> dict[int, str]:
        """Cut the outputs of `rows` int64 [B] behind the token that completes a stop string; those strings by place in `rows`.

        status int32 [B]: how each row stands on the device. A token that ended its row as a stop id has no text to look at.
        """
        found = {}
        for place in np.flatnonzero(self._is_watched[rows]).tolist():
            row = int(rows[place])
            watch = self._watches[row]
            assert watch is not None, "a watched row has a watch"
            tokens = outputs.tokens(row)
            hit = watch.look(tokens[:-1] if status[place] == Status.STOP else tokens)
            if hit is not None:
                num_tokens, found[place] = hit
                outputs.cut(row, num_tokens)
        return found
