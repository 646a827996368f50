# ruff: noqa: ANN001, ANN201 - Triton infers the types of a kernel's arguments
"""Parts of the attention kernel that take the place of `rotary_store`: rotating heads on their way, storing a row's fresh keys.

Angles and layouts as in `rotary_store`; source as there.
"""

import triton
import triton.language as tl


@triton.jit
def rotated(
    source, position, cos_ptr, sin_ptr, exists,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """float32 [N, BLOCK_D]: heads at the pointers `source` [N], rotated by the angles of `position` [N]; zeros where not `exists` [N]."""
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_D)
    is_first = column < half
    folded = tl.where(is_first, column, column - half)
    across = tl.where(is_first, column + half, column - half)
    if half % 8 == 0:  # without being told, loads of it would be one number each
        folded = tl.max_contiguous(tl.multiple_of(folded, 8), 8)
        across = tl.max_contiguous(tl.multiple_of(across, 8), 8)
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]
    angle = position.to(tl.int64)[:, None] * half + folded[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(source[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source[:, None] + across[None, :], mask=inside, other=0.0).to(tl.float32)
    return own * cos + tl.where(is_first[None, :], -partner, partner) * sin


@triton.jit
def store_fresh_keys(
    qkv_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    first_query, num_queries, first_fresh, begin, end, kv_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FRESH_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate and store the keys, and store the values, of those of a row's tokens whose column begin <= first_fresh + token < end."""
    column = tl.arange(0, BLOCK_D)
    for start in tl.range(0, num_queries, FRESH_BLOCK, num_stages=1):
        index = start + tl.arange(0, FRESH_BLOCK)
        is_mine = (index < num_queries) & (first_fresh + index >= begin) & (first_fresh + index < end)
        token = (first_query + index).to(tl.int64)
        position = tl.load(positions_ptr + token, mask=is_mine, other=0)
        slot = tl.load(slots_ptr + token, mask=is_mine, other=0).to(tl.int64)
        source = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + NUM_HEADS + kv_head) * HEAD_DIM
        inside = is_mine[:, None] & (column < HEAD_DIM)[None, :]
        values = tl.load(source[:, None] + NUM_KV_HEADS * HEAD_DIM + column[None, :], mask=inside, other=0.0)
        keys = rotated(source, position, cos_ptr, sin_ptr, is_mine, HEAD_DIM, BLOCK_D)
        place = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(k_cache_ptr + place, keys, mask=inside)
        tl.store(v_cache_ptr + place, values, mask=inside)
    tl.debug_barrier()  # what threads of this program have stored, its other threads read
