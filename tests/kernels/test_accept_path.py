"""The walk over a verified tree and the permutation of a row's tail; kernels against references."""

import random
from dataclasses import fields

import pytest
import torch

from eaglecli.kernels.accept_path import (
    accept_path_reference,
    accept_path_triton,
    permute_tail_reference,
    permute_tail_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WALKS = pytest.mark.parametrize("accept", [accept_path_reference, accept_path_triton])
PERMUTATIONS = pytest.mark.parametrize("permute", [permute_tail_reference, permute_tail_triton])
PARENTS = [-1, 0, 0, 1, 2, 3]
TOKENS = [50, 1, 2, 3, 5, 7]


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def walk(accept, chosen: list[int], allowed: list[int] | None = None, num_steps: int = 3):
    tree = torch.tensor([TOKENS], device=DEVICE), int32([PARENTS]), torch.tensor([chosen], device=DEVICE)
    path = accept(*tree, torch.tensor([allowed or [1] * 6], dtype=torch.bool, device=DEVICE), num_steps)
    return path.num_accepted.item(), path.path[0].tolist(), path.tokens[0].tolist()


@WALKS
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([1, 3, 0, 7, 0, 9], (3, [0, 1, 3, 5], [1, 3, 7, 9])),  # to the end: the bonus follows the last draft
        ([2, 3, 5, 7, 8, 9], (2, [0, 2, 4, -1], [2, 5, 8, 0])),  # the second branch
        ([1, 5, 0, 7, 0, 9], (1, [0, 1, -1, -1], [1, 5, 0, 0])),  # 5 is a node, but not a child of 1
        ([4, 3, 5, 7, 8, 9], (0, [0, -1, -1, -1], [4, 0, 0, 0])),  # no child has it
        ([-1, 3, 5, 7, 8, 9], (0, [0, -1, -1, -1], [-1, 0, 0, 0])),  # no choice was possible
    ],
)
def test_the_walk_follows_the_chosen_tokens(accept, chosen: list[int], expected: tuple) -> None:
    assert walk(accept, chosen) == expected


@WALKS
def test_a_node_that_is_not_allowed_ends_the_walk_before_it(accept) -> None:
    assert walk(accept, [1, 3, 0, 7, 0, 9], [0, 1, 1, 0, 1, 1]) == (1, [0, 1, -1, -1], [1, 3, 0, 0])


@WALKS
def test_the_walk_has_no_more_than_num_steps_drafts(accept) -> None:
    assert walk(accept, [1, 3, 0, 7, 0, 9], num_steps=1) == (1, [0, 1], [1, 3])
    assert walk(accept, [1, 3, 0, 7, 0, 9], num_steps=0) == (0, [0], [1])


