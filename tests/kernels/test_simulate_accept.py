"""Acceptance by prescription: kernel and reference alike, the mean that was asked for, and a walk that takes exactly that many."""

import pytest
import torch

from eaglecli.kernels.accept_path import accept_path_reference
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.simulate_accept import lattice_seed, simulate_accept_reference, simulate_accept_triton
from tests.kernels.random_trees import DEVICE, int32, random_trees

NOT_A_TOKEN = 77


def tree_of(tokens: torch.Tensor, parents: torch.Tensor) -> DraftTree:
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1].long())[:, 0] + 1
    return DraftTree(tokens, parents, depths, torch.zeros(0, dtype=torch.bool, device=DEVICE))


def chain_of(num_rows: int, num_steps: int) -> DraftTree:
    parents = int32([list(range(-1, num_steps))] * num_rows)
    tokens = torch.arange(100, 101 + num_steps, device=DEVICE).expand(num_rows, -1).contiguous()
    return tree_of(tokens, parents)


@pytest.mark.parametrize("accept_length", [1.0, 2.88, 3.0, 5.4, 6.0])
@pytest.mark.parametrize("num_nodes", [2, 6, 16])
def test_kernel_and_reference_are_equal(accept_length, num_nodes):
    num_rows, num_steps = 7, 5
    tokens, parents, chosen, allowed = random_trees(num_rows, num_nodes, seed=num_nodes)
    tree = tree_of(tokens, parents)
    allowed = tree.depths < torch.arange(1, num_rows + 1, device=DEVICE)[:, None]
    rows, seeds = int32([3, 0, 7, 1, 7, 5, 2]), torch.arange(8, device=DEVICE) * 2**40 - 3
    results = []
    for simulate in (simulate_accept_reference, simulate_accept_triton):
        ours, may = chosen.clone(), allowed.clone()
        simulate(rows, int32([0, 1, 9, 100, 4000, 7, 8]), seeds, tree, accept_length, num_steps, ours, may)
        results.append((ours, may))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("accept_length", [1.0, 1.25, 2.88, 5.4, 6.0])
def test_a_chain_emits_the_mean_that_was_asked_for(accept_length):
    num_steps, num_iterations, first = 5, 100, [10, 11, 500, 1]
    num_rows = len(first)
    tree, lengths, emitted = chain_of(num_rows, num_steps), int32(first), []
    seeds = torch.tensor([lattice_seed(length, accept_length, number) for number, length in enumerate(first)], device=DEVICE)
    for _ in range(num_iterations):
        chosen = torch.full_like(tree.tokens, NOT_A_TOKEN)
        allowed = torch.ones_like(chosen, dtype=torch.bool)
        simulate_accept_reference(int32(range(num_rows)), lengths, seeds, tree, accept_length, num_steps, chosen, allowed)
        walk = accept_path_reference(tree.tokens, tree.parents, chosen, allowed, num_steps)
        emitted.append(walk.num_accepted + 1)
        lengths = lengths + walk.num_accepted + 1
    by_row = torch.stack(emitted).float()
    assert torch.all((by_row.mean(0) - accept_length).abs() <= 1.01 / num_iterations)
    assert by_row.min() >= int(accept_length) and by_row.max() <= -(-accept_length // 1)


def test_rows_are_out_of_step():
    tree = chain_of(16, 5)
    chosen = torch.full_like(tree.tokens, NOT_A_TOKEN)
    allowed = torch.ones_like(chosen, dtype=torch.bool)
    seeds = torch.tensor([lattice_seed(64, 2.5, number) for number in range(16)], device=DEVICE)
    simulate_accept_reference(int32(range(16)), int32([64] * 16), seeds, tree, 2.5, 5, chosen, allowed)
    counts = accept_path_reference(tree.tokens, tree.parents, chosen, allowed, 5).num_accepted.tolist()
    assert sorted(set(counts)) == [1, 2] and 6 <= counts.count(1) <= 10


def test_a_node_that_may_not_be_accepted_is_not():
    tree = chain_of(1, 5)
    chosen, allowed = torch.full_like(tree.tokens, NOT_A_TOKEN), tree.depths <= 2
    simulate_accept_reference(int32([0]), int32([8]), torch.zeros(1, dtype=torch.int64, device=DEVICE), tree, 6.0, 5, chosen, allowed)
    assert accept_path_reference(tree.tokens, tree.parents, chosen, allowed, 5).num_accepted.tolist() == [2]


def test_the_last_token_of_a_step_stays_the_targets_own():
    tree = chain_of(1, 3)
    chosen = torch.tensor([[7, 8, -1, 9]], device=DEVICE)
    allowed = torch.ones_like(chosen, dtype=torch.bool)
    simulate_accept_reference(int32([0]), int32([0]), torch.zeros(1, dtype=torch.int64, device=DEVICE), tree, 3.0, 3, chosen, allowed)
    assert chosen.tolist() == [[101, 102, -1, 9]]


def test_a_length_that_cannot_be_is_refused():
    tree = chain_of(1, 3)
    chosen, allowed = tree.tokens.clone(), torch.ones_like(tree.tokens, dtype=torch.bool)
    for length in (0.5, 4.5):
        with pytest.raises(ValueError, match="accept length"):
            simulate_accept_reference(int32([0]), int32([0]), torch.zeros(1, dtype=torch.int64), tree, length, 3, chosen, allowed)
