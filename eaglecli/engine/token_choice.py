"""What stands around the choice of tokens, for a verify and for the first token alike: scores before, counts and log-probabilities after.

Each does nothing, and launches nothing, unless the engine was opened for it and the hints do not rule it out. The hints of a captured
graph rule nothing out: there, a row that asks for nothing is copied (scores) or left at once (counts, log-probabilities).
"""

import torch

from eaglecli.engine.row_state import Batch, RowState
from eaglecli.kernels.adjust_logits import adjust_logits
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.commit_run import RunOutputs
from eaglecli.kernels.count_tokens import count_tokens
from eaglecli.kernels.token_logprobs import logprob_columns, token_logprobs


def adjusted_logits(state: RowState, batch: Batch, logits: torch.Tensor, position: torch.Tensor, tree: DraftTree | None) -> torch.Tensor:
    """What tokens are chosen from: `logits` [M, V] themselves, or a float32 tensor of its own. position int32 [M] of the token chosen."""
    if state.adjustments is None or not batch.hints.any_adjusted:
        return logits
    return adjust_logits(logits, state.adjustments, state.stop_ids, batch.rows, position, tree)


def count_output(state: RowState, batch: Batch, record: torch.Tensor) -> None:
    """Add what was just committed (record int32 [B, W + 3]) to the counts that penalties go by."""
    if state.adjustments is not None and batch.hints.any_adjusted:
        count_tokens(state.adjustments, batch.rows, record)


def record_logprobs(state: RowState, batch: Batch, logits: torch.Tensor, run: RunOutputs, out: torch.Tensor) -> None:
    """Write the log-probabilities of the committed tokens into `out` int32 [B, W * columns], from the model's own logits."""
    if state.wants_logprobs is not None and batch.hints.any_logprobs:
        num_columns = out.shape[1] // (run.record.shape[1] - 3)
        token_logprobs(logits, batch.rows, state.wants_logprobs, run.tokens, run.path, (num_columns - 1) // 2, out)


def logprob_width(max_logprobs: int | None, run_width: int) -> int:
    """Columns of the log-probabilities of a run of up to `run_width` tokens."""
    return 0 if max_logprobs is None else run_width * logprob_columns(max_logprobs)
