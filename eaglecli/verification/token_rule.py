"""The two rules of choosing, written plainly: the target's next token (design: arg-max or Gumbel-max), and the children a draft proposes.

Nothing here is shared with the engine but the noise, which is a function of (seed, sample, position, token) alone.
"""

from dataclasses import dataclass

import torch

from eaglecli.engine.request import Request
from eaglecli.kernels.philox import gumbel_noise

_LARGEST = torch.finfo(torch.float32).max


def noise_at(request: Request, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [M, V]: the noise of a request's tokens `token_ids` [V] at `positions` [M]."""
    device, count = token_ids.device, len(positions)
    seed = torch.full((count,), request.sampling.seed, dtype=torch.int64, device=device)
    sample = torch.full((count,), request.sample, dtype=torch.int32, device=device)
    return gumbel_noise(seed, sample, positions.to(torch.int32), token_ids)


def choice_scores(logits: torch.Tensor, request: Request, positions: torch.Tensor) -> torch.Tensor:
    """What the tokens at `positions` [M] are the arg-max of: float32 [M, V] of logits [M, V]. Filters are not known here."""
    scores = logits.float()
    temperature = request.sampling.temperature
    if temperature == 0:
        return scores
    token_ids = torch.arange(scores.shape[1], device=scores.device)
    return (scores - scores.amax(1, keepdim=True)) / temperature + noise_at(request, positions, token_ids)


@dataclass(frozen=True, eq=False)
class Children:
    """The k proposals of M nodes, best first, and how near the first one left out came."""

    tokens: torch.Tensor  # int64 [M, k] target ids
    log_q: torch.Tensor  # float32 [M, k] log-probabilities, of sampled rows with the noise in the logits: what beams and kept nodes rank by
    margin: torch.Tensor  # float32 [M]: score of the last child minus that of the best token left out; inf if none was


def propose(logits: torch.Tensor, topk: int, request: Request, positions: torch.Tensor, token_map: torch.Tensor | None) -> Children:
    """Children by logit, or for sampled rows by logit / temperature + the noise at `positions` [M] of the tokens being drafted.

    log_q is the log-softmax of logit + temperature * noise: the same order in units of logits.
    logits [M, Vd]; token_map int64 [Vd] of target ids, None = the same ids. NaN counts as -inf; ties go to the lowest draft id.
    """
    scores = logits.float().nan_to_num(-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    ids = torch.arange(scores.shape[1], device=scores.device) if token_map is None else token_map
    keys = perturbed = scores
    temperature = request.sampling.temperature
    if temperature > 0:
        noise = noise_at(request, positions, ids)
        keys = (scores - scores.amax(1, keepdim=True).clamp_min(-_LARGEST)) / temperature + noise
        perturbed = scores + temperature * noise
    log_q = perturbed.log_softmax(1).nan_to_num(-torch.inf, neginf=-torch.inf)
    keys = keys.clamp_min(-_LARGEST)
    chosen, values = [], []
    for _ in range(min(topk + 1, keys.shape[1])):
        values.append(keys.amax(1))
        chosen.append(keys.argmax(1))
        keys = keys.scatter(1, chosen[-1][:, None], -torch.inf)
    picked = torch.stack(chosen[:topk], 1)
    margin = values[topk - 1] - values[topk] if len(values) > topk else torch.full_like(values[0], torch.inf)
    return Children(ids[picked], log_q.gather(1, picked), margin)
