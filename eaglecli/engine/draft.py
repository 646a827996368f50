"""The draft's side of an iteration: grow a tree, and catch up with what was accepted. EAGLE, the root alone, and a pause of EAGLE.

Plain decoding is `RootOnlyDrafter`: the same loop with a tree of one node. `PausedDrafter` is plain decoding beside a draft that may be
wanted again.
"""

from dataclasses import replace

import numpy as np
import torch

from eaglecli.engine.backlog import Backlog
from eaglecli.engine.extend import prepare_extend_after_decode
from eaglecli.engine.forward_batch import CaptureHidden, DraftForwardBatch, ForwardMode
from eaglecli.engine.row_state import Batch, HostHints, RowState
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.engine.verify import CommittedRun
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.build_tree import Beams, DraftTree, expand_beams, root_only_tree, select_nodes, start_beams
from eaglecli.kernels.choose_tokens import SamplingTensors
from eaglecli.kernels.draft_step_inputs import draft_step_inputs
from eaglecli.kernels.draft_topk import DraftCandidates, draft_topk
from eaglecli.kernels.keep_last import keep_last
from eaglecli.models.draft_model import DraftModel, DraftOutput


class RootOnlyDrafter:
    """No draft: every tree is its root."""

    tap_boundaries: tuple[int, ...] = ()
    has_extend = False

    def __init__(self, state: RowState) -> None:
        self._state = state

    def grow_tree(self, batch: Batch, tree: DraftTree) -> None:
        """Write the root of every row into `tree`."""
        root_only_tree(batch.rows, self._state.verified_id, tree)

    def extend(self, batch: Batch, run: CommittedRun) -> None:
        """Nothing to catch up with."""

    def extend_prompt(
        self, batch: Batch, attention: AttentionInputs, next_ids: torch.Tensor, features: torch.Tensor, last_index: torch.Tensor
    ) -> None:
        """Nothing to catch up with."""


class PausedDrafter:
    """Every tree is its root, and what the draft would have seen of the accepted token is kept."""

    has_extend = True

    def __init__(self, draft: DraftModel, backlog: Backlog, state: RowState) -> None:
        self.tap_boundaries = draft.tap_boundaries
        self._backlog = backlog
        self._state = state

    def grow_tree(self, batch: Batch, tree: DraftTree) -> None:
        """Write the root of every row into `tree`."""
        root_only_tree(batch.rows, self._state.verified_id, tree)

    def extend(self, batch: Batch, run: CommittedRun) -> None:
        """The draft does not run; see `Backlog`."""
        self._backlog.keep(batch, run)


