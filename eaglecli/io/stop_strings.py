"""Stop strings: where an answer ends because of what it says, and its text up to there.

What counts is the answer's text after each single token, so the result does not depend on how many tokens come at a time:
the answer ends with the first token after which one of the strings is in the text. The text ends before the string.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from eaglecli.io.token_bytes import REPLACEMENT, TokenBytes

Decode = Callable[[np.ndarray], str]


class StopStringWatch:
    """Follows one answer. Memory and cost per token do not grow with the answer: only a tail as long as the longest string is kept."""

    def __init__(self, strings: Sequence[str], make_reader: Callable[[], TokenBytes], min_new_tokens: int = 0) -> None:
        """`strings` are not empty and hold no lone surrogate. None ends anything in the first `min_new_tokens` tokens."""
        self._strings = [(text, text.encode("utf-8")) for text in strings]
        self._longest = max(len(data) for _, data in self._strings)
        self._make_reader, self._min_new_tokens = make_reader, min_new_tokens
        self._start_anew()

    def look(self, output_ids: np.ndarray) -> tuple[int, str] | None:
        """Number of tokens up to the one that completes a string, and the string; None while there is none.

        output_ids int32 [n]: the answer so far, of which only what is new is read. A shorter one than before begins anew.
        """
        if len(output_ids) < self._num_read:
            self._start_anew()
        pieces = [self._reader.read(token_id) for token_id in output_ids[self._num_read :].tolist()]
        new = b"".join(pieces)
        if not any(data in self._tail + new for _, data in self._strings):
            self._advance(new, len(pieces))
            return None
        for piece in pieces:
            stop = self._completed_by(piece) if self._num_read >= self._min_new_tokens else None
            self._advance(piece, 1)
            if stop is not None:
                return self._num_read, stop
        return None

    def _start_anew(self) -> None:
        self._reader, self._tail, self._num_read = self._make_reader(), b"", 0

    def _advance(self, data: bytes, num_tokens: int) -> None:
        self._tail = (self._tail + data)[-(self._longest - 1) :] if self._longest > 1 else b""
        self._num_read += num_tokens

    def _completed_by(self, piece: bytes) -> str | None:
        """The string that ends in `piece`: of several the one that begins first, then the shortest."""
        text, found = self._tail + piece, []
        for string, data in self._strings:
            place = text.find(data, max(0, len(self._tail) - len(data) + 1))
            if place >= 0:
                found.append((place, len(data), string))
        return min(found)[2] if found else None


def watch_maker(strings: Sequence[str], make_reader: Callable[[], TokenBytes], min_new_tokens: int = 0) -> Callable[[], StopStringWatch]:
    """What a request carries: makes a watch that has seen nothing."""
    return partial(StopStringWatch, strings, make_reader, min_new_tokens)


def answer_text(decode: Decode, token_ids: np.ndarray, stop_reason: int | str | None) -> str:
    """The text of an answer int32 [n]: without the token that ended it, or up to the stop string that its last token completed."""
    if isinstance(stop_reason, int):
        return decode(token_ids[:-1])
    text = decode(token_ids)
    if stop_reason is None:
        return text
    num_before = len(decode(token_ids[:-1]).rstrip(REPLACEMENT))
    place = text.find(stop_reason, max(0, num_before - len(stop_reason) + 1))
    return text[:place] if place >= 0 else text
