# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""Choose one token per row of target logits: the one rule of greedy and sampled decoding, drafts or not.

Greedy rows (temperature 0) take the arg-max. Sampled rows take, with z = (logits - row maximum) / temperature,

    top-k   the k largest z
    top-p   of those, in descending order, the fewest whose share of sum(exp z) reaches top_p; at least one
    min-p   of those, exp(z) >= min_p, that is, at least min_p times the largest probability
    choice  arg-max of z + G, G the Gumbel noise of (seed, sample, position, token id)

The arg-max of z + G follows softmax(z) exactly (Gumbel-max; Maddison et al., "A* sampling", NeurIPS 2014), so the text is a
function of prefix and noise alone. Equal logits rank by lowest id everywhere.

Two launches. The first cuts a row into chunks of one fixed size, so that what is chosen does not depend on how many rows there are;
a program finds the winner of its chunk, with (logits - chunk maximum) in place of z. The second, one program a row, scores the
winners with z itself. A row with filters is chosen there from all its logits, without sorting: top-k and top-p each keep a prefix
of the order (logit descending, id ascending), so each is one cut (logit, id). The logit is found digit by digit on its bits,
highest digit first, by one pass a digit that weighs what lies at or above each of the digit's values; the id by one pass over the
equal logits. (In one launch, the registers of the filters would let too few of the first kind of programs run side by side.)
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require, require_rows
from eaglecli.kernels.launch import launch_options, start_dependent
from eaglecli.kernels.philox import gumbel_noise_dense_reference, gumbel_of_range, gumbel_of_tokens

_CHUNK = 2048  # logits of one program of the first launch
_BLOCK = 2048  # logits that a filter looks at together
_DIGIT_BITS = 4  # of the order key, settled by one pass over a row


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """How R rows sample, and which of them are asked: row m of M = B * repeats rows of logits belongs to rows[m // repeats].

    The settings stay where they are; kernels look them up. The two hints live on the host: False promises that no row needs that work.
    """

    temperature: torch.Tensor  # float32 [R]; 0 is greedy
    top_k: torch.Tensor  # int32 [R]; below 1 keeps the whole vocabulary
    top_p: torch.Tensor  # float32 [R]; 1 or more keeps everything
    min_p: torch.Tensor  # float32 [R] in [0, 1]
    seed: torch.Tensor  # int64 [R]
    sample: torch.Tensor  # int32 [R]
    rows: torch.Tensor  # int32 [B]
    repeats: int = 1
    any_sampled: bool = True
    any_filtered: bool = True

    @property
    def num_logits(self) -> int:
        """M, the rows of logits."""
        return self.rows.shape[0] * self.repeats

    @property
    def row_of_logits(self) -> torch.Tensor:
        """int64 [M]: the row whose settings hold for each row of logits."""
        return self.rows.to(torch.int64).repeat_interleave(self.repeats)

    def gathered(self) -> "SamplingTensors":
        """The same with settings [M] in the order of the logits: what a reference computes with."""
        index = self.row_of_logits
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample")
        settings = {name: getattr(self, name)[index] for name in names}
        return replace(self, **settings, rows=torch.arange(len(index), dtype=torch.int32, device=index.device), repeats=1)


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
def _choose_filtered(
    logits_ptr, vocab_size, row_max, temperature, top_k, top_p, min_p, seed, sample, position,
    KEY_BITS: tl.constexpr, DIGIT_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The choice of a finite, sampled row with any filters."""
    cut_key = tl.full([], 0, tl.uint32)
    cut_id = vocab_size
    if (top_k >= 1) & (top_k < vocab_size):
        cut_key, cut_id = _shortest_prefix(
            logits_ptr, vocab_size, row_max, temperature, top_k.to(tl.float32), cut_key, cut_id,
            False, KEY_BITS, DIGIT_BITS, BLOCK // 2,
        )  # fmt: skip
    if top_p < 1.0:
        total = _measure(logits_ptr, vocab_size, row_max, temperature, cut_key, cut_id, KEY_BITS, BLOCK)
        needed = tl.maximum(top_p * total, 1e-30)  # above zero: at least one token is kept
        cut_key, cut_id = _shortest_prefix(
            logits_ptr, vocab_size, row_max, temperature, needed, cut_key, cut_id,
            True, KEY_BITS, DIGIT_BITS, BLOCK // 2,
        )  # fmt: skip
    return _noisy_maximum(
        logits_ptr, vocab_size, row_max, temperature, cut_key, cut_id, min_p, seed, sample, position, KEY_BITS, BLOCK,
    )  # fmt: skip


@triton.jit
def _is_filtered(top_k, top_p, min_p, vocab_size):
    return ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit(do_not_specialize=["repeats"])
def _chunk_winners_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_ptr, position_ptr,
    chunk_max_ptr, chunk_id_ptr, vocab_size, num_chunks, row_stride, repeats, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Maximum of every chunk, +inf if it holds NaN or +inf; and its winner: by logit, or with noise where the row only samples."""
    start_dependent(DEPENDENT)
    logits_row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + logits_row // repeats)
    temperature = tl.load(temperature_ptr + row)
    is_filtered = _is_filtered(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocab_size)
    first = chunk * CHUNK
    column = first + tl.arange(0, CHUNK)
    x = _load_scores(logits_ptr + logits_row * row_stride, column, vocab_size)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN compares false
    chunk_max = tl.max(x, axis=0)
    score, best = x, chunk_max
    if (temperature > 0.0) & (is_filtered == 0):
        pivot = tl.where(tl.abs(chunk_max) < float("inf"), chunk_max, 0.0)
        noise = gumbel_of_range(tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + logits_row), first, CHUNK)
        score = (x - pivot) / temperature + noise
        best = tl.max(score, axis=0)
    winner = tl.min(tl.where((score == best) & (column < vocab_size), column, vocab_size), axis=0)
    tl.store(chunk_max_ptr + logits_row * num_chunks + chunk, chunk_max)
    tl.store(chunk_id_ptr + logits_row * num_chunks + chunk, winner)