class EagleDrafter:
    """Drafts with an EAGLE model into the draft's cache, which all drafters of an engine share."""

    has_extend = True

    def __init__(
        self, draft: DraftModel, kv_cache: torch.Tensor, state: RowState, speculation: SpeculationSettings, same_noise: bool
    ) -> None:
        self.tap_boundaries = draft.tap_boundaries
        self._draft = draft
        self._kv_cache = kv_cache
        self._state = state
        self._speculation = speculation
        self._same_noise = same_noise
        self._greedy = torch.zeros_like(state.temperature)

    def grow_tree(self, batch: Batch, tree: DraftTree) -> None:
        """Grow topk branches a step, num_steps - 1 forwards, and fill `tree` with the best nodes (EAGLE-2's dynamic tree, true ancestors).

        The first level stands ready: the last extend left it. Level l sits at draft position L + l.
        """
        state, rows, num_levels = self._state, batch.rows, self._speculation.num_steps
        pool, beams = start_beams(rows, state.candidates, num_levels, self._speculation.topk)
        hidden, tail_mask = state.draft_hidden, None
        for step in range(1, num_levels):
            forward = self._tree_step(batch, step, beams, hidden, tail_mask)
            output = self._forward(forward)
            topk = self._speculation.topk
            children = self._propose(output.head_input, forward.proposal_positions, self._sampling(batch, topk), topk)
            beams = expand_beams(step, beams, children, pool)
            hidden, tail_mask = output.feedback, forward.attention.tail_mask
        select_nodes(pool, rows, state.verified_id, tree)

    def _tree_step(
        self, batch: Batch, step: int, beams: Beams, hidden: torch.Tensor, mask_before: torch.Tensor | None
    ) -> DraftForwardBatch:
        """One draft forward over the beams of level step - 1. Their cache entries are throw-away: columns L + (step - 1) * topk and on."""
        state, rows = self._state, batch.rows
        places = draft_step_inputs(step, rows, state.lengths, state.slot_table, beams.row, mask_before, state.context_length)
        return DraftForwardBatch(
            mode=ForwardMode.DECODE,
            capture_hidden=CaptureHidden.FULL,
            input_ids=beams.token.flatten(),
            hidden=hidden,
            hidden_index=places.hidden_index,
            positions=places.positions,
            proposal_positions=places.proposal_positions,
            attention=AttentionInputs(
                rows=rows,
                query_start=places.query_start,
                prefix_lens=places.lengths,
                slot_table=state.slot_table,
                out_slots=places.out_slots,
                positions=places.positions,
                tail_mask=places.tail_mask,
                max_query_len=self._speculation.topk,
                max_prefix_len=batch.hints.max_length,
                first_keys=state.draft_start,
                attend=state.attend,
                attend_qkv=state.attend_qkv,
            ),
            last_index=None,
        )

    def extend(self, batch: Batch, run: CommittedRun) -> None:
        """Run the accepted tokens through the draft and keep what its last token of each row leaves."""
        forward = prepare_extend_after_decode(self._draft, self._state, batch, run, self._speculation.num_draft_tokens)
        self._keep_last(batch, forward)

    def extend_prompt(
        self, batch: Batch, attention: AttentionInputs, next_ids: torch.Tensor, features: torch.Tensor, last_index: torch.Tensor
    ) -> None:
        """Run a chunk of prompts through the draft: next_ids int64 [T] is the token after each, features [T, F] the target's."""
        forward = DraftForwardBatch(
            mode=ForwardMode.PREFILL,
            capture_hidden=CaptureHidden.LAST,
            input_ids=next_ids,
            hidden=self._draft.fuse(features),
            hidden_index=None,
            positions=attention.positions,
            proposal_positions=self._state.lengths[batch.rows] + 1,
            attention=attention,
            last_index=last_index,
        )
        self._keep_last(batch, forward)

    def catch_up(self, backlog: Backlog, rows: np.ndarray, hints: HostHints) -> None:
        """Give the tokens that `rows`, int64 [n], have decoded without the draft their entries in its cache: see `Backlog`."""
        self._keep_last(*backlog.prepare_catch_up(self._draft, rows, hints))

    def _keep_last(self, batch: Batch, forward: DraftForwardBatch) -> None:
        """Level 0 of the next tree: the last token x_{i+1} of a row sits at position i, its candidates are for i + 2 = length + 1."""
        assert forward.last_index is not None
        output = self._forward(forward)
        head_input = keep_last(output.head_input, output.feedback, forward.last_index, batch.rows, self._state.draft_hidden)
        candidates = self._state.candidates
        self._propose(head_input, forward.proposal_positions, self._sampling(batch, 1), candidates.token.shape[1], candidates)

    def _forward(self, forward: DraftForwardBatch) -> DraftOutput:
        attention = forward.attention
        return self._draft.forward(forward.input_ids, forward.hidden, forward.positions, self._kv_cache, attention, forward.hidden_index)

    def _propose(
        self,
        head_input: torch.Tensor,
        positions: torch.Tensor,
        sampling: SamplingTensors,
        topk: int,
        into_rows: DraftCandidates | None = None,
    ) -> DraftCandidates:
        """The draft's topk tokens for `positions` int32 [M], from head_input [M, H]."""
        draft, logits = self._draft, self._draft.logits(head_input)
        return draft_topk(logits, topk, sampling, positions, draft.token_map, draft.vocab_size, into_rows)

    def _sampling(self, batch: Batch, repeats: int) -> SamplingTensors:
        sampling = self._state.sampling(batch, repeats)
        return sampling if self._same_noise else replace(sampling, temperature=self._greedy, any_sampled=False)