def random_trees(num_rows: int, num_nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random trees with few tokens, so that walks go deep and other nodes carry the token looked for; distinct siblings."""
    rng = random.Random(seed)
    tokens, parents, chosen = [], [], []
    for _ in range(num_rows):
        parent = [-1] + [rng.randrange(max(0, n - 3), n) for n in range(1, num_nodes)]
        token = [99] + [3 * parent[n] % 5 + sum(parent[m] == parent[n] for m in range(1, n)) for n in range(1, num_nodes)]
        children = [[token[m] for m in range(num_nodes) if parent[m] == n] for n in range(num_nodes)]
        chosen.append([rng.choice(kids) if kids and rng.random() < 0.85 else 77 for kids in children])
        tokens.append(token)
        parents.append(parent)
    allowed = torch.rand(num_rows, num_nodes, generator=torch.Generator().manual_seed(seed)) < 0.95
    return torch.tensor(tokens, device=DEVICE), int32(parents), torch.tensor(chosen, device=DEVICE), allowed.to(DEVICE)


def walk_row(token: list[int], parent: list[int], chosen: list[int], allowed: list[bool], num_steps: int) -> tuple[list[int], list[int]]:
    path, emitted = [0], [chosen[0]]
    while len(path) <= num_steps:
        here = [n for n in range(len(token)) if parent[n] == path[-1] and token[n] == chosen[path[-1]] and allowed[n]]
        if not here:
            break
        path.append(here[0])
        emitted.append(chosen[here[0]])
    return path, emitted


@pytest.mark.parametrize(("num_nodes", "num_steps"), [(1, 0), (2, 1), (8, 7), (13, 4), (60, 7)])
def test_walks_of_random_trees_equal_a_python_walk(num_nodes: int, num_steps: int) -> None:
    trees = random_trees(40, num_nodes, seed=num_nodes)
    out = accept_path_reference(*trees, num_steps)
    for row in range(40):
        path, emitted = walk_row(*(part[row].tolist() for part in trees), num_steps)
        padding = num_steps + 1 - len(path)
        assert out.num_accepted[row].item() == len(path) - 1
        assert out.path[row].tolist() == path + [-1] * padding
        assert out.tokens[row].tolist() == emitted + [0] * padding


@pytest.mark.parametrize(
    ("num_rows", "num_nodes", "num_steps"),
    [(3, 1, 0), (5, 8, 7), (5, 13, 4), pytest.param(256, 64, 7, marks=pytest.mark.gpu), pytest.param(1024, 8, 5, marks=pytest.mark.gpu)],
)
def test_the_kernels_equal_the_references(num_rows: int, num_nodes: int, num_steps: int) -> None:
    trees = random_trees(num_rows, num_nodes, seed=num_rows)
    out, expected = accept_path_triton(*trees, num_steps), accept_path_reference(*trees, num_steps)
    for field in fields(expected):
        assert torch.equal(getattr(out, field.name), getattr(expected, field.name)), field.name
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm((num_rows + 1) * 100, generator=generator, dtype=torch.int32).view(num_rows + 1, 100).to(DEVICE)
    rows = torch.randperm(num_rows, generator=generator, dtype=torch.int32).to(DEVICE)
    lengths = torch.randint(0, 101 - num_nodes, (num_rows,), generator=generator, dtype=torch.int32).to(DEVICE)
    tables = table.clone(), table.clone()
    for permute, each in zip((permute_tail_triton, permute_tail_reference), tables, strict=True):
        permute(each, rows, lengths, expected.path, expected.num_accepted, num_nodes)
    assert torch.equal(*tables)
    assert not torch.equal(tables[0], table) or num_nodes == 1 or num_rows < 5


@PERMUTATIONS
def test_accepted_slots_come_first_and_the_others_keep_their_order(permute) -> None:
    table = torch.arange(24, dtype=torch.int32, device=DEVICE).view(2, 12)
    permute(table, int32([1]), int32([3]), int32([[0, 2, 4, -1]]), int32([2]), 6)
    assert table.tolist() == [list(range(12)), [12, 13, 14, 15, 17, 19, 16, 18, 20, 21, 22, 23]]


@PERMUTATIONS
def test_a_row_stays_a_permutation_of_its_slots_up_to_its_last_column(permute) -> None:
    table = torch.arange(100, 116, dtype=torch.int32, device=DEVICE).view(2, 8)
    permute(table, int32([0, 1]), int32([2, 0]), int32([[0, 5], [0, 3]]), int32([1, 1]), 6)
    assert table.tolist() == [[100, 101, 102, 107, 103, 104, 105, 106], [108, 111, 109, 110, 112, 113, 114, 115]]


@PERMUTATIONS
def test_the_dummy_row_named_many_times_stays_all_dummy(permute) -> None:
    table = torch.arange(1, 25, dtype=torch.int32, device=DEVICE).view(3, 8)
    table[2] = 0
    permute(table, int32([2, 0, 2, 2]), int32([0, 1, 0, 0]), int32([[0, 3], [0, 2], [0, -1], [0, 1]]), int32([1, 1, 0, 1]), 4)
    assert table.tolist() == [[1, 2, 4, 3, 5, 6, 7, 8], list(range(9, 17)), [0] * 8]


@PERMUTATIONS
def test_a_tail_wider_than_the_row_is_a_value_error(permute) -> None:
    with pytest.raises(ValueError, match="no tail of 9"):
        permute(torch.zeros(2, 8, dtype=torch.int32, device=DEVICE), int32([0]), int32([0]), int32([[0]]), int32([0]), 9)


@WALKS
def test_a_mask_that_is_not_bool_is_a_value_error(accept) -> None:
    token = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="allowed"):
        accept(token, int32([[-1, 0]]), token, int32([[1, 1]]), 1)
