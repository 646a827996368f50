"""Log-probabilities on the host: of each row that asks for them, what its iterations left, joined when the request ends."""

import numpy as np

from eaglecli.engine.request import TokenLogprobs
from eaglecli.kernels.token_logprobs import logprob_columns


class LogprobBuffers:
    """`max_logprobs` K alternatives are read of every token; a request gets as many as it asked for."""

    def __init__(self, num_rows: int, max_logprobs: int | None) -> None:
        self._num_top = max_logprobs or 0
        self._wanted = np.full(num_rows, -1, np.int64)  # alternatives that the row's request asks for; -1: no log-probabilities
        self._parts: dict[int, list[np.ndarray]] = {}

    @property
    def any_wanted(self) -> bool:
        """Whether any row asks for log-probabilities."""
        return bool(self._parts)

    def reset(self, row: int, num_logprobs: int | None) -> None:
        """Forget what the row held; None: its request asks for none."""
        self._wanted[row] = -1 if num_logprobs is None else num_logprobs
        self._parts.pop(row, None)
        if num_logprobs is not None:
            self._parts[row] = []

    def add(self, rows: np.ndarray, record: np.ndarray, num_emitted: np.ndarray) -> None:
        """Append the records of the first `num_emitted` [B] tokens of each run: int32 [B, W * columns], see `token_logprobs`."""
        for index in np.flatnonzero(self._wanted[rows] >= 0):
            tokens = record[index].reshape(-1, logprob_columns(self._num_top))[: num_emitted[index]]
            self._parts[int(rows[index])].append(tokens.copy())

    def take(self, row: int, num_tokens: int) -> TokenLogprobs | None:
        """Those of the first `num_tokens` tokens of the row's output, which is over; None when it asked for none."""
        parts = self._parts.pop(row, None)
        if parts is None:
            return None
        num_top, wanted = self._num_top, self._wanted[row]
        self._wanted[row] = -1
        record = np.concatenate([np.zeros((0, logprob_columns(num_top)), np.int32), *parts])[:num_tokens]
        top_ids, top_bits = record[:, 1 : 1 + num_top], record[:, 1 + num_top :]
        chosen = np.ascontiguousarray(record[:, 0]).view(np.float32)
        values = np.ascontiguousarray(top_bits[:, :wanted]).view(np.float32)
        return TokenLogprobs(chosen, np.ascontiguousarray(top_ids[:, :wanted]), values)
