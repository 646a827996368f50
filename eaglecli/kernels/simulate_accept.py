# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Acceptance by prescription: the verified tree is rewritten so that the walk accepts a given number of drafts on average.

For speed runs without weights that mean something (project file ux.md 5.2, `--simulate-acc-len`). A row's lengths after its steps
are the lattice floor(k * a + phase), k = 0, 1, ...: a step from length L ends at the next place of it. So every step emits
floor(a) or ceil(a) tokens, their mean is a exactly, and nothing has to be counted. The phase is the row's seed: `lattice_seed` gives
one for which the first step is a whole one, and different numbers put rows out of step.

The accepted path leads to the first of the deepest nodes that are no deeper than that; all other nodes are not allowed, and every
node of the path "chose" the next one. The last one keeps the target's own choice, so a logit that is not finite still shows.
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent

FRACTION_BITS = 16  # of an accept length in fixed point
_SPREAD = 40_503  # 2^16 / golden ratio: neighbouring numbers come to lie far apart
_SEED_MASK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _simulate_accept_kernel(
    rows_ptr, base_lengths_ptr, seeds_ptr, chosen_ptr, tree_tokens_ptr, parents_ptr, depths_ptr, allowed_ptr, period,
    NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, NUM_STEPS: tl.constexpr, BITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    length = tl.load(base_lengths_ptr + batch_row).to(tl.int64)
    step = period.to(tl.int64)
    phase = (tl.load(seeds_ptr + row) & _SEED_MASK) % step
    above = ((length + 1) << BITS) - phase + step  # one period up: no division of a negative number
    end = (((above + step - 1) // step) * step + phase - step) >> BITS
    num_wanted = end - length - 1

    node = tl.arange(0, NODE_BLOCK)
    inside = node < NUM_NODES
    nodes = batch_row * NUM_NODES + node
    chosen = tl.load(chosen_ptr + nodes, mask=inside, other=-1)
    token = tl.load(tree_tokens_ptr + nodes, mask=inside, other=0)
    parent = tl.load(parents_ptr + nodes, mask=inside, other=-1)
    depth = tl.load(depths_ptr + nodes, mask=inside, other=0)
    allowed = tl.load(allowed_ptr + nodes, mask=inside, other=0) != 0
    can_end = inside & ((node == 0) | (allowed & (depth <= num_wanted)))
    best = tl.max(tl.where(can_end, depth * NODE_BLOCK + NODE_BLOCK - 1 - node, -1), axis=0)
    current = NODE_BLOCK - 1 - best % NODE_BLOCK
    on_path = node == 0
    for _ in tl.static_range(NUM_STEPS):
        before = tl.sum(tl.where(node == current, parent, 0), axis=0)
        own_token = tl.sum(tl.where(node == current, token, 0), axis=0)
        on_path = on_path | (node == current)
        chosen = tl.where((node == before) & (current > 0), own_token, chosen)
        current = tl.where(current > 0, before, 0)
    tl.store(chosen_ptr + nodes, chosen, mask=inside)
    tl.store(allowed_ptr + nodes, on_path, mask=inside)


def simulate_accept_triton(
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    seeds: torch.Tensor,
    tree: DraftTree,
    accept_length: float,
    num_steps: int,
    chosen: torch.Tensor,
    allowed: torch.Tensor,
) -> None:
    """One program a row; see `simulate_accept`."""
    period = _check(rows, base_lengths, seeds, tree, accept_length, num_steps, chosen, allowed)
    num_rows, num_nodes = chosen.shape
    if num_rows:
        _simulate_accept_kernel[(num_rows,)](
            rows, base_lengths, seeds, chosen, tree.tokens, tree.parents, tree.depths, allowed, period,
            NUM_NODES=num_nodes, NODE_BLOCK=triton.next_power_of_2(num_nodes), NUM_STEPS=num_steps, BITS=FRACTION_BITS, num_warps=1,
            **launch_options(rows.device),
        )  # fmt: skip


def simulate_accept_reference(
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    seeds: torch.Tensor,
    tree: DraftTree,
    accept_length: float,
    num_steps: int,
    chosen: torch.Tensor,
    allowed: torch.Tensor,
) -> None:
    """See `simulate_accept`."""
    period = _check(rows, base_lengths, seeds, tree, accept_length, num_steps, chosen, allowed)
    length = base_lengths.long()
    phase = (seeds[rows] & _SEED_MASK.value) % period
    above = ((length + 1) << FRACTION_BITS) - phase + period
    end = (((above + period - 1) // period) * period + phase - period) >> FRACTION_BITS
    num_wanted = (end - length - 1)[:, None]
    node = torch.arange(chosen.shape[1], device=chosen.device)
    can_end = (node == 0) | (allowed & (tree.depths <= num_wanted))
    current = torch.where(can_end, tree.depths, -1).argmax(dim=1, keepdim=True)  # the first of the deepest
    on_path = (node == 0).expand_as(allowed).clone()
    for _ in range(num_steps):
        before = tree.parents.gather(1, current).long()
        on_path |= node == current
        chosen.copy_(torch.where((node == before) & (current > 0), tree.tokens.gather(1, current), chosen))
        current = torch.where(current > 0, before, 0)
    allowed.copy_(on_path)


def _check(
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    seeds: torch.Tensor,
    tree: DraftTree,
    accept_length: float,
    num_steps: int,
    chosen: torch.Tensor,
    allowed: torch.Tensor,
) -> int:
    """The accept length in fixed point."""
    require("chosen", chosen, torch.int64, -1, -1)
    num_rows, num_nodes = chosen.shape
    require("rows", rows, torch.int32, num_rows)
    require("base_lengths", base_lengths, torch.int32, num_rows)
    require("seeds", seeds, torch.int64, -1)
    require("tree tokens", tree.tokens, torch.int64, num_rows, num_nodes)
    require("tree parents", tree.parents, torch.int32, num_rows, num_nodes)
    require("tree depths", tree.depths, torch.int32, num_rows, num_nodes)
    require("allowed", allowed, torch.bool, num_rows, num_nodes)
    if not 1 <= accept_length <= num_steps + 1:
        raise ValueError(f"an accept length of {accept_length} is not between 1 and {num_steps + 1}")
    return _fixed_point(accept_length)


def _fixed_point(accept_length: float) -> int:
    return round(accept_length * (1 << FRACTION_BITS))


def lattice_seed(first_length: int, accept_length: float, number: int) -> int:
    """A seed whose lattice holds `first_length`, the length before a request's first step (its prompt's), for the `number`-th request."""
    return ((first_length << FRACTION_BITS) + number * _SPREAD % (1 << FRACTION_BITS)) % _fixed_point(accept_length)


def simulate_accept(
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    seeds: torch.Tensor,
    tree: DraftTree,
    accept_length: float,
    num_steps: int,
    chosen: torch.Tensor,
    allowed: torch.Tensor,
) -> None:
    """Change `chosen` int64 [B, N] and `allowed` bool [B, N] so that steps emit `accept_length` tokens on average.

    rows int32 [B]; base_lengths int32 [B] known tokens before the step, less one; seeds int64 [R]; 1 <= accept_length <= num_steps + 1.
    A tree without a node that deep gives its deepest one.
    """
    launch = simulate_accept_triton if rows.is_cuda else simulate_accept_reference
    launch(rows, base_lengths, seeds, tree, accept_length, num_steps, chosen, allowed)
