"""Stages verify, accept and commit: one target forward over the tree, one chosen token a node, the walk, the rows brought up to date."""

from dataclasses import dataclass

import torch

from eaglecli.engine.row_state import Batch, RowState
from eaglecli.engine.token_choice import adjusted_logits, count_output, record_logprobs
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.choose_tokens import choose_tokens
from eaglecli.kernels.commit_run import RunOutputs, commit_run
from eaglecli.kernels.verify_inputs import verify_inputs
from eaglecli.models.target import TargetModel


@dataclass(frozen=True, eq=False)
class VerifiedTree:
    """Per node: the target's own token (-1 where its logits were not finite) and whether the node may be accepted."""

    chosen: torch.Tensor  # int64 [B, N]
    allowed: torch.Tensor  # bool [B, N]
    logits: torch.Tensor  # [B * N, V] as the target gave them


@dataclass(frozen=True, eq=False)
class CommittedRun:
    """What one iteration added to its rows, and what the next stage and the host need of it."""

    tokens: torch.Tensor  # int64 [B, S + 1] accepted drafts, then the bonus token
    path: torch.Tensor  # int32 [B, S + 1] nodes whose choice those tokens are, root first, -1 past the end
    features: torch.Tensor  # [B, N, F] the target's features at every node
    base_lengths: torch.Tensor  # int32 [B] lengths before the run
    extend_lens: torch.Tensor  # int32 [B] tokens of the run the draft must see: accepted + 1, or 0 for rows that do not go on
    record: torch.Tensor  # int32 [B, S + 4], see `commit_run.RunOutputs`
    logprobs: torch.Tensor  # int32 [B, (S + 1) * columns], see `token_logprobs`; no columns unless the engine gives log-probabilities


def verify_tree(
    target: TargetModel,
    kv_cache: torch.Tensor,
    state: RowState,
    batch: Batch,
    tree: DraftTree,
    tap_boundaries: tuple[int, ...],
    run: CommittedRun,
) -> VerifiedTree:
    """Run the target over all nodes of all trees at once and choose one token at each node.

    Nodes at or past the row's limit may not be accepted; the row's look-ahead has slots for them. Positions end with the context.
    Fills the features and base lengths of `run`.
    """
    num_nodes = tree.tokens.shape[1]
    nodes = verify_inputs(batch.rows, state.lengths, state.limits, state.slot_table, tree.depths, state.context_length, run.base_lengths)
    inputs = AttentionInputs(
        rows=batch.rows,
        query_start=nodes.query_start,
        prefix_lens=run.base_lengths,
        slot_table=state.slot_table,
        out_slots=nodes.out_slots,
        positions=nodes.positions,
        tail_mask=tree.ancestor_mask,
        max_query_len=num_nodes,
        max_prefix_len=batch.hints.max_length,
        attend=state.attend,
        attend_qkv=state.attend_qkv,
    )
    output = target.forward(tree.tokens.flatten(), nodes.positions, kv_cache, inputs, tap_boundaries, run.features.flatten(0, 1))
    logits = target.logits(output.hidden)
    scores = adjusted_logits(state, batch, logits, nodes.choice_positions, tree)
    chosen = choose_tokens(scores, state.sampling(batch, num_nodes), nodes.choice_positions)
    return VerifiedTree(chosen.view_as(tree.tokens), nodes.allowed, logits)


def accept_and_commit(state: RowState, batch: Batch, tree: DraftTree, verified: VerifiedTree, run: CommittedRun) -> None:
    """Walk each tree along the target's own tokens, move the accepted nodes' slots to the front of the tail, commit the run."""
    outputs = RunOutputs(run.tokens, run.path, run.extend_lens, run.record)
    commit_run(state.progress, batch.rows, run.base_lengths, verified.chosen, tree, verified.allowed, outputs)
    count_output(state, batch, run.record)
    record_logprobs(state, batch, verified.logits, outputs, run.logprobs)
