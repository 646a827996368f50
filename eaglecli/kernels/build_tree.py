# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""The draft tree: grown level by level from the best beams, then cut to the best nodes (EAGLE-2, Li et al., EMNLP 2024).

Pool index of a candidate: level 0 has 0 .. K-1; level l >= 1 has K + K*K*(l-1) + row*K + child, where `row` is the beam it
grew from. Its score is the float32 sum of log q on its path. Order everywhere: higher score, then lower pool index. A child
never scores above its parent and has the higher index, so the best nodes are closed under parents, ties and -inf included.

    start_beams          level 0, from the top-k that the extend stage left
    expand_beams         one further level
    select_nodes         pool -> the tree to verify
    root_only_tree       the tree of plain decoding
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require

_TILE = 32  # candidates compared at a time


@dataclass(frozen=True, eq=False)
class BeamExpansion:
    """One level of candidates (Q = K at level 0, else K*K) and the K best of them, best first: the next beams."""

    pool_score: torch.Tensor  # float32 [B, Q]
    pool_token: torch.Tensor  # int64 [B, Q]
    pool_parent: torch.Tensor  # int32 [B, Q] pool index of the parent, -1 = root
    beam_score: torch.Tensor  # float32 [B, K]
    beam_token: torch.Tensor  # int64 [B, K]
    beam_row: torch.Tensor  # int32 [B, K] which of the K rows just run is the parent
    beam_pool: torch.Tensor  # int32 [B, K] own pool index


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Nodes in ascending pool index behind the root (node 0): parents come before children."""

    tokens: torch.Tensor  # int64 [B, N]
    parents: torch.Tensor  # int32 [B, N] node number, -1 for the root
    depths: torch.Tensor  # int32 [B, N]
    ancestor_mask: torch.Tensor  # bool [B, N, N]: [b, n, m] = m is n or an ancestor of n


def start_beams(log_q: torch.Tensor, token: torch.Tensor) -> BeamExpansion:
    """Level 0: log_q float32 [B, K] (best first) and token int64 [B, K] hang on the root, all grown from one row."""
    parent = torch.full_like(token, -1, dtype=torch.int32)
    pool = torch.arange(token.shape[1], dtype=torch.int32, device=token.device).repeat(token.shape[0], 1)
    return BeamExpansion(log_q, token, parent, log_q, token, torch.zeros_like(parent), pool)


@triton.jit
def _expand_beams_kernel(
    beam_score_ptr, child_log_q_ptr, child_token_ptr, parent_ptr,
    pool_score_ptr, pool_token_ptr, pool_parent_ptr, out_score_ptr, out_token_ptr, out_row_ptr, out_pool_ptr,
    first_pool, TOPK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    beams, pool, num_candidates = row * TOPK, row * TOPK * TOPK, TOPK * TOPK
    index = tl.arange(0, BLOCK)
    inside = index < num_candidates
    beam = index // TOPK
    score = tl.load(beam_score_ptr + beams + beam, mask=inside, other=0.0)
    score += tl.load(child_log_q_ptr + pool + index, mask=inside, other=0.0)
    token = tl.load(child_token_ptr + pool + index, mask=inside, other=0)
    tl.store(pool_score_ptr + pool + index, score, mask=inside)
    tl.store(pool_token_ptr + pool + index, token, mask=inside)
    tl.store(pool_parent_ptr + pool + index, tl.load(parent_ptr + beams + beam, mask=inside, other=0), mask=inside)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in tl.static_range(0, TOPK * TOPK, TILE):
        other = first + tl.arange(0, TILE)
        is_candidate = other < num_candidates
        other_score = tl.load(beam_score_ptr + beams + other // TOPK, mask=is_candidate, other=0.0)
        other_score += tl.load(child_log_q_ptr + pool + other, mask=is_candidate, other=0.0)
        better = (other_score[None, :] > score[:, None]) | ((other_score[None, :] == score[:, None]) & (other[None, :] < index[:, None]))
        rank += tl.sum((better & is_candidate[None, :]).to(tl.int32), axis=1)
    is_beam = inside & (rank < TOPK)
    tl.store(out_score_ptr + beams + rank, score, mask=is_beam)
    tl.store(out_token_ptr + beams + rank, token, mask=is_beam)
    tl.store(out_row_ptr + beams + rank, beam, mask=is_beam)
    tl.store(out_pool_ptr + beams + rank, first_pool + index, mask=is_beam)


def expand_beams_triton(
    level: int, beam_score: torch.Tensor, child_log_q: torch.Tensor, child_token: torch.Tensor, child_parent_pool: torch.Tensor
) -> BeamExpansion:
    """Launch one program per row; see `expand_beams`."""
    _check_beams(level, beam_score, child_log_q, child_token, child_parent_pool)
    num_rows, topk = beam_score.shape

    def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=beam_score.device)

    out = BeamExpansion(
        pool_score=empty(topk * topk, torch.float32),
        pool_token=empty(topk * topk, torch.int64),
        pool_parent=empty(topk * topk, torch.int32),
        beam_score=empty(topk, torch.float32),
        beam_token=empty(topk, torch.int64),
        beam_row=empty(topk, torch.int32),
        beam_pool=empty(topk, torch.int32),
    )
    if num_rows:
        _expand_beams_kernel[(num_rows,)](
            beam_score, child_log_q, child_token, child_parent_pool,
            out.pool_score, out.pool_token, out.pool_parent, out.beam_score, out.beam_token, out.beam_row, out.beam_pool,
            topk + topk * topk * (level - 1), TOPK=topk, BLOCK=triton.next_power_of_2(topk * topk), TILE=_TILE,
        )  # fmt: skip
    return out


@triton.jit
def _is_kept(score_ptr, index, cut_score, cut_index, NUM_POOL: tl.constexpr):
    """Whether each pool entry is at or before the last kept one, in the order (score, lowest index)."""
    inside = index < NUM_POOL
    score = tl.load(score_ptr + index, mask=inside, other=0.0)
    return inside & ((score > cut_score) | ((score == cut_score) & (index <= cut_index)))


@triton.jit
def _select_nodes_kernel(
    score_ptr, token_ptr, parent_ptr, root_ptr, out_token_ptr, out_parent_ptr, out_depth_ptr, out_mask_ptr,
    NUM_POOL: tl.constexpr, POOL_BLOCK: tl.constexpr, NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    score_ptr += row * NUM_POOL
    # The last kept entry is the one with exactly NUM_NODES - 2 better ones.
    index = tl.arange(0, POOL_BLOCK)
    score = tl.load(score_ptr + index, mask=index < NUM_POOL, other=0.0)
    rank = tl.zeros([POOL_BLOCK], tl.int32)
    for first in range(0, NUM_POOL, TILE):
        other = first + tl.arange(0, TILE)
        other_score = tl.load(score_ptr + other, mask=other < NUM_POOL, other=0.0)
        better = (other_score[None, :] > score[:, None]) | ((other_score[None, :] == score[:, None]) & (other[None, :] < index[:, None]))
        rank += tl.sum((better & (other < NUM_POOL)[None, :]).to(tl.int32), axis=1)
    is_last = (index < NUM_POOL) & (rank == NUM_NODES - 2)
    cut_score = tl.sum(tl.where(is_last, score, 0.0), axis=0)
    cut_index = tl.sum(tl.where(is_last, index, 0), axis=0)
    # Node n > 0 is the n-th kept entry in ascending pool index.
    node = tl.arange(0, NODE_BLOCK)
    pool_index = tl.zeros([NODE_BLOCK], tl.int32)
    num_kept = 0
    for first in range(0, NUM_POOL, TILE):
        other = first + tl.arange(0, TILE)
        kept = _is_kept(score_ptr, other, cut_score, cut_index, NUM_POOL)
        node_of = tl.where(kept, num_kept + tl.cumsum(kept.to(tl.int32), axis=0), -1)
        pool_index += tl.sum(tl.where(node_of[None, :] == node[:, None], other[None, :], 0), axis=1)
        num_kept += tl.sum(kept.to(tl.int32), axis=0)
    is_node = node < NUM_NODES
    is_draft = is_node & (node > 0)
    token = tl.load(token_ptr + row * NUM_POOL + pool_index, mask=is_draft, other=0)
    token = tl.where(node == 0, tl.load(root_ptr + row), token)
    # A parent is kept too, so its node number is the count of kept entries up to it; -1 counts none: the root.
    parent_pool = tl.load(parent_ptr + row * NUM_POOL + pool_index, mask=is_draft, other=-1)
    parent = tl.zeros([NODE_BLOCK], tl.int32)
    for first in range(0, NUM_POOL, TILE):
        other = first + tl.arange(0, TILE)
        kept = _is_kept(score_ptr, other, cut_score, cut_index, NUM_POOL)
        parent += tl.sum((kept[None, :] & (other[None, :] <= parent_pool[:, None])).to(tl.int32), axis=1)
    parent = tl.where(is_draft, parent, -1)
    # All nodes climb to the root together, marking where they pass.
    current = tl.where(is_node, node, -1)
    depth = tl.full([NODE_BLOCK], -1, tl.int32)
    mask = tl.zeros([NODE_BLOCK, NODE_BLOCK], tl.int32)
    while tl.max(current, axis=0) >= 0:
        here = current[:, None] == node[None, :]
        mask |= here.to(tl.int32)
        depth += (current >= 0).to(tl.int32)
        current = tl.where(current >= 0, tl.sum(tl.where(here, parent[None, :], 0), axis=1), -1)
    nodes = row * NUM_NODES + node
    tl.store(out_token_ptr + nodes, token, mask=is_node)
    tl.store(out_parent_ptr + nodes, parent, mask=is_node)
    tl.store(out_depth_ptr + nodes, depth, mask=is_node)
    tl.store(out_mask_ptr + nodes[:, None] * NUM_NODES + node[None, :], mask != 0, mask=is_node[:, None] & is_node[None, :])


def select_nodes_triton(
    pool_score: torch.Tensor, pool_token: torch.Tensor, pool_parent: torch.Tensor, root_token: torch.Tensor, num_draft_tokens: int
) -> DraftTree:
    """Launch one program per row; see `select_nodes`."""
    _check_pool(pool_score, pool_token, pool_parent, root_token, num_draft_tokens)
    num_rows, num_pool = pool_score.shape
    out = DraftTree(
        tokens=torch.empty(num_rows, num_draft_tokens, dtype=torch.int64, device=pool_score.device),
        parents=torch.empty(num_rows, num_draft_tokens, dtype=torch.int32, device=pool_score.device),
        depths=torch.empty(num_rows, num_draft_tokens, dtype=torch.int32, device=pool_score.device),
        ancestor_mask=torch.empty(num_rows, num_draft_tokens, num_draft_tokens, dtype=torch.bool, device=pool_score.device),
    )
    if num_rows:
        _select_nodes_kernel[(num_rows,)](
            pool_score, pool_token, pool_parent, root_token, out.tokens, out.parents, out.depths, out.ancestor_mask,
            NUM_POOL=num_pool, POOL_BLOCK=triton.next_power_of_2(num_pool),
            NUM_NODES=num_draft_tokens, NODE_BLOCK=triton.next_power_of_2(num_draft_tokens),
            TILE=_TILE, num_warps=4 if num_pool <= 256 else 16,
        )  # fmt: skip
    return out


def expand_beams_reference(
    level: int, beam_score: torch.Tensor, child_log_q: torch.Tensor, child_token: torch.Tensor, child_parent_pool: torch.Tensor
) -> BeamExpansion:
    """See `expand_beams`."""
    _check_beams(level, beam_score, child_log_q, child_token, child_parent_pool)
    topk = beam_score.shape[1]
    score = (beam_score[:, :, None] + child_log_q).flatten(1)
    token = child_token.flatten(1)
    parent = child_parent_pool[:, :, None].expand(-1, -1, topk).flatten(1)
    best = torch.sort(score, dim=1, descending=True, stable=True).indices[:, :topk]
    first_pool = topk + topk * topk * (level - 1)
    return BeamExpansion(
        pool_score=score,
        pool_token=token,
        pool_parent=parent,
        beam_score=score.gather(1, best),
        beam_token=token.gather(1, best),
        beam_row=(best // topk).to(torch.int32),
        beam_pool=(best + first_pool).to(torch.int32),
    )


def select_nodes_reference(
    pool_score: torch.Tensor, pool_token: torch.Tensor, pool_parent: torch.Tensor, root_token: torch.Tensor, num_draft_tokens: int
) -> DraftTree:
    """See `select_nodes`."""
    _check_pool(pool_score, pool_token, pool_parent, root_token, num_draft_tokens)
    best = torch.sort(pool_score, dim=1, descending=True, stable=True).indices[:, : num_draft_tokens - 1]
    kept = best.sort(dim=1).values
    node = torch.arange(1, num_draft_tokens, device=kept.device).expand_as(kept)
    # Entry 0 stands for the root (parent -1), entry i + 1 for pool index i.
    node_of_pool = torch.zeros(pool_score.shape[0], pool_score.shape[1] + 1, dtype=torch.int64, device=kept.device)
    node_of_pool = node_of_pool.scatter(1, kept + 1, node)
    parents = node_of_pool.gather(1, pool_parent.gather(1, kept).to(torch.int64) + 1)
    parents = torch.cat([torch.full_like(root_token[:, None], -1), parents], dim=1)
    mask = _ancestor_mask(parents)
    return DraftTree(
        tokens=torch.cat([root_token[:, None], pool_token.gather(1, kept)], dim=1),
        parents=parents.to(torch.int32),
        depths=mask.sum(dim=2, dtype=torch.int32) - 1,
        ancestor_mask=mask,
    )


def _ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """parents int64 [B, N] -> bool [B, N, N]: squaring (self or parent) doubles how far up it reaches."""
    num_nodes = parents.shape[1]
    node = torch.arange(num_nodes, device=parents.device)
    reach = ((node[:, None] == node) | (parents[:, :, None] == node)).to(torch.float32)
    for _ in range((num_nodes - 1).bit_length()):
        reach = torch.bmm(reach, reach).clamp_max(1.0)
    return reach > 0.0


def _check_beams(
    level: int, beam_score: torch.Tensor, child_log_q: torch.Tensor, child_token: torch.Tensor, child_parent_pool: torch.Tensor
) -> None:
    if level < 1:
        raise ValueError(f"level 0 is start_beams', expand_beams begins at level 1, got {level}")
    require("beam_score", beam_score, torch.float32, -1, -1)
    num_rows, topk = beam_score.shape
    require("child_log_q", child_log_q, torch.float32, num_rows, topk, topk)
    require("child_token", child_token, torch.int64, num_rows, topk, topk)
    require("child_parent_pool", child_parent_pool, torch.int32, num_rows, topk)


def _check_pool(
    pool_score: torch.Tensor, pool_token: torch.Tensor, pool_parent: torch.Tensor, root_token: torch.Tensor, num_draft_tokens: int
) -> None:
    require("pool_score", pool_score, torch.float32, -1, -1)
    require("pool_token", pool_token, torch.int64, *pool_score.shape)
    require("pool_parent", pool_parent, torch.int32, *pool_score.shape)
    require("root_token", root_token, torch.int64, pool_score.shape[0])
    if not 2 <= num_draft_tokens <= pool_score.shape[1] + 1:
        raise ValueError(f"a pool of {pool_score.shape[1]} candidates cannot give a tree of {num_draft_tokens} nodes")


def expand_beams(
    level: int, beam_score: torch.Tensor, child_log_q: torch.Tensor, child_token: torch.Tensor, child_parent_pool: torch.Tensor
) -> BeamExpansion:
    """Candidates of level >= 1 and the next beams.

    beam_score float32 [B, K]; child_log_q float32 and child_token int64 [B, K, K] (beam, child); child_parent_pool int32 [B, K],
    the pool index of each beam (`beam_pool` of the level before).
    """
    if beam_score.is_cuda:
        return expand_beams_triton(level, beam_score, child_log_q, child_token, child_parent_pool)
    return expand_beams_reference(level, beam_score, child_log_q, child_token, child_parent_pool)


def select_nodes(
    pool_score: torch.Tensor, pool_token: torch.Tensor, pool_parent: torch.Tensor, root_token: torch.Tensor, num_draft_tokens: int
) -> DraftTree:
    """The root and the num_draft_tokens - 1 best of the pool.

    pool_score float32, pool_token int64, pool_parent int32, all [B, P] (the levels side by side); root_token int64 [B].
    Raises ValueError when the pool is too small.
    """
    if pool_score.is_cuda:
        return select_nodes_triton(pool_score, pool_token, pool_parent, root_token, num_draft_tokens)
    return select_nodes_reference(pool_score, pool_token, pool_parent, root_token, num_draft_tokens)


def root_only_tree(root_token: torch.Tensor) -> DraftTree:
    """Plain decoding: root_token int64 [B] -> a tree of one node per row."""
    tokens = root_token[:, None]
    parents = torch.full_like(tokens, -1, dtype=torch.int32)
    mask = torch.ones_like(tokens, dtype=torch.bool)[:, :, None]
    return DraftTree(tokens, parents, torch.zeros_like(parents), mask)
