"""Sampling settings and exact laws for the tests of choosing and drafting."""

import numpy as np
import torch

from eaglecli.kernels.choose_tokens import SamplingTensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sampling_rows(*settings: tuple[float, int, float, float], seed: int = 0) -> SamplingTensors:
    """One row for each (temperature, top_k, top_p, min_p); seeds drawn from `seed`, sample numbers 0, 1, 2, ..."""
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    seeds = torch.randint(-(2**63), 2**63 - 1, temperature.shape, generator=torch.Generator().manual_seed(seed))
    return SamplingTensors(
        temperature=temperature.float().to(DEVICE),
        top_k=top_k.int().to(DEVICE),
        top_p=top_p.float().to(DEVICE),
        min_p=min_p.float().to(DEVICE),
        seed=seeds.to(DEVICE),
        sample=torch.arange(len(settings), dtype=torch.int32, device=DEVICE),
        rows=torch.arange(len(settings), dtype=torch.int32, device=DEVICE),
    )


def many_samples(
    count: int, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0, first: int = 0
) -> SamplingTensors:
    """`count` rows that differ in the sample number alone: first, first + 1, ..."""

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=DEVICE)

    return SamplingTensors(
        temperature=full(temperature, torch.float32),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float32),
        min_p=full(min_p, torch.float32),
        seed=full(20_250_601, torch.int64),
        sample=torch.arange(first, first + count, dtype=torch.int32, device=DEVICE),
        rows=torch.arange(count, dtype=torch.int32, device=DEVICE),
        any_filtered=top_k > 0 or top_p < 1 or min_p > 0,
    )


def exact_law(logits: np.ndarray, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, one token at a time in float64."""
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += p[i]
    kept = [i for i in kept if p[i] >= min_p * p[order[0]]]
    law = np.zeros(len(p))
    law[kept] = p[kept]
    return law / law.sum()
