"""Draft trees: the worked examples, brute force over random pools, ties and -inf; kernels against references."""

import math
import random
from dataclasses import fields

import pytest
import torch

from eaglecli.kernels.build_tree import (
    BeamExpansion,
    DraftTree,
    expand_beams,
    expand_beams_reference,
    expand_beams_triton,
    root_only_tree,
    select_nodes,
    select_nodes_reference,
    select_nodes_triton,
    start_beams,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize(
    ("expand", "select"), [(expand_beams_reference, select_nodes_reference), (expand_beams_triton, select_nodes_triton)]
)
R, A, B, C, D, E, F, G, H, I, J = range(11)  # noqa: E741 - the names of the worked examples


def assert_equal(out: BeamExpansion | DraftTree, expected: BeamExpansion | DraftTree) -> None:
    for field in fields(expected):
        have, want = getattr(out, field.name), getattr(expected, field.name)
        assert have.dtype == want.dtype, field.name
        assert torch.equal(have, want), field.name


def grow(expand, log_q: list[torch.Tensor], token: list[torch.Tensor]) -> list[BeamExpansion]:
    levels = [start_beams(log_q[0], token[0])]
    for level in range(1, len(log_q)):
        beams = levels[-1]
        levels.append(expand(level, beams.beam_score, log_q[level], token[level], beams.beam_pool))
    return levels


def pool_of(levels: list[BeamExpansion]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat([getattr(level, name) for level in levels], 1) for name in ("pool_score", "pool_token", "pool_parent"))


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities], device=DEVICE)


def example(num_levels: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The two worked examples of draft-checkpoints 4.5 (two levels) and 4.6 (three)."""
    log_q = [logs(0.6, 0.3).view(1, 2), logs(0.7, 0.2, 0.5, 0.4).view(1, 2, 2), logs(0.9, 0.05, 0.5, 0.3).view(1, 2, 2)]
    token = [torch.tensor(ids, device=DEVICE).view(1, 2, -1) for ids in ([A, B], [C, D, E, F], [G, H, I, J])]
    return log_q[:num_levels], [token[0].view(1, 2), *token[1:num_levels]]


@IMPLEMENTATIONS
def test_two_levels_of_two_branches_give_the_first_worked_tree(expand, select) -> None:
    levels = grow(expand, *example(2))
    assert levels[1].pool_parent.tolist() == [[0, 0, 1, 1]]
    torch.testing.assert_close(levels[1].pool_score.exp().cpu(), torch.tensor([[0.42, 0.12, 0.15, 0.12]]))
    tree = select(*pool_of(levels), torch.tensor([R], device=DEVICE), 4)
    assert tree.tokens.tolist() == [[R, A, B, C]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2]]
    assert tree.ancestor_mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]


@IMPLEMENTATIONS
def test_three_levels_of_two_branches_give_the_second_worked_tree(expand, select) -> None:
    levels = grow(expand, *example(3))
    assert levels[1].beam_token.tolist() == [[C, E]]
    assert levels[1].beam_row.tolist() == [[0, 1]]
    assert levels[1].beam_pool.tolist() == [[2, 4]]
    tree = select(*pool_of(levels), torch.tensor([R], device=DEVICE), 6)
    assert tree.tokens.tolist() == [[R, A, B, C, E, G]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 3]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    rows = ["100000", "110000", "101000", "110100", "101010", "110101"]
    assert tree.ancestor_mask.int().tolist() == [[[int(bit) for bit in row] for row in rows]]


@IMPLEMENTATIONS
def test_one_branch_gives_a_chain(expand, select) -> None:
    log_q = [logs(0.5).view(1, 1)] + [logs(0.5).view(1, 1, 1)] * 3
    token = [torch.tensor([[10]], device=DEVICE)] + [torch.tensor([[[id_]]], device=DEVICE) for id_ in (11, 12, 13)]
    tree = select(*pool_of(grow(expand, log_q, token)), torch.tensor([9], device=DEVICE), 5)
    assert tree.tokens.tolist() == [[9, 10, 11, 12, 13]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert torch.equal(tree.ancestor_mask[0].cpu(), torch.ones(5, 5, dtype=torch.bool).tril())


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
    root = torch.tensor([7, 8, 9], device=DEVICE)
    tree = select_nodes(*pool_of(grow(expand_beams, log_q, token)), root, num_nodes)
    for row in range(3):
        expected = brute_force(log_q, token, row, root[row].item(), num_nodes)
        assert tuple(part[row].tolist() for part in (tree.tokens, tree.parents, tree.depths, tree.ancestor_mask)) == expected


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 4, 5), (1, 1, 2), (4, 1, 3), (4, 5, 8), (4, 3, 30), (6, 4, 40)])
def test_the_kernels_equal_the_references(topk: int, num_steps: int, num_nodes: int, hard: bool) -> None:
    log_q, token = random_levels(topk, num_steps, 2, hard, seed=topk)
    expected = grow(expand_beams_reference, log_q, token)
    for out_level, expected_level in zip(grow(expand_beams_triton, log_q, token), expected, strict=True):
        assert_equal(out_level, expected_level)
    root = torch.tensor([3, 4], device=DEVICE)
    pool = pool_of(expected)
    assert_equal(select_nodes_triton(*pool, root, num_nodes), select_nodes_reference(*pool, root, num_nodes))


@pytest.mark.gpu
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(1, 7, 8), (4, 5, 8), (8, 6, 64), (10, 7, 60)])
def test_the_compiled_kernels_equal_the_references_at_batch_256(topk: int, num_steps: int, num_nodes: int, hard: bool) -> None:
    log_q, token = random_levels(topk, num_steps, 256, hard, seed=topk)
    expected = grow(expand_beams_reference, log_q, token)
    for out_level, expected_level in zip(grow(expand_beams_triton, log_q, token), expected, strict=True):
        assert_equal(out_level, expected_level)
    root = torch.arange(256, device=DEVICE)
    assert_equal(select_nodes_triton(*pool_of(expected), root, num_nodes), select_nodes_reference(*pool_of(expected), root, num_nodes))


def test_plain_decoding_has_a_tree_of_the_root_alone() -> None:
    tree = root_only_tree(torch.tensor([5, 6], device=DEVICE))
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()) == ([[5], [6]], [[-1], [-1]], [[0], [0]])
    assert tree.ancestor_mask.tolist() == [[[True]], [[True]]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_nodes", [1, 8])
def test_a_tree_that_the_pool_cannot_give_is_a_value_error(expand, select, num_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"6 candidates cannot give a tree of {num_nodes}"):
        select(*pool_of(grow(expand, *example(2))), torch.tensor([R], device=DEVICE), num_nodes)


@IMPLEMENTATIONS
def test_level_zero_is_not_expanded(expand, select) -> None:
    log_q, token = example(2)
    with pytest.raises(ValueError, match="level 1"):
        expand(0, log_q[0], log_q[1], token[1], start_beams(log_q[0], token[0]).beam_pool)
