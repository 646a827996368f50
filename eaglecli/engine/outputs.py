"""Outputs on the host: token buffers and counts of every row, filled a whole iteration at a time, never token by token."""

import numpy as np

from eaglecli.engine.request import Completion, FinishReason, Request
from eaglecli.engine.sequence import EmittedOutput
from eaglecli.kernels.commit_run import Status

_REASONS: dict[Status, FinishReason] = {Status.STOP: "stop", Status.LENGTH: "length", Status.NUMERIC: "error"}


class OutputBuffers:
    """R rows; columns are output tokens or verify steps, at most as many as the context has tokens."""

    def __init__(self, num_rows: int, context_length: int, run_width: int) -> None:
        """`run_width`: no record holds longer runs."""
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_added = 0  # tokens of all rows that ever were, less those that were cut
        self._offsets = np.arange(run_width)
        self._tokens = np.zeros((num_rows, context_length + run_width), np.int32)
        self._accept_counts = np.zeros((num_rows, context_length), np.int16)
        self._num_steps = np.zeros(num_rows, np.int64)
        self._num_cut = np.zeros(num_rows, np.int64)
        self._proposed_counts = np.zeros((num_rows, context_length), np.int16)

    def take_out(self, row: int) -> EmittedOutput:
        """A copy of what a row holds, to go on from in another row."""
        return EmittedOutput(self.tokens(row).copy(), *self._steps(row), int(self._num_cut[row]))

    def begin(self, rows: np.ndarray) -> None:
        """Rows int64 [n] are given to requests: they hold nothing."""
        for numbers in (self.num_tokens, self._num_steps, self._num_cut):
            numbers[rows] = 0

    def put_in(self, row: int, emitted: EmittedOutput) -> None:
        """Let a row go on from an output."""
        self.num_tokens[row], self._num_steps[row] = len(emitted.token_ids), len(emitted.accept_counts)
        self._num_cut[row] = emitted.num_cut_tokens
        self._tokens[row, : self.num_tokens[row]] = emitted.token_ids
        self._accept_counts[row, : self._num_steps[row]] = emitted.accept_counts
        self._proposed_counts[row, : self._num_steps[row]] = emitted.proposed_counts

    def add(self, rows: np.ndarray, record: np.ndarray, num_proposed: int | None) -> None:
        """Append the runs of distinct `rows`; record int32 [B, W + 3], see `commit_run.RunOutputs`.

        `num_proposed` drafts were verified for each row; None: the runs are the first tokens after a prompt.
        """
        num_accepted, num_emitted, _ = record[:, -3:].T
        columns = self.num_tokens[rows][:, None] + self._offsets
        self._tokens[rows[:, None], columns] = record[:, :-3]  # what was not emitted stands behind the output, where the next run goes
        self.num_tokens[rows] += num_emitted
        self.num_added += int(num_emitted.sum())
        self._num_cut[rows] += num_accepted + 1 - num_emitted
        if num_proposed is not None:
            step = self._num_steps[rows]
            self._accept_counts[rows, step], self._proposed_counts[rows, step] = num_accepted, num_proposed
            self._num_steps[rows] += 1

    def tokens(self, row: int) -> np.ndarray:
        """int32 [num_tokens]: a view of what the row holds."""
        return self._tokens[row, : self.num_tokens[row]]

    def cut(self, row: int, num_tokens: int) -> None:
        """Keep the first `num_tokens`; those of the last step that fall away count as cut."""
        num_cut = int(self.num_tokens[row]) - num_tokens
        self._num_cut[row] += num_cut
        self.num_added -= num_cut
        self.num_tokens[row] = num_tokens

    def completion(self, row: int, request: Request, status: Status, stop_string: str | None, times: dict[str, float]) -> Completion:
        """What the row holds, as the answer to `request`. With `stop_string` that ended it, whatever the status."""
        status = status if stop_string is None else Status.STOP
        output_ids = self.tokens(row).copy()
        accept_counts, proposed_counts = self._steps(row)
        return Completion(
            request=request,
            output_ids=output_ids,
            finish_reason=_REASONS[status],
            stop_token_id=int(output_ids[-1]) if status is Status.STOP and stop_string is None else None,
            stop_string=stop_string,
            error=f"the target's logits are not finite after {len(output_ids)} tokens" if status is Status.NUMERIC else None,
            num_verify_steps=len(accept_counts),
            num_accepted_drafts=int(accept_counts.sum()),
            num_proposed_drafts=int(proposed_counts.sum()),
            num_cut_tokens=int(self._num_cut[row]),
            accept_counts=accept_counts,
            proposed_counts=proposed_counts,
            **times,
        )

    def _steps(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the drafts that each verify step accepted and proposed, int16 [steps]."""
        steps = slice(self._num_steps[row])
        return self._accept_counts[row, steps].copy(), self._proposed_counts[row, steps].copy()
