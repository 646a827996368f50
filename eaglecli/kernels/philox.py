# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of a kernel's arguments
"""Counter-based Gumbel noise: one number per (seed, sample, position, token), whoever asks and in whatever order.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with

    key = (seed low, seed high)      counter = (token_id >> 2, position, sample, 0)      lane = token_id & 3

so four neighbouring tokens share one call. A 32-bit draw x becomes a standard Gumbel number G:

    v = (x + 0.5) * 2^-32, at most 1 - 2^-24        (float32 would round 128 values of x to v = 1, an infinite G)
    E = -log(1 - v); below v = 2^-8 the series v + v^2/2 + v^3/3, since 1 - v loses the low bits of v
    G = -log(E)
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require

_MASK_32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_LARGEST_V = 1.0 - 2.0**-24
_SERIES_BELOW = 2.0**-8
_BLOCK = 1024  # tokens of one program


def philox4x32(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 on int64 tensors that hold values in [0, 2^32); shapes broadcast."""
    for _ in range(_NUM_ROUNDS):
        # The product fits 64 bits, so its wrapped int64 holds every bit; the mask undoes the sign extension of >>.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _MASK_32) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _MASK_32) ^ c3 ^ k1
        c1, c3 = product_1 & _MASK_32, product_0 & _MASK_32
        k0, k1 = (k0 + _WEYL_0) & _MASK_32, (k1 + _WEYL_1) & _MASK_32
    return c0, c1, c2, c3


def _lanes(
    seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, token_group: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four draws of each token group (token_id >> 2): int64, [G] or [M, G] groups -> four [M, G]."""
    seed = seed.to(torch.int64)[:, None]
    c1 = position.to(torch.int64)[:, None] & _MASK_32
    c2 = sample.to(torch.int64)[:, None] & _MASK_32
    return philox4x32(token_group, c1, c2, torch.zeros_like(c1), seed & _MASK_32, (seed >> 32) & _MASK_32)


def philox_uint32(seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The 32-bit draw of every token as int64 in [0, 2^32).

    seed int64 [M], sample and position int32 [M], token_ids int64 [V'] (shared) or [M, V'] -> int64 [M, V'].
    """
    lanes = _lanes(seed, sample, position, token_ids >> 2)
    lane = token_ids & 3
    return torch.where(lane < 2, torch.where(lane == 0, lanes[0], lanes[1]), torch.where(lane == 2, lanes[2], lanes[3]))


def gumbel_from_uint32(draw: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers, float32, of int64 draws in [0, 2^32): always finite."""
    v = ((draw.to(torch.float32) + 0.5) * 2.0**-32).clamp_max(_LARGEST_V)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return -torch.log(torch.where(v < _SERIES_BELOW, series, -torch.log(1.0 - v)))


@triton.jit
def gumbel_of_draw(draw):
    """uint32 block -> float32 Gumbel numbers."""
    v = tl.minimum((draw.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return -tl.log(tl.where(v < 2.0**-8, series, -tl.log(1.0 - v)))


@triton.jit
def gumbel_of_tokens(seed, sample, position, token_ids):
    """Noise of an int block of token ids; seed int64, sample and position int32 scalars."""
    lane_0, lane_1, lane_2, lane_3 = tl.philox(seed, (token_ids >> 2).to(tl.int32), position, sample, 0)
    lane = token_ids & 3
    return gumbel_of_draw(tl.where(lane < 2, tl.where(lane == 0, lane_0, lane_1), tl.where(lane == 2, lane_2, lane_3)))


@triton.jit
def gumbel_of_range(seed, sample, position, first, BLOCK: tl.constexpr):
    """Noise of the tokens first .. first + BLOCK - 1 (first a multiple of 4): one Philox call for four tokens."""
    group = (first >> 2) + tl.arange(0, BLOCK // 4)
    lane_0, lane_1, lane_2, lane_3 = tl.philox(seed, group, position, sample, 0)
    return gumbel_of_draw(tl.interleave(tl.interleave(lane_0, lane_2), tl.interleave(lane_1, lane_3)))


@triton.jit
def _gumbel_noise_kernel(
    seed_ptr, sample_ptr, position_ptr, token_ids_ptr, out_ptr, num_tokens, ids_stride,
    DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < num_tokens
    seed, sample, position = tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + row)
    if DENSE:
        noise = gumbel_of_range(seed, sample, position, first, BLOCK)
    else:
        noise = gumbel_of_tokens(seed, sample, position, tl.load(token_ids_ptr + row * ids_stride + column, mask=inside, other=0))
    tl.store(out_ptr + row * num_tokens + column, noise, mask=inside)


def gumbel_noise_triton(
    seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor | None, num_tokens: int
) -> torch.Tensor:
    """Launch over (row, block of tokens); token_ids None means 0 .. num_tokens-1."""
    num_rows = seed.shape[0]
    _check_rows(seed, sample, position)
    if token_ids is not None:
        require("token_ids", token_ids, torch.int64, *([num_rows] if token_ids.dim() == 2 else []), num_tokens)
    out = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=seed.device)
    if out.numel():
        ids_stride = num_tokens if token_ids is not None and token_ids.dim() == 2 else 0
        _gumbel_noise_kernel[(num_rows, triton.cdiv(num_tokens, _BLOCK))](
            seed, sample, position, token_ids, out, num_tokens, ids_stride, DENSE=token_ids is None, BLOCK=_BLOCK
        )
    return out


def _check_rows(seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor) -> None:
    require("seed", seed, torch.int64, -1)
    require("sample", sample, torch.int32, seed.shape[0])
    require("position", position, torch.int32, seed.shape[0])


def gumbel_noise_reference(seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """See `gumbel_noise`."""
    return gumbel_from_uint32(philox_uint32(seed, sample, position, token_ids))


def gumbel_noise_dense_reference(seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """See `gumbel_noise_dense`."""
    groups = torch.arange(-(-vocab_size // 4), device=seed.device)
    draws = torch.stack(_lanes(seed, sample, position, groups), dim=-1)
    return gumbel_from_uint32(draws.flatten(1)[:, :vocab_size])


def gumbel_noise(seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise of the given tokens: arguments as `philox_uint32` -> float32 [M, V']."""
    if seed.is_cuda:
        return gumbel_noise_triton(seed, sample, position, token_ids, token_ids.shape[-1])
    return gumbel_noise_reference(seed, sample, position, token_ids)


def gumbel_noise_dense(seed: torch.Tensor, sample: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of the tokens 0 .. vocab_size-1, four to a Philox call -> float32 [M, vocab_size]."""
    if seed.is_cuda:
        return gumbel_noise_triton(seed, sample, position, None, vocab_size)
    return gumbel_noise_dense_reference(seed, sample, position, vocab_size)
