"""The walk over a verified tree and the permutation of a row's tail; the kernel that does both is tested with `commit_run`."""

import pytest
import torch

from eaglecli.kernels.accept_path import accept_path_reference, permute_tail_reference
from tests.kernels.random_trees import int32, random_trees, walk_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARENTS = [-1, 0, 0, 1, 2, 3]
TOKENS = [50, 1, 2, 3, 5, 7]


def walk(chosen: list[int], allowed: list[int] | None = None, num_steps: int = 3):
    tree = torch.tensor([TOKENS], device=DEVICE), int32([PARENTS]), torch.tensor([chosen], device=DEVICE)
    path = accept_path_reference(*tree, torch.tensor([allowed or [1] * 6], dtype=torch.bool, device=DEVICE), num_steps)
    return path.num_accepted.item(), path.path[0].tolist(), path.tokens[0].tolist()


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
def test_the_walk_follows_the_chosen_tokens(chosen: list[int], expected: tuple) -> None:
    assert walk(chosen) == expected


def test_a_node_that_is_not_allowed_ends_the_walk_before_it() -> None:
    assert walk([1, 3, 0, 7, 0, 9], [0, 1, 1, 0, 1, 1]) == (1, [0, 1, -1, -1], [1, 3, 0, 0])


def test_the_walk_has_no_more_than_num_steps_drafts() -> None:
    assert walk([1, 3, 0, 7, 0, 9], num_steps=1) == (1, [0, 1], [1, 3])
    assert walk([1, 3, 0, 7, 0, 9], num_steps=0) == (0, [0], [1])


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


def test_accepted_slots_come_first_and_the_others_keep_their_order() -> None:
    table = torch.arange(24, dtype=torch.int32, device=DEVICE).view(2, 12)
    permute_tail_reference(table, int32([1]), int32([3]), int32([[0, 2, 4, -1]]), int32([2]), 6)
    assert table.tolist() == [list(range(12)), [12, 13, 14, 15, 17, 19, 16, 18, 20, 21, 22, 23]]


def test_a_row_stays_a_permutation_of_its_slots_up_to_its_last_column() -> None:
    table = torch.arange(100, 116, dtype=torch.int32, device=DEVICE).view(2, 8)
    permute_tail_reference(table, int32([0, 1]), int32([2, 0]), int32([[0, 5], [0, 3]]), int32([1, 1]), 6)
    assert table.tolist() == [[100, 101, 102, 107, 103, 104, 105, 106], [108, 111, 109, 110, 112, 113, 114, 115]]


def test_the_dummy_row_named_many_times_stays_all_dummy() -> None:
    table = torch.arange(1, 25, dtype=torch.int32, device=DEVICE).view(3, 8)
    table[2] = 0
    permute_tail_reference(
        table, int32([2, 0, 2, 2]), int32([0, 1, 0, 0]), int32([[0, 3], [0, 2], [0, -1], [0, 1]]), int32([1, 1, 0, 1]), 4
    )
    assert table.tolist() == [[1, 2, 4, 3, 5, 6, 7, 8], list(range(9, 17)), [0] * 8]


def test_a_mask_that_is_not_bool_is_a_value_error() -> None:
    token = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="allowed"):
        accept_path_reference(token, int32([[-1, 0]]), token, int32([[1, 1]]), 1)
