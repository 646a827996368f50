"""The draft's side of an iteration: grow a tree, and catch up with what was accepted. Two of a kind: EAGLE and the root alone.

Plain decoding is `RootOnlyDrafter`: the same loop with a tree of one node.
"""

from dataclasses import replace

import torch

from eaglecli.engine.extend import prepare_extend_after_decode
from eaglecli.engine.forward_batch import CaptureHidden, DraftForwardBatch, ForwardMode
from eaglecli.engine.row_state import Batch, RowState
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.engine.verify import CommittedRun
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.build_tree import DraftTree, expand_beams, root_only_tree, select_nodes, start_beams
from eaglecli.kernels.choose_tokens import SamplingTensors
from eaglecli.kernels.draft_topk import DraftCandidates, draft_topk
from eaglecli.models.draft_model import DraftModel


class RootOnlyDrafter:
    """No draft: every tree is its root."""

    tap_boundaries: tuple[int, ...] = ()

    def __init__(self, state: RowState) -> None:
        self._state = state

    def grow_tree(self, batch: Batch) -> DraftTree:
        return root_only_tree(self._state.verified_id[batch.rows])

    def extend(self, batch: Batch, run: CommittedRun) -> None:
        """Nothing to catch up with."""

    def extend_prompt(self, batch: Batch, attention: AttentionInputs, next_ids: torch.Tensor, features: torch.Tensor, last_index: torch.Tensor) -> None:
        """Nothing to catch up with."""


class EagleDrafter:
    """Drafts with an EAGLE model; owns the draft's cache."""

    def __init__(self, draft: DraftModel, kv_cache: torch.Tensor, state: RowState, speculation: SpeculationSettings, same_noise: bool) -> None:
        self.tap_boundaries = draft.tap_boundaries
        self._draft = draft
        self._kv_cache = kv_cache
        self._state = state
        self._speculation = speculation
        self._same_noise = same_noise

    def grow_tree(self, batch: Batch) -> DraftTree:
        """Grow topk branches a step for num_steps - 1 forwards and keep the best nodes (EAGLE-2's dynamic tree, true ancestors).

        The first level stands ready: the last extend left it. Level l sits at draft position L + l.
        """
        state, rows, topk = self._state, batch.rows, self._speculation.topk
        hidden = state.draft_hidden[rows].repeat_interleave(topk, 0)
        levels = [start_beams(state.draft_log_q[rows], state.draft_token[rows])]
        itself = torch.eye(topk, dtype=torch.bool, device=rows.device).expand(len(batch), topk, topk)
        ancestors = itself
        for step in range(1, self._speculation.num_steps):
            beams = levels[-1]
            forward = self._tree_step(batch, step, beams.beam_token, hidden, ancestors)
            candidates, feedback = self._run(forward, self._sampling(batch, topk), forward.positions + 2)
            children = (part.view(len(batch), topk, topk) for part in (candidates.log_q, candidates.token))
            levels.append(expand_beams(step, beams.beam_score, *children, beams.beam_pool))
            parent = levels[-1].beam_row.long()[:, :, None]
            hidden = feedback.view(len(batch), topk, -1).gather(1, parent.expand(-1, -1, feedback.shape[1])).flatten(0, 1)
            ancestors = torch.cat([ancestors.gather(1, parent.expand(-1, -1, ancestors.shape[2])), itself], 2)
        pool = (torch.cat([getattr(level, part) for level in levels], 1) for part in ("pool_score", "pool_token", "pool_parent"))
        return select_nodes(*pool, state.verified_id[rows], self._speculation.num_draft_tokens)

    def _tree_step(self, batch: Batch, step: int, token: torch.Tensor, hidden: torch.Tensor, ancestors: torch.Tensor) -> DraftForwardBatch:
        """One draft forward over the beams of level step - 1. Their cache entries are throw-away: columns L + (step - 1) * topk and on."""
        state, rows, topk = self._state, batch.rows, self._speculation.topk
        lengths = state.lengths[rows]
        columns = lengths[:, None] + (step - 1) * topk + torch.arange(topk, device=rows.device)
        positions = (lengths + step - 1).clamp(max=state.context_length - 1).repeat_interleave(topk)
        return DraftForwardBatch(
            mode=ForwardMode.DECODE,
            capture_hidden=CaptureHidden.FULL,
            input_ids=token.flatten(),
            hidden=hidden,
            positions=positions,
            attention=AttentionInputs(
                rows=rows,
                query_start=torch.arange(len(batch) + 1, device=rows.device, dtype=torch.int32) * topk,
                prefix_lens=lengths,
                slot_table=state.slot_table,
                out_slots=state.slot_table[rows[:, None], columns].flatten(),
                positions=positions,
                tail_mask=ancestors,
                max_query_len=topk,
                max_prefix_len=batch.hints.max_length,
            ),
            last_index=None,
        )

    def extend(self, batch: Batch, run: CommittedRun) -> None:
        """Run the accepted tokens through the draft and keep what its last token of each row leaves."""
        forward = prepare_extend_after_decode(self._draft, self._state, batch, run, self._speculation.num_draft_tokens)
        self._keep_last(batch, forward)

    def extend_prompt(self, batch: Batch, attention: AttentionInputs, next_ids: torch.Tensor, features: torch.Tensor, last_index: torch.Tensor) -> None:
        """Run a chunk of prompts through the draft: next_ids int64 [T] is the token after each, features [T, F] the target's."""
        forward = DraftForwardBatch(
            mode=ForwardMode.PREFILL,
            capture_hidden=CaptureHidden.LAST,
            input_ids=next_ids,
            hidden=self._draft.fuse(features),
            positions=attention.positions,
            attention=attention,
            last_index=last_index,
        )
        self._keep_last(batch, forward)

    def _keep_last(self, batch: Batch, forward: DraftForwardBatch) -> None:
        """Level 0 of the next tree. The last token x_{i+1} of a row sits at position i; its candidates are for position i + 2 = length + 1."""
        state, rows = self._state, batch.rows
        candidates, feedback = self._run(forward, self._sampling(batch, 1), state.lengths[rows] + 1)
        state.draft_hidden[rows] = feedback
        state.draft_log_q[rows] = candidates.log_q
        state.draft_token[rows] = candidates.token

    def _run(self, forward: DraftForwardBatch, sampling: SamplingTensors, candidate_position: torch.Tensor) -> tuple[DraftCandidates, torch.Tensor]:
        """Candidates and feedback of the captured tokens."""
        output = self._draft.forward(forward.input_ids, forward.hidden, forward.positions, self._kv_cache, forward.attention)
        head_input, feedback = output.head_input, output.feedback
        if forward.capture_hidden is CaptureHidden.LAST:
            head_input, feedback = head_input[forward.last_index], feedback[forward.last_index]
        logits = self._draft.logits(head_input)
        draft = self._draft
        return draft_topk(logits, self._speculation.topk, sampling, candidate_position, draft.token_map, draft.vocab_size), feedback

    def _sampling(self, batch: Batch, repeats: int) -> SamplingTensors:
        sampling = self._state.sampling(batch, repeats)
        if self._same_noise:
            return sampling
        return replace(sampling, temperature=torch.zeros_like(sampling.temperature), any_sampled=False)
