# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""The k tokens a draft proposes after each row, with their log-probabilities.

Greedy rows propose the k most probable tokens. Sampled rows propose the k largest of (logit - maximum) / temperature + G with
the very noise that will choose the target's token at that position: a draft that resembles the target guesses what the target
will draw. `log_q` is the log-softmax without temperature and noise either way; it ranks tree nodes and nothing else, so no
number of the draft can change the text.

The kernel gives a row to one program. A lane owns every BLOCK-th token and remembers its best; each of the k rounds takes the best
lane, and only that lane's tokens are looked at again.

Bad numbers cost speed only: NaN counts as -inf, +inf as the largest float32, and k distinct ids come out of any row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.choose_tokens import SamplingTensors, check_sampling
from eaglecli.kernels.contract import require, require_rows
from eaglecli.kernels.philox import gumbel_noise_dense_reference, gumbel_noise_reference, gumbel_of_range, gumbel_of_tokens

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_FLOAT32 = tl.constexpr(_LARGEST)
_BLOCK = 1024  # lanes of one program


@dataclass(frozen=True, eq=False)
class DraftCandidates:
    """Children of M rows, best first (in the order of the proposal, which noise may change)."""

    log_q: torch.Tensor  # float32 [M, k], <= 0, never NaN
    token: torch.Tensor  # int64 [M, k], distinct target ids


@triton.jit
def _load_scores(logits_ptr, column, num_valid):
    """float32 scores without NaN and +inf; -inf where there is no token."""
    x = tl.load(logits_ptr + column, mask=column < num_valid, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x <= float("inf"), x, float("-inf")), _LARGEST_FLOAT32)


@triton.jit
def _draft_topk_kernel(
    logits_ptr, temperature_ptr, seed_ptr, sample_ptr, position_ptr, token_map_ptr, log_q_ptr, token_ptr,
    num_valid, row_stride, K: tl.constexpr, K_BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, LANE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lane = tl.arange(0, BLOCK)
    lane_max = tl.full([BLOCK], -_LARGEST_FLOAT32, tl.float32)
    for first in range(0, num_valid, BLOCK):
        lane_max = tl.maximum(lane_max, _load_scores(logits_ptr, first + lane, num_valid))
    row_max = tl.max(lane_max, axis=0)
    temperature = tl.load(temperature_ptr + row)
    is_sampled = temperature > 0.0
    divisor = tl.where(is_sampled, temperature, 1.0)
    seed, sample, position = tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + row)

    best = tl.full([BLOCK], float("-inf"), tl.float32)  # below the key of every token
    best_id = lane
    exp_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_valid, BLOCK):
        column = first + lane
        x = _load_scores(logits_ptr, column, num_valid)
        exp_sum += tl.exp(x - row_max)
        key = x
        if is_sampled:
            if HAS_MAP:
                token_ids = tl.load(token_map_ptr + column, mask=column < num_valid, other=0)
                noise = gumbel_of_tokens(seed, sample, position, token_ids)
            else:
                noise = gumbel_of_range(seed, sample, position, first, BLOCK)
            key = (x - row_max) / divisor + noise
        key = tl.where(column < num_valid, tl.maximum(key, -_LARGEST_FLOAT32), float("-inf"))
        better = key > best
        best = tl.where(better, key, best)
        best_id = tl.where(better, column, best_id)
    log_sum = tl.log(tl.sum(exp_sum, axis=0))

    slot = tl.arange(0, K_BLOCK)
    taken = tl.full([K_BLOCK], -1, tl.int32)
    member = tl.arange(0, LANE_BLOCK)
    for i in tl.static_range(K):
        top = tl.max(best, axis=0)
        draft_id = tl.min(tl.where((best == top) & (best_id < num_valid), best_id, num_valid), axis=0)
        taken = tl.where(slot == i, draft_id, taken)
        x = _load_scores(logits_ptr, draft_id, num_valid)
        log_q = tl.where(x == float("-inf"), x, tl.minimum(x - row_max - log_sum, 0.0))
        tl.store(log_q_ptr + row * K + i, log_q)
        if HAS_MAP:
            tl.store(token_ptr + row * K + i, tl.load(token_map_ptr + draft_id))
        else:
            tl.store(token_ptr + row * K + i, draft_id.to(tl.int64))
        if i + 1 < K:
            # Ids, not keys, tell what is taken: this key may be rounded otherwise than the one above.
            column = draft_id % BLOCK + member * BLOCK
            is_taken = tl.max((column[:, None] == taken[None, :]).to(tl.int32), axis=1) > 0
            x = _load_scores(logits_ptr, column, num_valid)
            key = x
            if is_sampled:
                token_ids = column
                if HAS_MAP:
                    token_ids = tl.load(token_map_ptr + column, mask=column < num_valid, other=0).to(tl.int32)
                key = (x - row_max) / divisor + gumbel_of_tokens(seed, sample, position, token_ids)
            key = tl.where((column < num_valid) & (is_taken == 0), tl.maximum(key, -_LARGEST_FLOAT32), float("-inf"))
            next_best = tl.max(key, axis=0)
            next_id = tl.min(tl.where((key == next_best) & (is_taken == 0), column, num_valid), axis=0)
            is_lane = lane == draft_id % BLOCK
            best = tl.where(is_lane, next_best, best)
            best_id = tl.where(is_lane, next_id, best_id)


