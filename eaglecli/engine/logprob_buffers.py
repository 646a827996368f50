"""Log-probabilities on the host: of each request that asks for them, what its iterations left, joined when it ends."""

from collections.abc import Sequence as Rows

import numpy as np

from eaglecli.engine.request import Request, TokenLogprobs
from eaglecli.kernels.token_logprobs import logprob_columns


class LogprobBuffers:
    """`max_logprobs` K alternatives are read of every token; a request gets as many as it asked for.

    What is kept belongs to the request, not to its row: it may lose the row and go on in another one.
    """

    def __init__(self, num_rows: int, max_logprobs: int | None) -> None:
        self._num_top = max_logprobs or 0
        self._is_wanted = np.zeros(num_rows, bool)  # by row
        self._request_of: list[Request | None] = [None] * num_rows
        self._parts: dict[Request, list[np.ndarray]] = {}

    @property
    def any_wanted(self) -> bool:
        """Whether a request that was begun and not taken asks for log-probabilities."""
        return bool(self._parts)

    def begin(self, rows: np.ndarray, requests: Rows[Request]) -> None:
        """Requests get their rows, or go on in them."""
        self._is_wanted[rows] = [request.sampling.logprobs is not None for request in requests]
        for row, request in zip(rows.tolist(), requests, strict=True):
            self._request_of[row] = request
            if request.sampling.logprobs is not None:
                self._parts.setdefault(request, [])

    def add(self, rows: np.ndarray, record: np.ndarray, num_emitted: np.ndarray) -> None:
        """Append the records of the first `num_emitted` [B] tokens of each run: int32 [B, W * columns], see `token_logprobs`."""
        for index in np.flatnonzero(self._is_wanted[rows]):
            tokens = record[index].reshape(-1, logprob_columns(self._num_top))[: num_emitted[index]]
            self._parts[self._request_of[rows[index]]].append(tokens.copy())  # type: ignore[index]

    def take(self, request: Request, num_tokens: int) -> TokenLogprobs | None:
        """Those of the first `num_tokens` tokens of an output that is over; None when the request asked for none."""
        parts = self._parts.pop(request, None)
        if parts is None:
            return None
        num_top, wanted = self._num_top, request.sampling.logprobs
        record = np.concatenate([np.zeros((0, logprob_columns(num_top)), np.int32), *parts])[:num_tokens]
        chosen, top_ids, top_values = record[:, 0], record[:, 1 : 1 + num_top], record[:, 1 + num_top :]
        as_floats = [np.ascontiguousarray(bits).view(np.float32) for bits in (chosen, top_values[:, :wanted])]
        return TokenLogprobs(as_floats[0], np.ascontiguousarray(top_ids[:, :wanted]), as_floats[1])
