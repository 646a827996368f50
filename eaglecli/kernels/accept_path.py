# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""Walk the verified tree along the target's own choices, and move the accepted nodes' slots to the front of the row's tail.

    accept_path     from the root, step to the child that carries the token chosen at the current node, while there is one
    permute_tail    slots [L, L + N) of a row held the tree nodes 0 .. N-1; afterwards they hold the path, then the others

The emitted tokens are the choices at the path's nodes: the accepted drafts, then the bonus token. Nothing is copied but slot
numbers; a row stays a permutation of the slots it owns.
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
def _accept_path_kernel(
    tree_tokens_ptr, parents_ptr, chosen_ptr, allowed_ptr, num_accepted_ptr, path_ptr, tokens_ptr,
    NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, NUM_STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODE_BLOCK)
    nodes = row * NUM_NODES + node
    inside = node < NUM_NODES
    tree_token = tl.load(tree_tokens_ptr + nodes, mask=inside, other=0)
    parent = tl.load(parents_ptr + nodes, mask=inside, other=-1)
    allowed = tl.load(allowed_ptr + nodes, mask=inside, other=0) != 0
    out = row * (NUM_STEPS + 1)
    current = 0
    num_accepted = 0
    choice = tl.load(chosen_ptr + row * NUM_NODES)
    tl.store(path_ptr + out, 0)
    tl.store(tokens_ptr + out, choice)
    alive = True
    for step in tl.static_range(1, NUM_STEPS + 1):
        is_next = inside & allowed & (parent == current) & (tree_token == choice)
        found = tl.min(tl.where(is_next, node, NODE_BLOCK), axis=0)
        alive = alive & (found < NODE_BLOCK)
        current = tl.where(alive, found, current)
        choice = tl.load(chosen_ptr + row * NUM_NODES + current)
        num_accepted += alive.to(tl.int32)
        tl.store(path_ptr + out + step, tl.where(alive, current, -1))
        tl.store(tokens_ptr + out + step, tl.where(alive, choice, 0))
    tl.store(num_accepted_ptr + row, num_accepted)


def accept_path_triton(
    tree_tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor, num_steps: int
) -> AcceptedPath:
    """Launch one program per row; see `accept_path`."""
    _check_tree(tree_tokens, parents, chosen, allowed, num_steps)
    num_rows, num_nodes = tree_tokens.shape
    out = AcceptedPath(
        num_accepted=torch.empty(num_rows, dtype=torch.int32, device=tree_tokens.device),
        path=torch.empty(num_rows, num_steps + 1, dtype=torch.int32, device=tree_tokens.device),
        tokens=torch.empty(num_rows, num_steps + 1, dtype=torch.int64, device=tree_tokens.device),
    )
    if num_rows:
        _accept_path_kernel[(num_rows,)](
            tree_tokens, parents, chosen, allowed, out.num_accepted, out.path, out.tokens,
            NUM_NODES=num_nodes, NODE_BLOCK=triton.next_power_of_2(num_nodes), NUM_STEPS=num_steps, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _permute_tail_kernel(
    slot_table_ptr, rows_ptr, lengths_ptr, path_ptr, num_accepted_ptr, num_columns,
    NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, PATH_WIDTH: tl.constexpr,
):  # fmt: skip
    batch_row = tl.program_id(0).to(tl.int64)
    tail = tl.load(rows_ptr + batch_row).to(tl.int64) * num_columns + tl.load(lengths_ptr + batch_row)
    num_accepted = tl.load(num_accepted_ptr + batch_row)
    node = tl.arange(0, NODE_BLOCK)
    inside = node < NUM_NODES
    place = tl.full([NODE_BLOCK], -1, tl.int32)
    for step in tl.static_range(PATH_WIDTH):
        path_node = tl.load(path_ptr + batch_row * PATH_WIDTH + step)
        place = tl.where((node == path_node) & (step <= num_accepted), step, place)
    is_behind = inside & (place < 0)
    place = tl.where(is_behind, num_accepted + tl.cumsum(is_behind.to(tl.int32), axis=0), place)
    slots = tl.load(slot_table_ptr + tail + node, mask=inside, other=0)
    tl.debug_barrier()  # every slot is read before any is overwritten
    tl.store(slot_table_ptr + tail + place, slots, mask=inside)


def permute_tail_triton(
    slot_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor, num_nodes: int
) -> None:
    """Launch one program per row; see `permute_tail`."""
    _check_tail(slot_table, rows, lengths, path, num_accepted, num_nodes)
    if rows.shape[0]:
        _permute_tail_kernel[(rows.shape[0],)](
            slot_table, rows, lengths, path, num_accepted, slot_table.shape[1],
            NUM_NODES=num_nodes, NODE_BLOCK=triton.next_power_of_2(num_nodes), PATH_WIDTH=path.shape[1], num_warps=1,
        )  # fmt: skip


def accept_path_reference(
    tree_tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor, num_steps: int
) -> AcceptedPath:
    """See `accept_path`."""
    _check_tree(tree_tokens, parents, chosen, allowed, num_steps)
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
    """See `permute_tail`."""
    _check_tail(slot_table, rows, lengths, path, num_accepted, num_nodes)
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


def _check_tree(tree_tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor, num_steps: int) -> None:
    require("tree_tokens", tree_tokens, torch.int64, -1, -1)
    require("parents", parents, torch.int32, *tree_tokens.shape)
    require("chosen", chosen, torch.int64, *tree_tokens.shape)
    require("allowed", allowed, torch.bool, *tree_tokens.shape)
    if num_steps < 0:
        raise ValueError(f"num_steps must not be negative, got {num_steps}")


def _check_tail(
    slot_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor, num_nodes: int
) -> None:
    require("slot_table", slot_table, torch.int32, -1, -1)
    require("rows", rows, torch.int32, -1)
    require("lengths", lengths, torch.int32, rows.shape[0])
    require("path", path, torch.int32, rows.shape[0], -1)
    require("num_accepted", num_accepted, torch.int32, rows.shape[0])
    if not 1 <= num_nodes <= slot_table.shape[1]:
        raise ValueError(f"a row of {slot_table.shape[1]} slots has no tail of {num_nodes} nodes")


def accept_path(
    tree_tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor, num_steps: int
) -> AcceptedPath:
    """Accepted drafts and emitted tokens of every row.

    tree_tokens int64 [B, N], parents int32 [B, N] (-1 for the root), chosen int64 [B, N] (the target's token after each node),
    allowed bool [B, N] (False: the node must not be accepted; the root always is), num_steps = S bounds the walk.
    """
    if tree_tokens.is_cuda:
        return accept_path_triton(tree_tokens, parents, chosen, allowed, num_steps)
    return accept_path_reference(tree_tokens, parents, chosen, allowed, num_steps)


def permute_tail(
    slot_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor, num_nodes: int
) -> None:
    """Reorder, in place, the N slots behind each row's length.

    slot_table int32 [R, C]; rows, lengths, num_accepted int32 [B]; path int32 [B, S+1]; lengths + N <= C. A row number may occur
    twice only if that row's slots are all the same (the dummy row).
    """
    if slot_table.is_cuda:
        permute_tail_triton(slot_table, rows, lengths, path, num_accepted, num_nodes)
    else:
        permute_tail_reference(slot_table, rows, lengths, path, num_accepted, num_nodes)
