# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""The k tokens a draft proposes after each row, with their log-probabilities.

Greedy rows propose the k most probable tokens. Sampled rows propose the k largest of (logit - maximum) / temperature + G with
the very noise that will choose the target's token at that position: a draft that resembles the target guesses what the target
will draw. `log_q` is the log-softmax over the draft's vocabulary of the same order in units of logits, logit + temperature * G, and
of the logits alone in greedy rows. So beams and kept nodes rank by how likely the noisy draft finds their path: without the noise in
it, the child that the draft expects to be drawn would often be dropped. It ranks tree nodes and nothing else, so no number of the
draft can change the text.

The kernel cuts a row into chunks of one fixed size. A program takes the k best of its chunk, with (logit - chunk maximum) in place
of (logit - maximum), and the sum of its exponentials below their own peak; the last one of a row takes the k best of all of these by
their true keys.

Bad numbers cost speed only: NaN counts as -inf, +inf as the largest float32, and k distinct ids come out of any row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.choose_tokens import SamplingTensors, check_sampling
from eaglecli.kernels.contract import require, require_rows
from eaglecli.kernels.last_arrival import arrival_counters, is_last_arrival
from eaglecli.kernels.launch import launch_options, start_dependent
from eaglecli.kernels.philox import gumbel_noise_dense_reference, gumbel_noise_reference, gumbel_of_range, gumbel_of_tokens

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_FLOAT32 = tl.constexpr(_LARGEST)
_CHUNK = 1024  # logits of one program


@dataclass(frozen=True, eq=False)
class DraftCandidates:
    """Children of M rows, best first."""

    log_q: torch.Tensor  # float32 [M, k], <= 0, never NaN
    token: torch.Tensor  # int64 [M, k], distinct target ids


@triton.jit
def _load_scores(logits_ptr, column, num_valid):
    """float32 scores without NaN and +inf; -inf where there is no token."""
    x = tl.load(logits_ptr + column, mask=column < num_valid, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x <= float("inf"), x, float("-inf")), _LARGEST_FLOAT32)


@triton.jit
def _noisy_key(x, pivot, temperature, noise):
    """What sampled rows are ordered by; never -inf, which marks what does not exist or is taken."""
    return tl.maximum((x - pivot) / temperature + noise, -_LARGEST_FLOAT32)


@triton.jit
def _in_logits(key, x, temperature):
    """A noisy key as a distance of logits from its pivot: finite, but -inf where x is."""
    scaled = tl.maximum(tl.minimum(key * temperature, _LARGEST_FLOAT32), -_LARGEST_FLOAT32)
    return tl.where(x == float("-inf"), x, scaled)


