# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""Choose one token per row of target logits: the one rule of greedy and sampled decoding, drafts or not.

Greedy rows (temperature 0) take the arg-max. Sampled rows take, with z = (logits - row maximum) / temperature,

    top-k   the k largest z
    top-p   of those, in descending order, the fewest whose share of sum(exp z) reaches top_p; at least one
    min-p   of those, exp(z) >= min_p, that is, at least min_p times the largest probability
    choice  arg-max of z + G, G the Gumbel noise of (seed, sample, position, token id)

The arg-max of z + G follows softmax(z) exactly (Gumbel-max; Maddison et al., "A* sampling", NeurIPS 2014), so the text is a
function of prefix and noise alone. Equal logits rank by lowest id everywhere.

The kernel gives a row to one program and never sorts. top-k and top-p each keep a prefix of the order (logit descending, id
ascending), so each is one cut (logit, id): the logit is found digit by digit on its bits, highest digit first, by one pass a
digit that weighs what lies at or above each of the digit's values; the id by one pass over the equal logits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require, require_rows
from eaglecli.kernels.philox import gumbel_noise_dense_reference, gumbel_of_range

_BLOCK = 2048  # logits looked at together
_DIGIT_BITS = 4  # of the order key, settled by one pass over a row


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """How each of M rows samples. The two hints live on the host: False promises that no row needs that work."""

    temperature: torch.Tensor  # float32 [M]; 0 is greedy
    top_k: torch.Tensor  # int32 [M]; below 1 keeps the whole vocabulary
    top_p: torch.Tensor  # float32 [M]; 1 or more keeps everything
    min_p: torch.Tensor  # float32 [M] in [0, 1]
    seed: torch.Tensor  # int64 [M]
    sample: torch.Tensor  # int32 [M]
    any_sampled: bool = True
    any_filtered: bool = True


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """`token` is 0 where `finite` is False."""

    token: torch.Tensor  # int64 [M]
    finite: torch.Tensor  # bool [M]: no NaN, no +inf and at least one finite logit in the row


