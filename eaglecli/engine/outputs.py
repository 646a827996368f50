"""Outputs on the host: token buffers and counts of every row, filled a whole iteration at a time, never token by token."""

import numpy as np

from eaglecli.engine.request import Completion, FinishReason, Request
from eaglecli.engine.sequence import EmittedOutput
from eaglecli.kernels.commit_run import Status


class OutputBuffers:
    """R rows; columns are output tokens or verify steps, at most as many as the context has tokens."""

    def __init__(self, num_rows: int, context_length: int) -> None:
        self.num_tokens = np.zeros(num_rows, np.int64)
        self._tokens = np.zeros((num_rows, context_length), np.int32)
        self._accept_counts = np.zeros((num_rows, context_length), np.int16)
        self._num_steps = np.zeros(num_rows, np.int64)
        self._num_cut = np.zeros(num_rows, np.int64)
        self._num_proposed = np.zeros(num_rows, np.int64)

    def take_out(self, row: int) -> EmittedOutput:
        """A copy of what a row holds, to go on from in another row."""
        accept_counts = self._accept_counts[row, : self._num_steps[row]].copy()
        return EmittedOutput(self.tokens(row).copy(), accept_counts, int(self._num_cut[row]), int(self._num_proposed[row]))

    def put_in(self, row: int, emitted: EmittedOutput) -> None:
        """Let a row go on from an output."""
        self.num_tokens[row], self._num_steps[row] = len(emitted.token_ids), len(emitted.accept_counts)
        self._num_cut[row], self._num_proposed[row] = emitted.num_cut_tokens, emitted.num_proposed_drafts
        self._tokens[row, : self.num_tokens[row]] = emitted.token_ids
        self._accept_counts[row, : self._num_steps[row]] = emitted.accept_counts

    def add(self, rows: np.ndarray, record: np.ndarray, num_proposed: int | None) -> None:
        """Append the runs of distinct `rows`; record int32 [B, W + 3], see `commit_run.RunOutputs`.

        `num_proposed` drafts were verified for each row; None: the runs are the first tokens after a prompt.
        """
        tokens, (num_accepted, num_emitted, _) = record[:, :-3], record[:, -3:].T
        offset = np.arange(tokens.shape[1])
        row_index, token_index = np.nonzero(offset < num_emitted[:, None])
        columns = self.num_tokens[rows][:, None] + offset
        self._tokens[rows[row_index], columns[row_index, token_index]] = tokens[row_index, token_index]
        self.num_tokens[rows] += num_emitted
        self._num_cut[rows] += num_accepted + 1 - num_emitted
        if num_proposed is not None:
            self._num_proposed[rows] += num_proposed
            self._accept_counts[rows, self._num_steps[rows]] = num_accepted
            self._num_steps[rows] += 1

    def tokens(self, row: int) -> np.ndarray:
        """int32 [num_tokens]: a view of what the row holds."""
        return self._tokens[row, : self.num_tokens[row]]

    def cut(self, row: int, num_tokens: int) -> None:
        """Keep the first `num_tokens`; those of the last step that fall away count as cut."""
        self._num_cut[row] += self.num_tokens[row] - num_tokens
        self.num_tokens[row] = num_tokens

    def completion(self, row: int, request: Request, status: Status, stop_string: str | None, times: dict[str, float]) -> Completion:
        """What the row holds, as the answer to `request`. With `stop_string` that ended it, whatever the status."""
        status = status if stop_string is None else Status.STOP
        emitted = self.take_out(row)
        output_ids, accept_counts = emitted.token_ids, emitted.accept_counts
        reasons: dict[Status, FinishReason] = {Status.STOP: "stop", Status.LENGTH: "length", Status.NUMERIC: "error"}
        return Completion(
            request=request,
            output_ids=output_ids,
            finish_reason=reasons[status],
            stop_token_id=int(output_ids[-1]) if status is Status.STOP and stop_string is None else None,
            stop_string=stop_string,
            error=f"the target's logits are not finite after {len(output_ids)} tokens" if status is Status.NUMERIC else None,
            num_verify_steps=len(accept_counts),
            num_accepted_drafts=int(accept_counts.sum()),
            num_proposed_drafts=emitted.num_proposed_drafts,
            num_cut_tokens=emitted.num_cut_tokens,
            accept_counts=accept_counts,
            **times,
        )
