"""Extend after decode: the draft's cache gets true entries for the accepted tokens.

The simplified preparation of SGLang's pull request 6987: nothing is padded per request, the accepted runs of all
requests are packed, and positions, ids, slots and the running sum of lengths come from one kernel launch. The host
does not know the accept lengths when it enqueues this stage, so there is room for B * (S + 1) tokens; real ones stand
at the front and the same launch fills the tail with token 0 at position 0, writing to the dummy slot.
"""

from eaglecli.engine.forward_batch import CaptureHidden, DraftForwardBatch, ForwardMode
from eaglecli.engine.row_state import Batch, RowState
from eaglecli.engine.verify import CommittedRun
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.create_extend_spec_info import create_extend_spec_info
from eaglecli.models.draft_model import DraftModel


def prepare_extend_after_decode(draft: DraftModel, state: RowState, batch: Batch, run: CommittedRun, num_nodes: int) -> DraftForwardBatch:
    """The draft's forward over everything the last verify accepted: each row's accepted drafts, then its bonus token.

    Token x_{i+1} stands at position i with the target's feature of position i (draft-checkpoints 3.1). Rows that ended
    have length 0 and no token.
    """
    info = create_extend_spec_info(run.tokens, run.extend_lens, run.base_lengths, batch.rows, state.slot_table, run.path, num_nodes)
    return DraftForwardBatch(
        mode=ForwardMode.EXTEND,
        capture_hidden=CaptureHidden.LAST,
        input_ids=info.input_ids,
        hidden=draft.fuse(run.features.flatten(0, 1), info.feature_index),
        hidden_index=None,
        positions=info.positions,
        proposal_positions=info.proposal_positions,
        attention=AttentionInputs(
            rows=batch.rows,
            query_start=info.query_start,
            prefix_lens=run.base_lengths,
            slot_table=state.slot_table,
            out_slots=info.out_slots,
            positions=info.positions,
            tail_mask=None,
            max_query_len=run.tokens.shape[1],
            max_prefix_len=batch.hints.max_length,
            first_keys=state.draft_start,
            attend=state.attend,
            attend_qkv=state.attend_qkv,
        ),
        last_index=info.last_index,
    )
