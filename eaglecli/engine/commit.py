"""End of a run of new tokens: where the output is cut, and what of it is committed to the rows.

The walk over the tree does not look at end tokens; the run it accepts is cut here, for the tokens of a verify step and
for the first token of a prefill alike. A finished row is frozen: its length never passes its limit.
"""

import enum
from dataclasses import dataclass

import torch
from torch.nn import functional

from eaglecli.engine.row_state import RowState


class Status(enum.IntEnum):
    """Where a row stands after a run of tokens."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NUMERIC = 3  # the target's logits were not finite where the next token had to be chosen


@dataclass(frozen=True, eq=False)
class Ending:
    """num_emitted int32 [B] tokens of the run that belong to the output; status int32 [B], see `Status`."""

    num_emitted: torch.Tensor
    status: torch.Tensor

    def is_running(self) -> torch.Tensor:
        return self.status == Status.RUNNING


def cut_run(tokens: torch.Tensor, num_tokens: torch.Tensor, last_is_finite: torch.Tensor, stop_ids: torch.Tensor, room: torch.Tensor) -> Ending:
    """Cut each run after its first stop id or where the room ends.

    tokens int64 [B, W], the first num_tokens int32 [B] (>= 1) of a row are its run; last_is_finite bool [B]: whether the last of them
    was chosen from finite logits; stop_ids int64 [B, S] padded with -1; room int32 [B]: tokens the output may still take.
    """
    width = tokens.shape[1]
    num_valid = num_tokens - (~last_is_finite).int()
    index = torch.arange(width, device=tokens.device)
    is_stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(2) & (index < num_valid[:, None])
    until_stop = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, width + 1).int()
    num_emitted = torch.minimum(torch.minimum(num_valid, until_stop), room)
    stopped = until_stop == num_emitted
    status = torch.full_like(num_emitted, Status.RUNNING)
    status = torch.where(last_is_finite, status, Status.NUMERIC)
    status = torch.where(num_emitted == room, Status.LENGTH, status)
    status = torch.where(stopped, Status.STOP, status)
    return Ending(num_emitted, status.int())


def commit_run(state: RowState, rows: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor, base_lengths: torch.Tensor, ending: Ending) -> None:
    """Write a run to its rows: length, last known token, finished.

    rows int32 [B], live or the dummy row; base_lengths int32 [B]: known tokens before the run, less one.
    """
    is_dummy = rows == state.dummy_row
    last = (num_tokens - 1).long()[:, None]
    state.lengths[rows] = torch.where(is_dummy, 0, base_lengths + ending.num_emitted)
    state.verified_id[rows] = torch.where(is_dummy, 0, tokens.gather(1, last)[:, 0].clamp(min=0))
    state.finished[rows] = is_dummy | ~ending.is_running()


def pack_record(tokens: torch.Tensor, run_width: int, num_accepted: torch.Tensor, ending: Ending) -> torch.Tensor:
    """int32 [B, run_width + 3]: tokens (widened with zeros), accepted drafts, emitted tokens, status. What the host reads of a run."""
    widened = functional.pad(tokens.int(), (0, run_width - tokens.shape[1]))
    return torch.cat([widened, torch.stack([num_accepted, ending.num_emitted, ending.status], 1).int()], 1)
