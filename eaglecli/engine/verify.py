"""Stages verify, accept and commit: one target forward over the tree, one chosen token a node, the walk, the rows brought up to date."""

from dataclasses import dataclass

import torch

from eaglecli.engine.commit import commit_run, cut_run, pack_record
from eaglecli.engine.row_state import Batch, RowState
from eaglecli.kernels.accept_path import accept_path, permute_tail
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.choose_tokens import choose_tokens
from eaglecli.models.target import TargetModel


@dataclass(frozen=True, eq=False)
class VerifiedTree:
    """Per node: the target's own token (-1 where its logits were not finite), whether it may be accepted, its features for the draft."""

    chosen: torch.Tensor  # int64 [B, N]
    allowed: torch.Tensor  # bool [B, N]
    features: torch.Tensor  # [B, N, F]


@dataclass(frozen=True, eq=False)
class CommittedRun:
    """What one iteration added to its rows, and what the next stage and the host need of it."""

    tokens: torch.Tensor  # int64 [B, S + 1] accepted drafts, then the bonus token
    path: torch.Tensor  # int32 [B, S + 1] nodes whose choice those tokens are, root first, -1 past the end
    features: torch.Tensor  # [B, N, F] the target's features at every node
    base_lengths: torch.Tensor  # int32 [B] lengths before the run
    extend_lens: torch.Tensor  # int32 [B] tokens of the run the draft must see: accepted + 1, or 0 for rows that do not go on
    record: torch.Tensor  # int32 [B, S + 4], see `pack_record`


def verify_tree(target: TargetModel, kv_cache: torch.Tensor, state: RowState, batch: Batch, tree: DraftTree, tap_boundaries: tuple[int, ...]) -> VerifiedTree:
    """Run the target over all nodes of all trees at once and choose one token at each node.

    Nodes at or past the row's limit may not be accepted; the row's look-ahead has slots for them. Positions end with the context.
    """
    num_nodes = tree.tokens.shape[1]
    lengths, limits = state.lengths[batch.rows], state.limits[batch.rows]
    positions = lengths[:, None] + tree.depths
    allowed = positions < limits[:, None]
    columns = lengths[:, None] + torch.arange(num_nodes, device=lengths.device)
    positions = positions.clamp(max=state.context_length - 1)
    inputs = AttentionInputs(
        rows=batch.rows,
        query_start=torch.arange(len(batch) + 1, device=lengths.device, dtype=torch.int32) * num_nodes,
        prefix_lens=lengths,
        slot_table=state.slot_table,
        out_slots=state.slot_table[batch.rows[:, None], columns].flatten(),
        positions=positions.flatten(),
        tail_mask=tree.ancestor_mask,
        max_query_len=num_nodes,
        max_prefix_len=batch.hints.max_length,
    )
    output = target.forward(tree.tokens.flatten(), inputs.positions, kv_cache, inputs, tap_boundaries)
    chosen = choose_tokens(target.logits(output.hidden), state.sampling(batch, num_nodes), inputs.positions + 1)
    token = torch.where(chosen.finite, chosen.token, -1)
    return VerifiedTree(token.view_as(tree.tokens), allowed, output.features.view(*tree.tokens.shape, -1))


def accept_and_commit(state: RowState, batch: Batch, tree: DraftTree, verified: VerifiedTree, num_steps: int) -> CommittedRun:
    """Walk each tree along the target's own tokens, move the accepted nodes' slots to the front of the tail, commit the run."""
    rows = batch.rows
    base_lengths = state.lengths[rows]
    walk = accept_path(tree.tokens, tree.parents, verified.chosen, verified.allowed, num_steps)
    permute_tail(state.slot_table, rows, base_lengths, walk.path, walk.num_accepted, tree.tokens.shape[1])
    num_tokens = walk.num_accepted + 1
    bonus = walk.tokens.gather(1, walk.num_accepted.long()[:, None])[:, 0]
    room = (state.limits[rows] - base_lengths - 1).clamp(min=0)
    ending = cut_run(walk.tokens, num_tokens, bonus >= 0, state.stop_ids[rows], room)
    commit_run(state, rows, walk.tokens, num_tokens, base_lengths, ending)
    extend_lens = torch.where(ending.is_running() & (rows != state.dummy_row), num_tokens, 0).int()
    record = pack_record(walk.tokens, num_steps + 1, walk.num_accepted, ending)
    return CommittedRun(walk.tokens, walk.path, verified.features, base_lengths, extend_lens, record)