def draft_topk_triton(
    logits: torch.Tensor, k: int, sampling: SamplingTensors, position: torch.Tensor, token_map: torch.Tensor | None, num_valid: int
) -> DraftCandidates:
    """Launch one program per row; see `draft_topk`."""
    _check(logits, k, sampling, position, token_map, num_valid)
    num_rows = logits.shape[0]
    out = DraftCandidates(
        log_q=torch.empty(num_rows, k, dtype=torch.float32, device=logits.device),
        token=torch.empty(num_rows, k, dtype=torch.int64, device=logits.device),
    )
    if num_rows:
        _draft_topk_kernel[(num_rows,)](
            logits, sampling.temperature, sampling.seed, sampling.sample, position, token_map, out.log_q, out.token,
            num_valid, logits.stride(0), K=k, K_BLOCK=triton.next_power_of_2(k), HAS_MAP=token_map is not None,
            BLOCK=_BLOCK, LANE_BLOCK=triton.next_power_of_2(triton.cdiv(num_valid, _BLOCK)), num_warps=8,
        )  # fmt: skip
    return out


def _log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Log-softmax of scores without NaN and +inf; -inf stays -inf even in a row of nothing else."""
    row_max = scores.amax(dim=-1, keepdim=True).clamp_min(-_LARGEST)
    shifted = scores - row_max
    log_sum = torch.log(torch.exp(shifted).sum(dim=-1, keepdim=True))
    return torch.where(scores == float("-inf"), scores, shifted - log_sum).clamp_max(0.0)


def _noisy(scores: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """What sampled rows are ordered by; greedy rows keep their scores."""
    is_sampled = (sampling.temperature > 0.0)[:, None]
    row_max = scores.amax(dim=-1, keepdim=True).clamp_min(-_LARGEST)
    tempered = (scores - row_max) / torch.where(is_sampled, sampling.temperature[:, None], 1.0)
    num_valid = scores.shape[1]
    if token_map is None:
        noise = gumbel_noise_dense_reference(sampling.seed, sampling.sample, position, num_valid)
    else:
        noise = gumbel_noise_reference(sampling.seed, sampling.sample, position, token_map[:num_valid])
    return torch.where(is_sampled, tempered + noise, scores)


def _top_ids(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The k ids of largest key, ties lowest id first: k arg-max passes, as torch.topk does not promise that order."""
    keys = keys.clamp_min(-_LARGEST)  # leaves -inf free to mark the ids already taken
    ids = []
    for _ in range(k):
        best = keys.argmax(dim=-1, keepdim=True)
        ids.append(best)
        keys = keys.scatter(1, best, float("-inf"))
    return torch.cat(ids, dim=1)


def draft_topk_reference(
    logits: torch.Tensor, k: int, sampling: SamplingTensors, position: torch.Tensor, token_map: torch.Tensor | None, num_valid: int
) -> DraftCandidates:
    """See `draft_topk`."""
    _check(logits, k, sampling, position, token_map, num_valid)
    scores = torch.nan_to_num(logits[:, :num_valid].to(torch.float32), nan=float("-inf"), posinf=_LARGEST, neginf=float("-inf"))
    keys = _noisy(scores, sampling, position, token_map) if sampling.any_sampled else scores
    draft_id = _top_ids(keys, k)
    token = draft_id if token_map is None else token_map[draft_id]
    return DraftCandidates(_log_softmax(scores).gather(1, draft_id), token)


def _check(
    logits: torch.Tensor, k: int, sampling: SamplingTensors, position: torch.Tensor, token_map: torch.Tensor | None, num_valid: int
) -> None:
    require_rows("logits", logits)
    check_sampling(sampling, position, logits.shape[0])
    if not 1 <= k <= num_valid <= logits.shape[1]:
        raise ValueError(f"draft_topk needs 1 <= k <= num_valid <= columns, got k={k}, num_valid={num_valid}, logits {list(logits.shape)}")
    if token_map is not None:
        require("token_map", token_map, torch.int64, -1)
        if token_map.shape[0] < num_valid:
            raise ValueError(f"draft_topk needs a target id for each of {num_valid} draft ids, token_map has {token_map.shape[0]}")


def draft_topk(
    logits: torch.Tensor, k: int, sampling: SamplingTensors, position: torch.Tensor, token_map: torch.Tensor | None, num_valid: int
) -> DraftCandidates:
    """The k proposals of every row.

    logits [M, Vd], any floating dtype; position int32 [M] is the absolute position of the tokens proposed; token_map int64 [Vd]
    of target ids, None when draft ids are target ids. Draft ids >= num_valid (padding rows of a head) do not exist: they are
    never proposed and have no share in log_q. Raises ValueError when k ids cannot be had.
    """
    if logits.is_cuda:
        return draft_topk_triton(logits, k, sampling, position, token_map, num_valid)
    return draft_topk_reference(logits, k, sampling, position, token_map, num_valid)
