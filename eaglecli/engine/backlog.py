"""Tokens that rows decoded without the draft, and how the draft catches up with them when it is wanted again.

Plain decoding beside a draft keeps, of every token, what its entry in the draft's cache is made of: the token and the
target's feature before it, in a ring of W places a row (one small launch, nothing of the draft runs). Before the next
iteration that drafts, one pass over what was kept gives those tokens their entries, made of the very numbers that an
extend after each of them would have used: proposals are what they would have been without the pause.

A pause of more than W tokens leaves a gap. The draft's cache of such a row then begins anew with the last W - 127 to W
tokens (`RowState.draft_start`, a multiple of 128): proposals get poorer, the text cannot change.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from eaglecli.engine.forward_batch import CaptureHidden, DraftForwardBatch, ForwardMode
from eaglecli.engine.row_state import Batch, HostHints, RowState
from eaglecli.engine.staging import to_device
from eaglecli.engine.verify import CommittedRun
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.create_extend_spec_info import create_extend_spec_info
from eaglecli.kernels.keep_features import keep_features
from eaglecli.models.draft_model import DraftModel

START_UNIT = 128  # `draft_start` is a multiple of it: attention walks keys in blocks of at most so many
_WIDTHS = (8, 32)  # of a catch-up, and the ring's: kernels are compiled for few widths


class Backlog:
    """The rings of all rows on the device, and on the host how many tokens each row is behind."""

    def __init__(self, state: RowState, num_places: int, feature_size: int, dtype: torch.dtype) -> None:
        num_rows, device = state.dummy_row + 1, state.lengths.device
        self.features = torch.zeros(num_rows, num_places, feature_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(num_rows, num_places, dtype=torch.int64, device=device)
        self.num_behind = np.zeros(num_rows, np.int64)  # tokens without an entry in the draft's cache, those in flight counted
        self._state = state

    def keep(self, batch: Batch, run: CommittedRun) -> None:
        """Keep what an iteration of root-only trees has made; rows that have ended leave it in the dummy row."""
        keep_features(run.features.flatten(1), run.tokens[:, 0], run.base_lengths, batch.rows, self.features, self.tokens)

    def count(self, rows: np.ndarray) -> None:
        """An iteration of root-only trees was enqueued for `rows`, each of which grows by one token or ends."""
        self.num_behind[rows] += 1

    def forget(self, rows: np.ndarray) -> None:
        """The rows are another request's now."""
        self.num_behind[rows] = 0

    def groups_behind(self, rows: np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
        """Those of `rows` that are behind, in groups whose padded forwards stay below `max_tokens`, if one row's does.

        A group that was taken counts as caught up when the next one is asked for.
        """
        behind = rows[self.num_behind[rows] > 0]
        behind = behind[np.argsort(-self.num_behind[behind], kind="stable")]
        while len(behind):
            width = self._width(int(self.num_behind[behind[0]]))
            count = max(1, max_tokens // width)
            yield behind[:count]
            self.num_behind[behind[:count]] = 0
            behind = behind[count:]

    def warm_up(self, catch_up: Callable[["Backlog", np.ndarray, HostHints], None], max_tokens: int, hints: HostHints) -> None:
        """Let all kernels of `EagleDrafter.catch_up` be compiled, on the dummy row. Nothing that belongs to anybody changes."""
        for width in sorted({*(width for width in _WIDTHS if width < self.tokens.shape[1]), self.tokens.shape[1]}):
            for count in sorted({1, max(1, max_tokens // width)}):
                self.num_behind[self._state.dummy_row] = width
                catch_up(self, np.full(count, self._state.dummy_row), hints)
        self.num_behind[self._state.dummy_row] = 0

    def _width(self, num_behind: int) -> int:
        num_places = self.tokens.shape[1]
        return next((width for width in _WIDTHS if num_behind <= width < num_places), num_places)

    def prepare_catch_up(self, draft: DraftModel, rows: np.ndarray, hints: HostHints) -> tuple[Batch, DraftForwardBatch]:
        """The draft's forward over what `rows`, all behind, have kept; sets `draft_start` where there is a gap.

        Nothing is read from the device. Rows that have ended there unseen are replaced by the dummy row and have no token.
        """
        state, num_places = self._state, self.tokens.shape[1]
        assert state.draft_start is not None
        behind = self.num_behind[rows]
        width = self._width(int(behind.max()))
        given = to_device(np.stack([rows, behind]).astype(np.int32), state.lengths.device)
        live = torch.where(state.finished[given[0]], state.dummy_row, given[0])
        has_gap = given[1] > num_places
        lengths = state.lengths[live]
        after_gap = (lengths - num_places + START_UNIT - 1) // START_UNIT * START_UNIT
        start = torch.where(has_gap, after_gap, lengths - given[1]).clamp(min=0).int()
        state.draft_start[live] = torch.where(has_gap & (live != state.dummy_row), start, state.draft_start[live])
        counts = torch.where(live == state.dummy_row, 0, lengths - start).int()
        step = torch.arange(width, dtype=torch.int32, device=start.device)
        place = live.long()[:, None] * num_places + (start[:, None] + step).long() % num_places
        path = step.repeat(len(rows), 1)
        info = create_extend_spec_info(self.tokens.flatten()[place], counts, start, live, state.slot_table, path, width)
        forward = DraftForwardBatch(
            mode=ForwardMode.EXTEND,
            capture_hidden=CaptureHidden.LAST,
            input_ids=info.input_ids,
            hidden=draft.fuse(self.features.flatten(0, 1), place.flatten()[info.feature_index]),
            hidden_index=None,
            positions=info.positions,
            proposal_positions=info.proposal_positions,
            attention=AttentionInputs(
                rows=live,
                query_start=info.query_start,
                prefix_lens=start,
                slot_table=state.slot_table,
                out_slots=info.out_slots,
                positions=info.positions,
                tail_mask=None,
                max_query_len=width,
                max_prefix_len=hints.max_length,
                first_keys=state.draft_start,
                attend=state.attend,
                attend_qkv=state.attend_qkv,
            ),
            last_index=info.last_index,
        )
        return Batch(live, hints), forward
