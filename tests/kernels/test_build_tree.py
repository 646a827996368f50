"""Draft trees: the worked examples, brute force over random pools, ties and -inf; kernels against references."""

import math
import random
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import pytest
import torch

from eaglecli.kernels.build_tree import (
    Beams,
    CandidatePool,
    DraftTree,
    empty_tree,
    expand_beams_reference,
    expand_beams_triton,
    root_only_tree_reference,
    root_only_tree_triton,
    select_nodes_reference,
    select_nodes_triton,
    start_beams_reference,
    start_beams_triton,
)
from eaglecli.kernels.draft_topk import DraftCandidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TreeKernels(NamedTuple):
    start: Callable
    expand: Callable
    select: Callable


REFERENCE = TreeKernels(start_beams_reference, expand_beams_reference, select_nodes_reference)
TRITON = TreeKernels(start_beams_triton, expand_beams_triton, select_nodes_triton)
IMPLEMENTATIONS = pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=["reference", "triton"])
R, A, B, C, D, E, F, G, H, I, J = range(11)  # noqa: E741 - the names of the worked examples


def assert_equal(out: Beams | CandidatePool | DraftTree, expected: Beams | CandidatePool | DraftTree) -> None:
    for field in fields(expected):
        have, want = getattr(out, field.name), getattr(expected, field.name)
        assert have.dtype == want.dtype, field.name
        assert torch.equal(have, want), field.name


def grow(kernels: TreeKernels, log_q: list[torch.Tensor], token: list[torch.Tensor]) -> tuple[CandidatePool, list[Beams]]:
    """The full pool and the beams of each level; row b of the batch is the row of the state before the last b."""
    num_rows, topk = log_q[0].shape
    rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE).flip(0)
    pool, beams = kernels.start(rows, DraftCandidates(log_q[0].flip(0), token[0].flip(0)), len(log_q))
    levels = [beams]
    for level in range(1, len(log_q)):
        children = DraftCandidates(log_q[level].view(-1, topk), token[level].view(-1, topk))
        levels.append(kernels.expand(level, levels[-1], children, pool))
    return pool, levels


def select(kernels: TreeKernels, pool: CandidatePool, root: list[int], num_nodes: int) -> DraftTree:
    """The trees of rows 0, 1, ... with these roots."""
    tree = empty_tree(len(root), num_nodes, torch.device(DEVICE))
    rows = torch.arange(len(root), dtype=torch.int32, device=DEVICE).flip(0)
    kernels.select(pool, rows, torch.tensor(root, device=DEVICE).flip(0), tree)
    return tree


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities], device=DEVICE)


