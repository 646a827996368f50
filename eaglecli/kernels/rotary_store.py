# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Per-head norm, rotary embedding and cache store of one layer's queries, keys and values.

qkv [T, (nh + 2 * nkv) * hd] holds the query heads, the key heads, then the value heads of every token.
Queries and keys are RMS-normalised per head (only when norm weights are given), then rotated by the angles of their
position: with (a, b) the two halves of a head, (a, b) -> (a cos - b sin, b cos + a sin). Keys and values are written
at `out_slots`; the rotated queries are returned. Several tokens may name the dummy slot: what it holds is not defined.
Source: Su et al., "RoFormer", in the half-rotating layout of the Llama checkpoints.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.launch import launch_options
from eaglecli.kernels.rms_norm import rms_norm_reference

_LATENCY_HEADS = 2
THROUGHPUT_HEADS = 16


@triton.jit
def _rotary_store_kernel(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, q_norm_ptr, k_norm_ptr, q_out_ptr, qkv_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    inside = column < half
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + column, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * half + column, mask=inside, other=0.0).to(tl.float32)
    source = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + column[None, :]
    exists = (is_q | is_k | is_v)[:, None] & inside[None, :]
    stored_first = tl.load(source, mask=exists, other=0.0)
    stored_second = tl.load(source + half, mask=exists, other=0.0)
    first = stored_first.to(tl.float32)
    second = stored_second.to(tl.float32)
    if q_norm_ptr is not None or k_norm_ptr is not None:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)
    if q_norm_ptr is not None:
        weight_first = tl.load(q_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        weight_second = tl.load(q_norm_ptr + half + column, mask=inside, other=0.0).to(tl.float32)
        first = tl.where(is_q[:, None], first * scale[:, None] * weight_first[None, :], first)
        second = tl.where(is_q[:, None], second * scale[:, None] * weight_second[None, :], second)
    if k_norm_ptr is not None:
        weight_first = tl.load(k_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        weight_second = tl.load(k_norm_ptr + half + column, mask=inside, other=0.0).to(tl.float32)
        first = tl.where(is_k[:, None], first * scale[:, None] * weight_first[None, :], first)
        second = tl.where(is_k[:, None], second * scale[:, None] * weight_second[None, :], second)
    rotated_first = first * cos[None, :] - second * sin[None, :]
    rotated_second = second * cos[None, :] + first * sin[None, :]

    q_target = q_out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    q_mask = is_q[:, None] & inside[None, :]
    tl.store(q_target, rotated_first, mask=q_mask)
    tl.store(q_target + half, rotated_second, mask=q_mask)
    k_target = k_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS)[:, None] * HEAD_DIM + column[None, :]
    k_mask = is_k[:, None] & inside[None, :]
    tl.store(k_target, rotated_first, mask=k_mask)
    tl.store(k_target + half, rotated_second, mask=k_mask)
    v_target = v_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS)[:, None] * HEAD_DIM + column[None, :]
    v_mask = is_v[:, None] & inside[None, :]
    tl.store(v_target, stored_first, mask=v_mask)
    tl.store(v_target + half, stored_second, mask=v_mask)


def check_rotary(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ValueError when a shape or a stride is not as `rotary_store` says."""
    head_dim = k_cache.shape[-1]
    if qkv.dim() != 2 or qkv.stride(1) != 1 or qkv.shape[1] % head_dim:
        raise ValueError(f"rotary_store needs qkv [T, heads * {head_dim}] with contiguous columns, got {tuple(qkv.shape)}")
    if k_cache.shape != v_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"rotary_store needs two contiguous caches of one shape, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if head_dim % 2 or cos.shape[1:] != (head_dim // 2,) or sin.shape != cos.shape or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"rotary_store needs contiguous tables [P, {head_dim // 2}], got {tuple(cos.shape)} and {tuple(sin.shape)}")


def rotary_store_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    block_heads: int | None = None,
) -> torch.Tensor:
    """One launch; a program takes block_heads heads of one token (None: by the number of tokens, which norms may feel in the last bit).

    ValueError when a shape or a stride is not as `rotary_store` says.
    """
    check_rotary(qkv, cos, sin, k_cache, v_cache)
    num_tokens = qkv.shape[0]
    _, num_kv_heads, head_dim = k_cache.shape
    num_all_heads = qkv.shape[1] // head_dim
    num_heads = num_all_heads - 2 * num_kv_heads
    q_out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    # few tokens: few heads per program for latency; many: more work per program, or launching programs costs more than they do
    block_heads = block_heads or (_LATENCY_HEADS if num_tokens < 64 else THROUGHPUT_HEADS)
    if num_tokens:
        _rotary_store_kernel[(num_tokens, triton.cdiv(num_all_heads, block_heads))](
            qkv, positions, cos, sin, out_slots, k_cache, v_cache, q_norm, k_norm, q_out, qkv.stride(0), eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_HEADS=block_heads, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=1 if block_heads == _LATENCY_HEADS else 4, **launch_options(qkv.device),
        )  # fmt: skip
    return q_out


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, n, hd] rotated by the angles behind cos and sin [T, hd/2], computed in float32 or wider."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos[:, None, :].to(wide.dtype), sin[:, None, :].to(wide.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def rotary_store_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """`rotary_store` in plain torch."""
    _, num_kv_heads, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    queries, keys, values = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        queries = rms_norm_reference(queries, q_norm, eps)
    if k_norm is not None:
        keys = rms_norm_reference(keys, k_norm, eps)
    token_cos, token_sin = cos[positions], sin[positions]
    k_cache[out_slots] = _rotate(keys, token_cos, token_sin).to(k_cache.dtype)
    v_cache[out_slots] = values.to(v_cache.dtype)
    return _rotate(queries, token_cos, token_sin)


def rotary_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Store the keys and values of T tokens in the cache and return their rotated queries [T, nh, hd].

    positions and out_slots are int32 [T]; cos and sin float32 [P, hd/2] with every position < P; k_cache and v_cache
    [slots, nkv, hd]; q_norm and k_norm [hd] or None.
    """
    if qkv.is_cuda:
        return rotary_store_triton(qkv, positions, cos, sin, out_slots, k_cache, v_cache, q_norm, k_norm, eps)
    return rotary_store_reference(qkv, positions, cos, sin, out_slots, k_cache, v_cache, q_norm, k_norm, eps)