@triton.jit(do_not_specialize=["repeats"])
def _choose_tokens_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_ptr, position_ptr,
    chunk_max_ptr, chunk_id_ptr, token_ptr, vocab_size, num_chunks, row_stride, repeats,
    KEY_BITS: tl.constexpr, DIGIT_BITS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    logits_row = tl.program_id(0).to(tl.int64)
    logits_ptr += logits_row * row_stride
    row = tl.load(rows_ptr + logits_row // repeats)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    seed, sample, position = tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + logits_row)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    exists = chunk < num_chunks
    maxima = tl.load(chunk_max_ptr + logits_row * num_chunks + chunk, mask=exists, other=float("-inf"))
    winners = tl.load(chunk_id_ptr + logits_row * num_chunks + chunk, mask=exists, other=vocab_size)
    row_max = tl.max(maxima, axis=0)
    is_finite = (row_max < float("inf")) & (row_max > float("-inf"))
    token = tl.min(tl.where(maxima == row_max, winners, vocab_size), axis=0)
    if is_finite & (temperature > 0.0):
        if _is_filtered(top_k, top_p, min_p, vocab_size):
            token = _choose_filtered(
                logits_ptr, vocab_size, row_max, temperature, top_k, top_p, min_p, seed, sample, position, KEY_BITS, DIGIT_BITS, BLOCK
            )
        else:
            x = _load_scores(logits_ptr, winners, vocab_size)
            score = (x - row_max) / temperature + gumbel_of_tokens(seed, sample, position, winners)
            token = tl.min(tl.where(score == tl.max(score, axis=0), winners, vocab_size), axis=0)
    tl.store(token_ptr + logits_row, tl.where(is_finite, token, -1).to(tl.int64))


def choose_tokens_triton(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> torch.Tensor:
    """Two launches; see `choose_tokens`."""
    _check(logits, sampling, position)
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        chunk_max = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
        chunk_id = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
        settings = (
            sampling.rows, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, sampling.sample, position
        )  # fmt: skip
        sizes = vocab_size, num_chunks, logits.stride(0), sampling.repeats
        _chunk_winners_kernel[(num_rows, num_chunks)](
            logits, *settings, chunk_max, chunk_id, *sizes, CHUNK=_CHUNK, num_warps=4, **launch_options(logits.device)
        )
        _choose_tokens_kernel[(num_rows,)](
            logits, *settings, chunk_max, chunk_id, token, *sizes,
            KEY_BITS=16 if logits.dtype == torch.bfloat16 else 32, DIGIT_BITS=_DIGIT_BITS,
            CHUNKS_BLOCK=triton.next_power_of_2(num_chunks), BLOCK=_BLOCK, num_warps=8, **launch_options(logits.device),
        )  # fmt: skip
    return token


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


def choose_tokens_reference(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> torch.Tensor:
    """See `choose_tokens`."""
    _check(logits, sampling, position)
    scores = logits.to(torch.float32)
    row_max = scores.amax(dim=-1, keepdim=True)  # NaN if the row holds one
    token = scores.argmax(dim=-1)
    if sampling.any_sampled:
        settings = sampling.gathered()
        is_sampled = settings.temperature > 0.0
        # The maximum is subtracted first: logits / 1e-9 alone would overflow.
        z = (scores - row_max) / torch.where(is_sampled, settings.temperature, 1.0)[:, None]
        noisy = z + gumbel_noise_dense_reference(settings.seed, settings.sample, position, scores.shape[1])
        if sampling.any_filtered:
            noisy = torch.where(_keep_filtered(scores, z, settings), noisy, float("-inf"))
        token = torch.where(is_sampled, noisy.argmax(dim=-1), token)
    return torch.where(torch.isfinite(row_max[:, 0]), token, -1)


def check_sampling(sampling: SamplingTensors, position: torch.Tensor, num_logits: int) -> None:
    """Raise ValueError unless the settings are of one number of rows and speak of `num_logits` rows of logits."""
    num_rows = sampling.temperature.shape[0]
    require("temperature", sampling.temperature, torch.float32, num_rows)
    require("top_k", sampling.top_k, torch.int32, num_rows)
    require("top_p", sampling.top_p, torch.float32, num_rows)
    require("min_p", sampling.min_p, torch.float32, num_rows)
    require("seed", sampling.seed, torch.int64, num_rows)
    require("sample", sampling.sample, torch.int32, num_rows)
    require("rows", sampling.rows, torch.int32, -1)
    require("position", position, torch.int32, num_logits)
    if sampling.num_logits != num_logits:
        raise ValueError(f"rows of length {len(sampling.rows)}, {sampling.repeats} times each, do not fit {num_logits} rows of logits")


def _check(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> None:
    require_rows("logits", logits)
    check_sampling(sampling, position, logits.shape[0])


def choose_tokens(logits: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> torch.Tensor:
    """Choose the token of every row: int64 [M], -1 where no choice is possible (NaN, +inf or nothing but -inf in the row).

    logits [M, V], any floating dtype; position int32 [M] is the absolute position of the token being chosen.
    """
    if logits.is_cuda:
        return choose_tokens_triton(logits, sampling, position)
    return choose_tokens_reference(logits, sampling, position)