def example(num_levels: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The two worked examples of draft-checkpoints 4.5 (two levels) and 4.6 (three)."""
    log_q = [logs(0.6, 0.3).view(1, 2), logs(0.7, 0.2, 0.5, 0.4).view(1, 2, 2), logs(0.9, 0.05, 0.5, 0.3).view(1, 2, 2)]
    token = [torch.tensor(ids, device=DEVICE).view(1, 2, -1) for ids in ([A, B], [C, D, E, F], [G, H, I, J])]
    return log_q[:num_levels], [token[0].view(1, 2), *token[1:num_levels]]


@IMPLEMENTATIONS
def test_two_levels_of_two_branches_give_the_first_worked_tree(kernels: TreeKernels) -> None:
    pool, _ = grow(kernels, *example(2))
    assert pool.parent.tolist() == [[-1, -1, 0, 0, 1, 1]]
    torch.testing.assert_close(pool.score.exp().cpu(), torch.tensor([[0.6, 0.3, 0.42, 0.12, 0.15, 0.12]]))
    tree = select(kernels, pool, [R], 4)
    assert tree.tokens.tolist() == [[R, A, B, C]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2]]
    assert tree.ancestor_mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]


@IMPLEMENTATIONS
def test_three_levels_of_two_branches_give_the_second_worked_tree(kernels: TreeKernels) -> None:
    pool, levels = grow(kernels, *example(3))
    assert levels[1].token.tolist() == [[C, E]]
    assert levels[1].row.tolist() == [[0, 1]]
    assert levels[1].pool.tolist() == [[2, 4]]
    tree = select(kernels, pool, [R], 6)
    assert tree.tokens.tolist() == [[R, A, B, C, E, G]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 3]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    rows = ["100000", "110000", "101000", "110100", "101010", "110101"]
    assert tree.ancestor_mask.int().tolist() == [[[int(bit) for bit in row] for row in rows]]


@IMPLEMENTATIONS
def test_one_branch_gives_a_chain(kernels: TreeKernels) -> None:
    log_q = [logs(0.5).view(1, 1)] + [logs(0.5).view(1, 1, 1)] * 3
    token = [torch.tensor([[10]], device=DEVICE)] + [torch.tensor([[[id_]]], device=DEVICE) for id_ in (11, 12, 13)]
    tree = select(kernels, grow(kernels, log_q, token)[0], [9], 5)
    assert tree.tokens.tolist() == [[9, 10, 11, 12, 13]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert torch.equal(tree.ancestor_mask[0].cpu(), torch.ones(5, 5, dtype=torch.bool).tril())


@IMPLEMENTATIONS
def test_fewer_branches_start_from_the_first_candidates(kernels: TreeKernels) -> None:
    log_q, token = torch.tensor([logs(0.1, 0.5, 0.3).tolist(), logs(0.6, 0.2, 0.1).tolist()], device=DEVICE), torch.arange(6, device=DEVICE)
    pool, beams = kernels.start(torch.tensor([1, 0], dtype=torch.int32, device=DEVICE), DraftCandidates(log_q, token.view(2, 3)), 1, 2)
    assert beams.token.tolist() == [[3, 4], [0, 1]]
    assert torch.equal(pool.score, log_q[[1, 0], :2])
    with pytest.raises(ValueError, match="4 beams"):
        kernels.start(torch.tensor([1], dtype=torch.int32, device=DEVICE), DraftCandidates(log_q, token.view(2, 3)), 1, 4)


def random_levels(topk: int, num_steps: int, num_rows: int, hard: bool, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """log q <= 0; `hard`: many ties, zeros (certain children) and -inf."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, topk)] + [(num_rows, topk, topk)] * (num_steps - 1)
    log_q, token = [], []
    for shape in shapes:
        values = -3 * torch.rand(shape, generator=generator)
        if hard:
            values = values.round()
            values[torch.rand(shape, generator=generator) < 0.15] = -math.inf
        log_q.append(values.to(DEVICE))
        token.append(torch.randint(0, 100_000, shape, generator=generator).to(DEVICE))
    return log_q, token


def brute_force(log_q: list[torch.Tensor], token: list[torch.Tensor], row: int, root: int, num_nodes: int) -> tuple[list, list, list, list]:
    """One row's tree with lists: nodes are (score, pool index, token, ancestors' pool indices from the root down)."""
    best_first = lambda nodes: sorted(nodes, key=lambda node: (-node[0], node[1]))  # noqa: E731
    topk = log_q[0].shape[1]
    beams = [(log_q[0][row, i], i, token[0][row, i].item(), ()) for i in range(topk)]
    pool = list(beams)
    for level in range(1, len(log_q)):
        first = topk + topk * topk * (level - 1)
        children = [
            (beam[0] + log_q[level][row, i, j], first + i * topk + j, token[level][row, i, j].item(), (*beam[3], beam[1]))
            for i, beam in enumerate(beams)
            for j in range(topk)
        ]
        pool += children
        beams = best_first(children)[:topk]
    kept = sorted(best_first(pool)[: num_nodes - 1], key=lambda node: node[1])
    number = {node[1]: n + 1 for n, node in enumerate(kept)}
    tokens = [root] + [node[2] for node in kept]
    parents = [-1] + [number[node[3][-1]] if node[3] else 0 for node in kept]
    depths = [0] + [len(node[3]) + 1 for node in kept]
    seen = [{0}] + [{0, number[node[1]], *(number[a] for a in node[3])} for node in kept]
    return tokens, parents, depths, [[m in see for m in range(num_nodes)] for see in seen]


@pytest.mark.parametrize("seed", range(30))
def test_any_tree_equals_brute_force_and_is_closed_under_parents(seed: int) -> None:
    rng = random.Random(seed)
    topk, num_steps = rng.randint(1, 5), rng.randint(1, 6)
    num_nodes = rng.randint(2, 1 + topk + (num_steps - 1) * topk * topk)
    log_q, token = random_levels(topk, num_steps, 3, hard=seed % 2 == 1, seed=seed)
    tree = select(REFERENCE, grow(REFERENCE, log_q, token)[0], [7, 8, 9], num_nodes)
    for row in range(3):
        expected = brute_force(log_q, token, row, 7 + row, num_nodes)
        assert tuple(part[row].tolist() for part in (tree.tokens, tree.parents, tree.depths, tree.ancestor_mask)) == expected


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 4, 5), (1, 1, 2), (4, 1, 3), (4, 5, 8), (4, 3, 30), (6, 4, 40)])
def test_the_kernels_equal_the_references(topk: int, num_steps: int, num_nodes: int, hard: bool) -> None:
    log_q, token = random_levels(topk, num_steps, 2, hard, seed=topk)
    assert_same_trees(log_q, token, num_nodes)


