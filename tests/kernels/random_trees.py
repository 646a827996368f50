"""Random trees with the target's choices, and the walk over one of them in plain Python."""

import random

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


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
