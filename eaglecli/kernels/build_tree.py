# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""The draft tree: grown level by level from the best beams, then cut to the best nodes (EAGLE-2, Li et al., EMNLP 2024).

Pool index of a candidate: level 0 has 0 .. K-1; level l >= 1 has K + K*K*(l-1) + row*K + child, where `row` is the beam it
grew from. Its score is the float32 sum of log q on its path. Order everywhere: higher score, then lower pool index. A child
never scores above its parent and has the higher index, so the best nodes are closed under parents, ties and -inf included.

    start_beams          the pool, and level 0 in it: the top-k that the extend stage left
    expand_beams         one further level
    select_nodes         pool -> the tree to verify
    root_only_tree       the tree of plain decoding
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.draft_topk import DraftCandidates
from eaglecli.kernels.launch import launch_options, start_dependent

_TILE = 32  # candidates compared at a time


@dataclass(frozen=True, eq=False)
class CandidatePool:
    """All P candidates of each row, level after level."""

    score: torch.Tensor  # float32 [B, P]
    token: torch.Tensor  # int64 [B, P]
    parent: torch.Tensor  # int32 [B, P] pool index of the parent, -1 = root


@dataclass(frozen=True, eq=False)
class Beams:
    """The K best candidates of one level, best first: what the next step runs."""

    score: torch.Tensor  # float32 [B, K]
    token: torch.Tensor  # int64 [B, K]
    row: torch.Tensor  # int32 [B, K] which of the K rows just run is the parent
    pool: torch.Tensor  # int32 [B, K] own pool index


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Nodes in ascending pool index behind the root (node 0): parents come before children."""

    tokens: torch.Tensor  # int64 [B, N]
    parents: torch.Tensor  # int32 [B, N] node number, -1 for the root
    depths: torch.Tensor  # int32 [B, N]
    ancestor_mask: torch.Tensor  # bool [B, N, N]: [b, n, m] = m is n or an ancestor of n


def empty_tree(num_rows: int, num_nodes: int, device: torch.device) -> DraftTree:
    """An unwritten tree."""
    return DraftTree(
        tokens=torch.empty(num_rows, num_nodes, dtype=torch.int64, device=device),
        parents=torch.empty(num_rows, num_nodes, dtype=torch.int32, device=device),
        depths=torch.empty(num_rows, num_nodes, dtype=torch.int32, device=device),
        ancestor_mask=torch.empty(num_rows, num_nodes, num_nodes, dtype=torch.bool, device=device),
    )


def _empty_pool(num_rows: int, num_candidates: int, device: torch.device) -> CandidatePool:
    return CandidatePool(
        score=torch.empty(num_rows, num_candidates, dtype=torch.float32, device=device),
        token=torch.empty(num_rows, num_candidates, dtype=torch.int64, device=device),
        parent=torch.empty(num_rows, num_candidates, dtype=torch.int32, device=device),
    )


def _empty_beams(num_rows: int, topk: int, device: torch.device) -> Beams:
    return Beams(
        score=torch.empty(num_rows, topk, dtype=torch.float32, device=device),
        token=torch.empty(num_rows, topk, dtype=torch.int64, device=device),
        row=torch.empty(num_rows, topk, dtype=torch.int32, device=device),
        pool=torch.empty(num_rows, topk, dtype=torch.int32, device=device),
    )


def _first_of_level(level: int, topk: int) -> int:
    """Pool index of the first candidate of a level."""
    return topk + topk * topk * (level - 1) if level else 0


@triton.jit
def _start_beams_kernel(
    rows_ptr, log_q_ptr, token_ptr, pool_score_ptr, pool_token_ptr, pool_parent_ptr,
    beam_score_ptr, beam_token_ptr, beam_row_ptr, beam_pool_ptr, num_pool, num_candidates, TOPK: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    beam = tl.arange(0, BLOCK)
    inside = beam < TOPK
    score = tl.load(log_q_ptr + row * num_candidates + beam, mask=inside, other=0.0)
    token = tl.load(token_ptr + row * num_candidates + beam, mask=inside, other=0)
    pool = batch_row * num_pool + beam
    tl.store(pool_score_ptr + pool, score, mask=inside)
    tl.store(pool_token_ptr + pool, token, mask=inside)
    tl.store(pool_parent_ptr + pool, tl.full([BLOCK], -1, tl.int32), mask=inside)
    beams = batch_row * TOPK + beam
    tl.store(beam_score_ptr + beams, score, mask=inside)
    tl.store(beam_token_ptr + beams, token, mask=inside)
    tl.store(beam_row_ptr + beams, tl.zeros([BLOCK], tl.int32), mask=inside)
    tl.store(beam_pool_ptr + beams, beam, mask=inside)


def start_beams_triton(
    rows: torch.Tensor, candidates: DraftCandidates, num_levels: int, topk: int | None = None
) -> tuple[CandidatePool, Beams]:
    """One launch, one program a row; see `start_beams`."""
    topk = _check_start(rows, candidates, num_levels, topk)
    num_rows = rows.shape[0]
    pool = _empty_pool(num_rows, _first_of_level(num_levels, topk), rows.device)
    beams = _empty_beams(num_rows, topk, rows.device)
    if num_rows:
        _start_beams_kernel[(num_rows,)](
            rows, candidates.log_q, candidates.token, pool.score, pool.token, pool.parent, beams.score, beams.token, beams.row, beams.pool,
            pool.score.shape[1], candidates.token.shape[1], TOPK=topk, BLOCK=triton.next_power_of_2(topk), num_warps=1,
            **launch_options(rows.device),
        )  # fmt: skip
    return pool, beams


@triton.jit
def _expand_beams_kernel(
    beam_score_ptr, beam_pool_ptr, child_log_q_ptr, child_token_ptr, pool_score_ptr, pool_token_ptr, pool_parent_ptr,
    out_score_ptr, out_token_ptr, out_row_ptr, out_pool_ptr,
    first_pool, num_pool, TOPK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    num_candidates: tl.constexpr = TOPK * TOPK
    beams, children, pool = row * TOPK, row * num_candidates, row * num_pool + first_pool
    index = tl.arange(0, BLOCK)
    inside = index < num_candidates
    beam = index // TOPK
    score = tl.load(beam_score_ptr + beams + beam, mask=inside, other=0.0)
    score += tl.load(child_log_q_ptr + children + index, mask=inside, other=0.0)
    token = tl.load(child_token_ptr + children + index, mask=inside, other=0)
    tl.store(pool_score_ptr + pool + index, score, mask=inside)
    tl.store(pool_token_ptr + pool + index, token, mask=inside)
    tl.store(pool_parent_ptr + pool + index, tl.load(beam_pool_ptr + beams + beam, mask=inside, other=0), mask=inside)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in tl.static_range(0, num_candidates, TILE):
        other = first + tl.arange(0, TILE)
        is_candidate = other < num_candidates
        other_score = tl.load(beam_score_ptr + beams + other // TOPK, mask=is_candidate, other=0.0)
        other_score += tl.load(child_log_q_ptr + children + other, mask=is_candidate, other=0.0)
        better = (other_score[None, :] > score[:, None]) | ((other_score[None, :] == score[:, None]) & (other[None, :] < index[:, None]))
        rank += tl.sum((better & is_candidate[None, :]).to(tl.int32), axis=1)
    is_beam = inside & (rank < TOPK)
    tl.store(out_score_ptr + beams + rank, score, mask=is_beam)
    tl.store(out_token_ptr + beams + rank, token, mask=is_beam)
    tl.store(out_row_ptr + beams + rank, beam, mask=is_beam)
    tl.store(out_pool_ptr + beams + rank, first_pool + index, mask=is_beam)


def expand_beams_triton(level: int, beams: Beams, children: DraftCandidates, pool: CandidatePool) -> Beams:
    """One launch, one program a row; see `expand_beams`."""
    _check_beams(level, beams, children, pool)
    num_rows, topk = beams.score.shape
    out = _empty_beams(num_rows, topk, beams.score.device)
    if num_rows:
        _expand_beams_kernel[(num_rows,)](
            beams.score, beams.pool, children.log_q, children.token, pool.score, pool.token, pool.parent,
            out.score, out.token, out.row, out.pool, _first_of_level(level, topk), pool.score.shape[1],
            TOPK=topk, BLOCK=triton.next_power_of_2(topk * topk), TILE=_TILE, **launch_options(beams.score.device),
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
    score_ptr, token_ptr, parent_ptr, rows_ptr, root_ptr, out_token_ptr, out_parent_ptr, out_depth_ptr, out_mask_ptr,
    NUM_POOL: tl.constexpr, POOL_BLOCK: tl.constexpr, NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
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
    token = tl.where(node == 0, tl.load(root_ptr + tl.load(rows_ptr + row)), token)
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


def select_nodes_triton(pool: CandidatePool, rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    """One launch, one program a row; see `select_nodes`."""
    _check_pool(pool, rows, root_token, out)
    num_rows, num_pool = pool.score.shape
    num_nodes = out.tokens.shape[1]
    if num_rows:
        _select_nodes_kernel[(num_rows,)](
            pool.score, pool.token, pool.parent, rows, root_token, out.tokens, out.parents, out.depths, out.ancestor_mask,
            NUM_POOL=num_pool, POOL_BLOCK=triton.next_power_of_2(num_pool),
            NUM_NODES=num_nodes, NODE_BLOCK=triton.next_power_of_2(num_nodes),
            TILE=_TILE, num_warps=4 if num_pool <= 256 else 16, **launch_options(pool.score.device),
        )  # fmt: skip


@triton.jit
def _root_only_tree_kernel(
    rows_ptr, root_ptr, tokens_ptr, parents_ptr, depths_ptr, mask_ptr, num_rows, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    start_dependent(DEPENDENT)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    tl.store(tokens_ptr + index, tl.load(root_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(parents_ptr + index, tl.full([BLOCK], -1, tl.int32), mask=inside)
    tl.store(depths_ptr + index, tl.zeros([BLOCK], tl.int32), mask=inside)
    tl.store(mask_ptr + index, tl.full([BLOCK], 1, tl.int1), mask=inside)


def root_only_tree_triton(rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    """One launch; see `root_only_tree`."""
    _check_tree(rows, root_token, out, 1)
    num_rows = rows.shape[0]
    if num_rows:
        _root_only_tree_kernel[(triton.cdiv(num_rows, 256),)](
            rows,
            root_token,
            out.tokens,
            out.parents,
            out.depths,
            out.ancestor_mask,
            num_rows,
            BLOCK=256,
            num_warps=1,
            **launch_options(rows.device),
        )


def start_beams_reference(
    rows: torch.Tensor, candidates: DraftCandidates, num_levels: int, topk: int | None = None
) -> tuple[CandidatePool, Beams]:
    """See `start_beams`."""
    topk = _check_start(rows, candidates, num_levels, topk)
    score, token = candidates.log_q[rows, :topk], candidates.token[rows, :topk]
    pool = _empty_pool(rows.shape[0], _first_of_level(num_levels, topk), rows.device)
    pool.score[:, :topk], pool.token[:, :topk], pool.parent[:, :topk] = score, token, -1
    index = torch.arange(topk, dtype=torch.int32, device=rows.device).repeat(rows.shape[0], 1)
    return pool, Beams(score, token, torch.zeros_like(index), index)


def expand_beams_reference(level: int, beams: Beams, children: DraftCandidates, pool: CandidatePool) -> Beams:
    """See `expand_beams`."""
    _check_beams(level, beams, children, pool)
    num_rows, topk = beams.score.shape
    score = beams.score.repeat_interleave(topk, 1) + children.log_q.view(num_rows, -1)
    token = children.token.view(num_rows, -1)
    first = _first_of_level(level, topk)
    part = slice(first, first + topk * topk)
    pool.score[:, part], pool.token[:, part], pool.parent[:, part] = score, token, beams.pool.repeat_interleave(topk, 1)
    best = torch.sort(score, dim=1, descending=True, stable=True).indices[:, :topk]
    return Beams(score.gather(1, best), token.gather(1, best), (best // topk).to(torch.int32), (best + first).to(torch.int32))


def select_nodes_reference(pool: CandidatePool, rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    """See `select_nodes`."""
    _check_pool(pool, rows, root_token, out)
    num_nodes = out.tokens.shape[1]
    best = torch.sort(pool.score, dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]
    kept = best.sort(dim=1).values
    node = torch.arange(1, num_nodes, device=kept.device).expand_as(kept)
    # Entry 0 stands for the root (parent -1), entry i + 1 for pool index i.
    node_of_pool = torch.zeros(pool.score.shape[0], pool.score.shape[1] + 1, dtype=torch.int64, device=kept.device)
    node_of_pool = node_of_pool.scatter(1, kept + 1, node)
    parents = node_of_pool.gather(1, pool.parent.gather(1, kept).to(torch.int64) + 1)
    root = root_token[rows][:, None]
    parents = torch.cat([torch.full_like(root, -1), parents], dim=1)
    mask = _ancestor_mask(parents)
    out.tokens.copy_(torch.cat([root, pool.token.gather(1, kept)], dim=1))
    out.parents.copy_(parents)
    out.depths.copy_(mask.sum(dim=2) - 1)
    out.ancestor_mask.copy_(mask)


def root_only_tree_reference(rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    """See `root_only_tree`."""
    _check_tree(rows, root_token, out, 1)
    out.tokens.copy_(root_token[rows][:, None])
    out.parents.fill_(-1)
    out.depths.zero_()
    out.ancestor_mask.fill_(True)


def _ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """parents int64 [B, N] -> bool [B, N, N]: squaring (self or parent) doubles how far up it reaches."""
    num_nodes = parents.shape[1]
    node = torch.arange(num_nodes, device=parents.device)
    reach = ((node[:, None] == node) | (parents[:, :, None] == node)).to(torch.float32)
    for _ in range((num_nodes - 1).bit_length()):
        reach = torch.bmm(reach, reach).clamp_max(1.0)
    return reach > 0.0


def _check_start(rows: torch.Tensor, candidates: DraftCandidates, num_levels: int, topk: int | None) -> int:
    if num_levels < 1:
        raise ValueError(f"a tree has level 0 at least, got {num_levels} levels")
    require("rows", rows, torch.int32, -1)
    require("log_q", candidates.log_q, torch.float32, -1, -1)
    require("token", candidates.token, torch.int64, *candidates.log_q.shape)
    num_candidates = candidates.token.shape[1]
    if topk is not None and not 1 <= topk <= num_candidates:
        raise ValueError(f"a row has {num_candidates} candidates, {topk} beams cannot start from them")
    return num_candidates if topk is None else topk


def _check_beams(level: int, beams: Beams, children: DraftCandidates, pool: CandidatePool) -> None:
    if level < 1:
        raise ValueError(f"level 0 is start_beams', expand_beams begins at level 1, got {level}")
    require("beam score", beams.score, torch.float32, -1, -1)
    num_rows, topk = beams.score.shape
    require("beam pool index", beams.pool, torch.int32, num_rows, topk)
    require("children's log_q", children.log_q, torch.float32, num_rows * topk, topk)
    require("children's token", children.token, torch.int64, num_rows * topk, topk)
    _require_pool(pool, num_rows)
    if _first_of_level(level + 1, topk) > pool.score.shape[1]:
        raise ValueError(f"a pool of {pool.score.shape[1]} candidates has no level {level}")


def _require_pool(pool: CandidatePool, num_rows: int) -> None:
    require("pool score", pool.score, torch.float32, num_rows, -1)
    require("pool token", pool.token, torch.int64, *pool.score.shape)
    require("pool parent", pool.parent, torch.int32, *pool.score.shape)


def _check_pool(pool: CandidatePool, rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    _require_pool(pool, rows.shape[0])
    num_nodes = out.tokens.shape[-1]
    if not 2 <= num_nodes <= pool.score.shape[1] + 1:
        raise ValueError(f"a pool of {pool.score.shape[1]} candidates cannot give a tree of {num_nodes} nodes")
    _check_tree(rows, root_token, out, num_nodes)


def _check_tree(rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree, num_nodes: int) -> None:
    num_rows = rows.shape[0]
    require("rows", rows, torch.int32, -1)
    require("root_token", root_token, torch.int64, -1)
    require("tree tokens", out.tokens, torch.int64, num_rows, num_nodes)
    require("tree parents", out.parents, torch.int32, num_rows, num_nodes)
    require("tree depths", out.depths, torch.int32, num_rows, num_nodes)
    require("tree mask", out.ancestor_mask, torch.bool, num_rows, num_nodes, num_nodes)


def start_beams(rows: torch.Tensor, candidates: DraftCandidates, num_levels: int, topk: int | None = None) -> tuple[CandidatePool, Beams]:
    """A pool with room for `num_levels` levels of `topk` branches (None: all candidates), level 0 written, and its beams.

    rows int32 [B]; candidates [R, K >= topk] of the row state, best first, all grown from each row's root: the first topk are taken.
    """
    launch = start_beams_triton if rows.is_cuda else start_beams_reference
    return launch(rows, candidates, num_levels, topk)


def expand_beams(level: int, beams: Beams, children: DraftCandidates, pool: CandidatePool) -> Beams:
    """Write the candidates of level >= 1 into the pool; the next beams.

    children [B * K, K]: those of beam k of row b are row b * K + k.
    """
    launch = expand_beams_triton if beams.score.is_cuda else expand_beams_reference
    return launch(level, beams, children, pool)


def select_nodes(pool: CandidatePool, rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    """Fill `out` with the root and the N - 1 best of the pool.

    rows int32 [B] name the roots in root_token int64 [R]. Raises ValueError when the pool is too small.
    """
    launch = select_nodes_triton if rows.is_cuda else select_nodes_reference
    launch(pool, rows, root_token, out)


def root_only_tree(rows: torch.Tensor, root_token: torch.Tensor, out: DraftTree) -> None:
    """Plain decoding: fill `out` with trees of one node, the roots that rows int32 [B] name in root_token int64 [R]."""
    launch = root_only_tree_triton if rows.is_cuda else root_only_tree_reference
    launch(rows, root_token, out)