@triton.jit
def _order_key(x, KEY_BITS: tl.constexpr):
    """uint32 that orders float32 x (no NaN) ascending; equal for -0 and +0. KEY_BITS 16: the low half of every x is zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.uint32, bitcast=True) ^ 0x80000000) >> (32 - KEY_BITS)


@triton.jit
def _load_scores(logits_ptr, column, vocab_size):
    return tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _is_within(key, column, cut_key, cut_id):
    return (key > cut_key) | ((key == cut_key) & (column <= cut_id))


@triton.jit
def _weight(x, row_max, temperature, WEIGH: tl.constexpr):
    """What a token adds to the measure of a prefix: its share of sum(exp z) for top-p, one for top-k."""
    if WEIGH:
        return tl.exp((x - row_max) / temperature)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _measure(logits_ptr, vocab_size, row_max, temperature, cut_key, cut_id, KEY_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of exp z over the tokens within the cut."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = _load_scores(logits_ptr, column, vocab_size)
        within = (column < vocab_size) & _is_within(_order_key(x, KEY_BITS), column, cut_key, cut_id)
        total += tl.where(within, _weight(x, row_max, temperature, True), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _shortest_prefix(
    logits_ptr, vocab_size, row_max, temperature, needed, cut_key, cut_id,
    WEIGH: tl.constexpr, KEY_BITS: tl.constexpr, DIGIT_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cut (key, id) of the shortest prefix, within the given cut, whose measure reaches `needed`."""
    digit = tl.arange(0, 1 << DIGIT_BITS)
    found = tl.full([], 0, tl.uint32)
    above = 0.0  # measure strictly above the equal logits; right after the last digit
    unit = tl.full([], 1 << (KEY_BITS - DIGIT_BITS), tl.uint32)  # what one more of the current digit adds to a key
    for _ in range(KEY_BITS // DIGIT_BITS):
        candidate = found + digit.to(tl.uint32) * unit
        measure = tl.zeros([BLOCK, 1 << DIGIT_BITS], tl.float32)
        for first in range(0, vocab_size, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = _load_scores(logits_ptr, column, vocab_size)
            key = _order_key(x, KEY_BITS)
            within = (column < vocab_size) & _is_within(key, column, cut_key, cut_id)
            weight = tl.where(within, _weight(x, row_max, temperature, WEIGH), 0.0)
            measure += tl.where(key[:, None] >= candidate[None, :], weight[:, None], 0.0)
        at_or_above = tl.sum(measure, axis=0)
        # The largest digit that still reaches the need; digit 0 stands for everything down to `found`, which does.
        best = tl.max(tl.where((at_or_above >= needed) | (digit == 0), digit, 0), axis=0)
        if best < (1 << DIGIT_BITS) - 1:
            above = tl.sum(tl.where(digit == best + 1, at_or_above, 0.0), axis=0)
        found += best.to(tl.uint32) * unit
        unit = unit >> DIGIT_BITS
    # Of the equal logits keep as many as the rest of the need takes, at least one.
    num_seen = 0
    last_id = tl.where(found == cut_key, cut_id, vocab_size)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = _load_scores(logits_ptr, column, vocab_size)
        key = _order_key(x, KEY_BITS)
        is_equal = (column < vocab_size) & (key == found) & _is_within(key, column, cut_key, cut_id)
        number = num_seen + tl.cumsum(is_equal.to(tl.int32), axis=0)  # 1 for the first equal logit
        before = above + (number - 1).to(tl.float32) * _weight(x, row_max, temperature, WEIGH)
        is_dropped = is_equal & (number > 1) & (before >= needed)
        last_id = tl.minimum(last_id, tl.min(tl.where(is_dropped, column - 1, vocab_size), axis=0))
        num_seen += tl.sum(is_equal.to(tl.int32), axis=0)
    return found, last_id


@triton.jit
def _row_maximum(logits_ptr, vocab_size, BLOCK: tl.constexpr):
    """Arg-max (lowest id), maximum without NaN, and whether the row is finite."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = _load_scores(logits_ptr, column, vocab_size)
        num_bad += tl.where(x < float("inf"), 0, 1)  # NaN compares false
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, column, best_id)
    row_max = tl.max(best, axis=0)
    token = tl.min(tl.where(best == row_max, best_id, vocab_size), axis=0)
    return token, row_max, (tl.sum(num_bad, axis=0) == 0) & (row_max > float("-inf"))


@triton.jit
def _noisy_maximum(
    logits_ptr, vocab_size, row_max, temperature, cut_key, cut_id, min_p, seed, sample, position,
    KEY_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Arg-max (lowest id) of z + G over the tokens that survive the filters."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], 0, tl.int32) + vocab_size
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = _load_scores(logits_ptr, column, vocab_size)
        z = (x - row_max) / temperature
        kept = (column < vocab_size) & _is_within(_order_key(x, KEY_BITS), column, cut_key, cut_id) & (tl.exp(z) >= tl.minimum(min_p, 1.0))
        if tl.max(kept.to(tl.int32), axis=0) > 0:  # filters empty most blocks; their noise need not be made
            noisy = tl.where(kept, z + gumbel_of_range(seed, sample, position, first, BLOCK), float("-inf"))
            better = noisy > best
            best = tl.where(better, noisy, best)
            best_id = tl.where(better, column, best_id)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_id, vocab_size), axis=0)


@triton.jit
def _choose_tokens_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_ptr, position_ptr, token_ptr, finite_ptr,
    vocab_size, row_stride, KEY_BITS: tl.constexpr, DIGIT_BITS: tl.constexpr, BLOCK: tl.constexpr, FILTER_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    token, row_max, finite = _row_maximum(logits_ptr, vocab_size, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if finite & (temperature > 0.0):
        cut_key = tl.full([], 0, tl.uint32)
        cut_id = vocab_size
        top_k = tl.load(top_k_ptr + row)
        if (top_k >= 1) & (top_k < vocab_size):
            cut_key, cut_id = _shortest_prefix(
                logits_ptr, vocab_size, row_max, temperature, top_k.to(tl.float32), cut_key, cut_id,
                False, KEY_BITS, DIGIT_BITS, FILTER_BLOCK,
            )  # fmt: skip
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            total = _measure(logits_ptr, vocab_size, row_max, temperature, cut_key, cut_id, KEY_BITS, BLOCK)
            needed = tl.maximum(top_p * total, 1e-30)  # above zero: at least one token is kept
            cut_key, cut_id = _shortest_prefix(
                logits_ptr, vocab_size, row_max, temperature, needed, cut_key, cut_id,
                True, KEY_BITS, DIGIT_BITS, FILTER_BLOCK,
            )  # fmt: skip
        token = _noisy_maximum(
            logits_ptr, vocab_size, row_max, temperature, cut_key, cut_id, tl.load(min_p_ptr + row),
            tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + row), KEY_BITS, BLOCK,
        )  # fmt: skip
    tl.store(token_ptr + row, tl.where(finite, token, 0))
    tl.store(finite_ptr + row, finite)


def choose_tokens_triton(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> ChosenTokens:
    """Launch one program per row; see `choose_tokens`."""
    _check(logits, sampling, position)
    num_rows, vocab_size = logits.shape
    out = ChosenTokens(
        token=torch.empty(num_rows, dtype=torch.int64, device=logits.device),
        finite=torch.empty(num_rows, dtype=torch.bool, device=logits.device),
    )
    if num_rows:
        _choose_tokens_kernel[(num_rows,)](
            logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, sampling.sample, position,
            out.token, out.finite, vocab_size, logits.stride(0),
            KEY_BITS=16 if logits.dtype == torch.bfloat16 else 32, DIGIT_BITS=_DIGIT_BITS,
            BLOCK=_BLOCK, FILTER_BLOCK=_BLOCK // 2, num_warps=8,
        )  # fmt: skip
    return out


def _keep_filtered(scores: torch.Tensor, z: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Which tokens survive top-k, top-p and min-p: float32 [M, V] scores and z (row maximum 0) -> bool [M, V]."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices  # stable: equal logits stay in id order
    sorted_z = z.gather(1, order)
    rank = torch.arange(z.shape[1], device=z.device)
    top_k = sampling.top_k[:, None]
    keep = (top_k < 1) | (rank < top_k)
    weight = torch.where(keep, torch.exp(sorted_z), 0.0)
    before = torch.cumsum(weight, dim=-1, dtype=torch.float64) - weight
    total = weight.sum(dim=-1, keepdim=True, dtype=torch.float64).to(torch.float32)
    top_p = sampling.top_p[:, None]
    keep &= (top_p >= 1.0) | (rank == 0) | (before.to(torch.float32) < top_p * total)
    keep &= torch.exp(sorted_z) >= sampling.min_p[:, None].clamp_max(1.0)
    return torch.zeros_like(keep).scatter_(1, order, keep)


def choose_tokens_reference(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> ChosenTokens:
    """See `choose_tokens`."""
    _check(logits, sampling, position)
    scores = logits.to(torch.float32)
    row_max = scores.amax(dim=-1, keepdim=True)  # NaN if the row holds one
    finite = torch.isfinite(row_max[:, 0])
    token = scores.argmax(dim=-1)
    if sampling.any_sampled:
        is_sampled = sampling.temperature > 0.0
        # The maximum is subtracted first: logits / 1e-9 alone would overflow.
        z = (scores - row_max) / torch.where(is_sampled, sampling.temperature, 1.0)[:, None]
        noisy = z + gumbel_noise_dense_reference(sampling.seed, sampling.sample, position, scores.shape[1])
        if sampling.any_filtered:
            noisy = torch.where(_keep_filtered(scores, z, sampling), noisy, float("-inf"))
        token = torch.where(is_sampled, noisy.argmax(dim=-1), token)
    return ChosenTokens(torch.where(finite, token, 0), finite)


def check_sampling(sampling: SamplingTensors, position: torch.Tensor, num_rows: int) -> None:
    """Raise ValueError unless every tensor speaks of `num_rows` rows."""
    require("temperature", sampling.temperature, torch.float32, num_rows)
    require("top_k", sampling.top_k, torch.int32, num_rows)
    require("top_p", sampling.top_p, torch.float32, num_rows)
    require("min_p", sampling.min_p, torch.float32, num_rows)
    require("seed", sampling.seed, torch.int64, num_rows)
    require("sample", sampling.sample, torch.int32, num_rows)
    require("position", position, torch.int32, num_rows)


def _check(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> None:
    require_rows("logits", logits)
    check_sampling(sampling, position, logits.shape[0])


def choose_tokens(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> ChosenTokens:
    """Choose the token of every row.

    logits [M, V], any floating dtype; position int32 [M] is the absolute position of the token being chosen.
    """
    if logits.is_cuda:
        return choose_tokens_triton(logits, sampling, position)
    return choose_tokens_reference(logits, sampling, position)