def assert_same_trees(log_q: list[torch.Tensor], token: list[torch.Tensor], num_nodes: int) -> None:
    """Kernels and references agree on pool, beams and trees."""
    (pool, levels), (expected_pool, expected_levels) = grow(TRITON, log_q, token), grow(REFERENCE, log_q, token)
    assert_equal(pool, expected_pool)
    for level, expected_level in zip(levels, expected_levels, strict=True):
        assert_equal(level, expected_level)
    root = list(range(3, 3 + len(log_q[0])))
    assert_equal(select(TRITON, expected_pool, root, num_nodes), select(REFERENCE, expected_pool, root, num_nodes))


@pytest.mark.gpu
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 7, 8), (4, 5, 8), (8, 6, 64), (10, 7, 60)])
def test_the_compiled_kernels_equal_the_references_at_batch_256(topk: int, num_steps: int, num_nodes: int, hard: bool) -> None:
    log_q, token = random_levels(topk, num_steps, 256, hard, seed=topk)
    assert_same_trees(log_q, token, num_nodes)


@pytest.mark.parametrize("fill", [root_only_tree_reference, root_only_tree_triton])
def test_plain_decoding_has_a_tree_of_the_root_alone(fill) -> None:
    tree = empty_tree(3, 1, torch.device(DEVICE))
    for part in (tree.tokens, tree.parents, tree.depths):
        part.fill_(77)
    tree.ancestor_mask.fill_(False)
    fill(torch.tensor([2, 0, 2], dtype=torch.int32, device=DEVICE), torch.tensor([5, 6, 7], device=DEVICE), tree)
    assert tree.tokens.tolist() == [[7], [5], [7]]
    assert (tree.parents.tolist(), tree.depths.tolist()) == ([[-1]] * 3, [[0]] * 3)
    assert tree.ancestor_mask.tolist() == [[[True]]] * 3


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_nodes", [1, 8])
def test_a_tree_that_the_pool_cannot_give_is_a_value_error(kernels: TreeKernels, num_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"6 candidates cannot give a tree of {num_nodes}"):
        select(kernels, grow(kernels, *example(2))[0], [R], num_nodes)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("level", "message"), [(0, "level 1"), (2, "no level 2")])
def test_a_level_that_the_pool_has_no_room_for_is_a_value_error(kernels: TreeKernels, level: int, message: str) -> None:
    log_q, token = example(2)
    pool, levels = grow(kernels, log_q, token)
    with pytest.raises(ValueError, match=message):
        kernels.expand(level, levels[0], DraftCandidates(log_q[1][0], token[1][0]), pool)
