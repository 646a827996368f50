# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""Walk the verified tree along the target's own choices, and move the accepted nodes' slots to the front of the row's tail.

    walk            from the root, step to the child that carries the token chosen at the current node, while there is one
    permutation     slots [L, L + N) of a row held the tree nodes 0 .. N-1; afterwards they hold the path, then the others

The emitted tokens are the choices at the path's nodes: the accepted drafts, then the bonus token. Nothing is copied but slot
numbers; a row stays a permutation of the slots it owns. Both are parts of one kernel, `commit_run`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require


@dataclass(frozen=True, eq=False)
class AcceptedPath:
    """Per row: A accepted drafts, A + 1 path nodes and A + 1 emitted tokens."""

    num_accepted: torch.Tensor  # int32 [B]
    path: torch.Tensor  # int32 [B, S+1] node numbers from the root, -1 past the end
    tokens: torch.Tensor  # int64 [B, S+1] accepted drafts, then the bonus token, 0 past the end


@triton.jit
def walk_tree(
    chosen, tree_tokens_ptr, parents_ptr, allowed_ptr, first_node, node, step,
    NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, NUM_STEPS: tl.constexpr,
):  # fmt: skip
    """One row's walk over blocks `node` and `step`: the last choice, accepted drafts, tokens and path by step, place by node (-1: none)."""
    inside = node < NUM_NODES
    choice = tl.sum(tl.where(node == 0, chosen, 0), axis=0)
    num_accepted = tl.full([], 0, tl.int32)
    tokens = tl.where(step == 0, choice, 0)
    path = tl.where(step == 0, 0, -1)
    place = tl.where(node == 0, 0, -1)
    if NUM_STEPS > 0:
        tree_token = tl.load(tree_tokens_ptr + first_node + node, mask=inside, other=0)
        parent = tl.load(parents_ptr + first_node + node, mask=inside, other=-1)
        allowed = tl.load(allowed_ptr + first_node + node, mask=inside, other=0) != 0
        current = 0
        alive = True
        for depth in tl.static_range(1, NUM_STEPS + 1):
            is_next = inside & allowed & (parent == current) & (tree_token == choice)
            found = tl.min(tl.where(is_next, node, NODE_BLOCK), axis=0)
            alive = alive & (found < NODE_BLOCK)
            current = tl.where(alive, found, current)
            choice = tl.sum(tl.where(node == current, chosen, 0), axis=0)
            num_accepted += alive.to(tl.int32)
            tokens = tl.where((step == depth) & alive, choice, tokens)
            path = tl.where((step == depth) & alive, current, path)
            place = tl.where((node == current) & alive, depth, place)
    return choice, num_accepted, tokens, path, place


@triton.jit
def permute_slots(tail_ptr, place, num_accepted, node, NUM_NODES: tl.constexpr):
    """Reorder a row's tail, whose first slot stands at tail_ptr: nodes with a place go there, the others behind them in order."""
    inside = node < NUM_NODES
    is_behind = inside & (place < 0)
    target = tl.where(is_behind, num_accepted + tl.cumsum(is_behind.to(tl.int32), axis=0), place)
    slots = tl.load(tail_ptr + node, mask=inside, other=0)
    tl.debug_barrier()  # every slot is read before any is overwritten
    tl.store(tail_ptr + target, slots, mask=inside)


def accept_path_reference(
    tree_tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor, num_steps: int
) -> AcceptedPath:
    """Accepted drafts and emitted tokens of every row.

    tree_tokens int64 [B, N], parents int32 [B, N] (-1 for the root), chosen int64 [B, N] (the target's token after each node),
    allowed bool [B, N] (False: the node must not be accepted; the root always is), num_steps = S bounds the walk.
    """
    require("tree_tokens", tree_tokens, torch.int64, -1, -1)
    require("parents", parents, torch.int32, *tree_tokens.shape)
    require("chosen", chosen, torch.int64, *tree_tokens.shape)
    require("allowed", allowed, torch.bool, *tree_tokens.shape)
    current = torch.zeros_like(tree_tokens[:, :1])
    alive = torch.ones_like(current, dtype=torch.bool)
    path = [current]
    for _ in range(num_steps):
        is_next = (parents == current) & (tree_tokens == chosen.gather(1, current)) & allowed & alive
        alive = is_next.any(dim=1, keepdim=True)
        current = torch.where(alive, is_next.to(torch.int8).argmax(dim=1, keepdim=True), current)
        path.append(torch.where(alive, current, -1))
    nodes = torch.cat(path, dim=1)
    tokens = torch.where(nodes >= 0, chosen.gather(1, nodes.clamp_min(0)), 0)
    return AcceptedPath((nodes >= 0).sum(dim=1, dtype=torch.int32) - 1, nodes.to(torch.int32), tokens)


def permute_tail_reference(
    slot_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor, num_nodes: int
) -> None:
    """Reorder, in place, the N slots behind each row's length.

    slot_table int32 [R, C]; rows, lengths, num_accepted int32 [B]; path int32 [B, S+1]; lengths + N <= C. A row number may occur
    twice only if that row's slots are all the same (the dummy row).
    """
    require("slot_table", slot_table, torch.int32, -1, -1)
    require("rows", rows, torch.int32, -1)
    require("lengths", lengths, torch.int32, rows.shape[0])
    require("path", path, torch.int32, rows.shape[0], -1)
    require("num_accepted", num_accepted, torch.int32, rows.shape[0])
    node = torch.arange(num_nodes, device=path.device)
    step = torch.arange(path.shape[1], device=path.device)
    on_path = (path[:, :, None] == node) & (step[:, None] <= num_accepted[:, None, None])  # [B, S+1, N]
    is_accepted = on_path.any(dim=1)
    rank_behind = torch.cumsum(~is_accepted, dim=1) - 1
    target = torch.where(is_accepted, (on_path * step[:, None]).sum(dim=1), num_accepted[:, None] + 1 + rank_behind)
    first = lengths[:, None].to(torch.int64)
    row = rows[:, None].to(torch.int64)
    slots = slot_table[row, first + node]
    slot_table[row, first + target] = slots