@triton.jit(do_not_specialize=["repeats"])
def _draft_topk_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, sample_ptr, position_ptr, token_map_ptr,
    chunk_max_ptr, chunk_peak_ptr, chunk_sum_ptr, chunk_id_ptr, counter_ptr, log_q_ptr, token_ptr,
    num_valid, num_chunks, row_stride, repeats,
    INTO_ROWS: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, WINNERS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    logits_row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits_ptr += logits_row * row_stride
    row = tl.load(rows_ptr + logits_row // repeats).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    seed, sample, position = tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + logits_row)
    is_sampled = temperature > 0.0

    first = chunk * CHUNK
    column = first + tl.arange(0, CHUNK)
    exists = column < num_valid
    x = _load_scores(logits_ptr, column, num_valid)
    chunk_max = tl.maximum(tl.max(x, axis=0), -_LARGEST_FLOAT32)
    chunks = logits_row * num_chunks
    distance, peak = x - chunk_max, 0.0  # what log q is the log-softmax of, and its maximum
    key = tl.maximum(x, -_LARGEST_FLOAT32)
    if is_sampled:
        if token_map_ptr is not None:
            noise = gumbel_of_tokens(seed, sample, position, tl.load(token_map_ptr + column, mask=exists, other=0))
        else:
            noise = gumbel_of_range(seed, sample, position, first, CHUNK)
        key = _noisy_key(x, chunk_max, temperature, noise)
        distance = _in_logits(key, x, temperature)
        peak = tl.maximum(tl.max(distance, axis=0), -_LARGEST_FLOAT32)
    tl.store(chunk_max_ptr + chunks + chunk, chunk_max)
    tl.store(chunk_peak_ptr + chunks + chunk, peak)
    tl.store(chunk_sum_ptr + chunks + chunk, tl.sum(tl.exp(distance - peak), axis=0))
    key = tl.where(exists, key, float("-inf"))
    for i in tl.static_range(K):
        best = tl.max(key, axis=0)
        draft_id = tl.min(tl.where(key == best, column, num_valid), axis=0)
        tl.store(chunk_id_ptr + (chunks + chunk) * K + i, tl.where(best > float("-inf"), draft_id, -1))
        key = tl.where(column == draft_id, float("-inf"), key)

    if is_last_arrival(counter_ptr + logits_row, num_chunks):
        # names of their own: compiled Triton keeps a variable's shape through a branch
        chunk_index = tl.arange(0, CHUNKS_BLOCK)
        maxima = tl.load(chunk_max_ptr + chunks + chunk_index, mask=chunk_index < num_chunks, other=-_LARGEST_FLOAT32)
        peaks = tl.load(chunk_peak_ptr + chunks + chunk_index, mask=chunk_index < num_chunks, other=-_LARGEST_FLOAT32)
        sums = tl.load(chunk_sum_ptr + chunks + chunk_index, mask=chunk_index < num_chunks, other=0.0)
        row_max = tl.max(maxima, axis=0)
        peaks += maxima - row_max
        row_peak = tl.max(peaks, axis=0)
        log_sum = tl.log(tl.sum(sums * tl.exp(peaks - row_peak), axis=0))
        place = tl.arange(0, WINNERS_BLOCK)
        winner = tl.load(chunk_id_ptr + chunks * K + place, mask=place < num_chunks * K, other=-1)
        is_winner = winner >= 0
        score = _load_scores(logits_ptr, tl.where(is_winner, winner, num_valid), num_valid)
        token = winner.to(tl.int64)
        if token_map_ptr is not None:
            token = tl.load(token_map_ptr + winner, mask=is_winner, other=0)
        winner_key = tl.maximum(score, -_LARGEST_FLOAT32)
        winner_distance = score - row_max
        if is_sampled:
            winner_key = _noisy_key(score, row_max, temperature, gumbel_of_tokens(seed, sample, position, token))
            winner_distance = _in_logits(winner_key, score, temperature)
        winner_key = tl.where(is_winner, winner_key, float("-inf"))
        log_q = tl.where(score == float("-inf"), score, tl.minimum(winner_distance - row_peak - log_sum, 0.0))
        out = logits_row * K
        if INTO_ROWS:
            out = row * K
        for i in tl.static_range(K):
            best = tl.max(winner_key, axis=0)
            draft_id = tl.min(tl.where(is_winner & (winner_key == best), winner, num_valid), axis=0)
            is_taken = winner == draft_id
            tl.store(log_q_ptr + out + i, tl.max(tl.where(is_taken, log_q, float("-inf")), axis=0))
            tl.store(token_ptr + out + i, tl.max(tl.where(is_taken, token, -1), axis=0))
            winner_key = tl.where(is_taken, float("-inf"), winner_key)


def draft_topk_triton(
    logits: torch.Tensor,
    k: int,
    sampling: SamplingTensors,
    position: torch.Tensor,
    token_map: torch.Tensor | None,
    num_valid: int,
    into_rows: DraftCandidates | None = None,
) -> DraftCandidates:
    """One launch of a program for each chunk of each row; see `draft_topk`."""
    _check(logits, k, sampling, position, token_map, num_valid, into_rows)
    num_rows, device = logits.shape[0], logits.device
    num_chunks = triton.cdiv(num_valid, _CHUNK)
    out = into_rows or DraftCandidates(
        log_q=torch.empty(num_rows, k, dtype=torch.float32, device=device),
        token=torch.empty(num_rows, k, dtype=torch.int64, device=device),
    )
    if num_rows:
        chunk_max = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
        chunk_peak, chunk_sum = torch.empty_like(chunk_max), torch.empty_like(chunk_max)
        chunk_id = torch.empty(num_rows, num_chunks, k, dtype=torch.int32, device=device)
        _draft_topk_kernel[(num_rows, num_chunks)](
            logits, sampling.rows, sampling.temperature, sampling.seed, sampling.sample, position, token_map,
            chunk_max, chunk_peak, chunk_sum, chunk_id, arrival_counters(num_rows, device), out.log_q, out.token,
            num_valid, num_chunks, logits.stride(0), sampling.repeats, INTO_ROWS=into_rows is not None, K=k,
            CHUNK=_CHUNK, CHUNKS_BLOCK=triton.next_power_of_2(num_chunks), WINNERS_BLOCK=triton.next_power_of_2(num_chunks * k),
            num_warps=4, **launch_options(logits.device),
        )  # fmt: skip
    return out


def _log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Log-softmax of scores without NaN and +inf; -inf stays -inf even in a row of nothing else."""
    row_max = scores.amax(dim=-1, keepdim=True).clamp_min(-_LARGEST)
    shifted = scores - row_max
    log_sum = torch.log(torch.exp(shifted).sum(dim=-1, keepdim=True))
    return torch.where(scores == float("-inf"), scores, shifted - log_sum).clamp_max(0.0)


def _noisy(scores: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """What sampled rows are ordered by, finite; greedy rows keep their scores."""
    is_sampled = (sampling.temperature > 0.0)[:, None]
    row_max = scores.amax(dim=-1, keepdim=True).clamp_min(-_LARGEST)
    tempered = (scores - row_max) / torch.where(is_sampled, sampling.temperature[:, None], 1.0)
    num_valid = scores.shape[1]
    if token_map is None:
        noise = gumbel_noise_dense_reference(sampling.seed, sampling.sample, position, num_valid)
    else:
        noise = gumbel_noise_reference(sampling.seed, sampling.sample, position, token_map[:num_valid])
    return torch.where(is_sampled, (tempered + noise).clamp_min(-_LARGEST), scores)


def _perturbed(keys: torch.Tensor, scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """What log q is the log-softmax of: keys of sampled rows in units of logits, finite but where the score is -inf."""
    scaled = (keys * temperature[:, None]).clamp(-_LARGEST, _LARGEST)
    return torch.where((temperature > 0.0)[:, None] & (scores > float("-inf")), scaled, scores)


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
    logits: torch.Tensor,
    k: int,
    sampling: SamplingTensors,
    position: torch.Tensor,
    token_map: torch.Tensor | None,
    num_valid: int,
    into_rows: DraftCandidates | None = None,
) -> DraftCandidates:
    """See `draft_topk`."""
    _check(logits, k, sampling, position, token_map, num_valid, into_rows)
    scores = torch.nan_to_num(logits[:, :num_valid].to(torch.float32), nan=float("-inf"), posinf=_LARGEST, neginf=float("-inf"))
    keys = ranked = scores
    if sampling.any_sampled:
        settings = sampling.gathered()
        keys = _noisy(scores, settings, position, token_map)
        ranked = _perturbed(keys, scores, settings.temperature)
    draft_id = _top_ids(keys, k)
    token = draft_id if token_map is None else token_map[draft_id]
    log_q = _log_softmax(ranked).gather(1, draft_id)
    if into_rows is None:
        return DraftCandidates(log_q, token)
    rows = sampling.row_of_logits
    into_rows.log_q[rows], into_rows.token[rows] = log_q, token
    return into_rows


def _check(
    logits: torch.Tensor,
    k: int,
    sampling: SamplingTensors,
    position: torch.Tensor,
    token_map: torch.Tensor | None,
    num_valid: int,
    into_rows: DraftCandidates | None,
) -> None:
    require_rows("logits", logits)
    check_sampling(sampling, position, logits.shape[0])
    if not 1 <= k <= num_valid <= logits.shape[1]:
        raise ValueError(f"draft_topk needs 1 <= k <= num_valid <= columns, got k={k}, num_valid={num_valid}, logits {list(logits.shape)}")
    if token_map is not None:
        require("token_map", token_map, torch.int64, -1)
        if token_map.shape[0] < num_valid:
            raise ValueError(f"draft_topk needs a target id for each of {num_valid} draft ids, token_map has {token_map.shape[0]}")
    if into_rows is not None:
        require("into_rows.log_q", into_rows.log_q, torch.float32, sampling.temperature.shape[0], k)
        require("into_rows.token", into_rows.token, torch.int64, sampling.temperature.shape[0], k)


def draft_topk(
    logits: torch.Tensor,
    k: int,
    sampling: SamplingTensors,
    position: torch.Tensor,
    token_map: torch.Tensor | None,
    num_valid: int,
    into_rows: DraftCandidates | None = None,
) -> DraftCandidates:
    """The k proposals of every row.

    logits [M, Vd], any floating dtype; position int32 [M] is the absolute position of the tokens proposed; token_map int64 [Vd]
    of target ids, None when draft ids are target ids. Draft ids >= num_valid (padding rows of a head) do not exist: they are
    never proposed and have no share in log_q. `into_rows` [R, k]: write there, at the rows of `sampling` (each named once, or all
    its values junk). Raises ValueError when k ids cannot be had.
    """
    launch = draft_topk_triton if logits.is_cuda else draft_topk_reference
    return launch(logits, k, sampling, position, token_map, num_valid, into_rows)
