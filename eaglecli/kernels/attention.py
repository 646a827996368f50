# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Attention of packed queries over slots of the cache: ragged prefill and extend, draft steps, tree verify.

Which keys a query sees is told by `AttentionInputs`. Keys are read through the slot table after the store of the current
tokens, so that the tail is read from the cache like the prefix. With a window, a query at position p sees keys at
positions > p - window; a key in column c of the table has position c. A tail mask is taken as it is.
Masked slots may hold anything, NaN included. Queries that belong to no row, or see no key, give zeros.

GPU, one launch: the queries of a row and the heads of a group are packed into the rows of a tile, so that one load of a
block of keys serves them all (every branch of a tree, every token of a verify). Keys are walked in blocks of one fixed size
counted from position 0. With few programs the keys of a row are split over several, with more those of long rows; the last of them to
finish merges their results in a fixed order. Grids depend on shapes and host bounds only; programs without work leave early.

For `qkv_attention.py` the kernel takes the heads as the product with the weights left them: see there.
Source: Dao, "FlashAttention-2" (running softmax) and Dao et al., "Flash-Decoding" (split over keys); numbering our own.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.fresh_keys import rotated, store_fresh_keys
from eaglecli.kernels.last_arrival import arrival_counters, is_last_arrival
from eaglecli.kernels.launch import launch_options

_MAX_SPLITS = 64
_NUM_MULTIPROCESSORS = 132
_MANY_PROGRAMS = 1024
_LONG_SPLIT_KEYS, _MAX_LONG_SPLITS = 512, 8  # the bound keeps the buffers of partial results small
_MOST_PROGRAMS, _MOST_SMALL_PROGRAMS = 1600, 4096  # with splits, those that end at once included
_MOST_SPLIT_STAGES = 3
_ONE_SPLIT_BLOCKS = 2  # so few blocks are walked sooner than results are merged
_MOST_FRESH_AT_ONCE = 32  # tokens of a row whose keys are rotated together
_TAME = 1e15  # times another one it stays far from overflow
_MERGED_PER_THREAD = 64  # float32 of the splits' results in the registers of a thread at once
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_block(
    q, sums, maximum, total, k_cache_ptr, v_cache_ptr, table_ptr, mask_ptr, query, exists, position, key, first_key, end_key, prefix_len,
    scale_log2, mask_query_stride, window, kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, IN_TAIL: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
):  # fmt: skip
    """One block of keys: the running softmax state (sums, maximum, total) after it.

    key [BLOCK_N] columns of the slot table; only first_key <= key < end_key are loaded. IN_TAIL: the block may reach past the prefix.
    """
    column = tl.arange(0, BLOCK_D)
    used = (key >= first_key) & (key < end_key)
    # without tail or window all keys of a block are used
    slot = tl.load(table_ptr + key, mask=used, other=0) if IN_TAIL or HAS_WINDOW else tl.load(table_ptr + key)
    if WIDE_OFFSETS:
        slot = slot.to(tl.int64)
    place = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
    loaded = used[:, None] & (column < HEAD_DIM)[None, :]
    if IN_TAIL or HAS_WINDOW or BLOCK_D != HEAD_DIM:
        keys = tl.load(k_cache_ptr + place, mask=loaded, other=0.0)
        values = tl.load(v_cache_ptr + place, mask=loaded, other=0.0)
    else:
        keys = tl.load(k_cache_ptr + place)
        values = tl.load(v_cache_ptr + place)
    visible = exists[:, None] & used[None, :]
    if IN_TAIL and mask_ptr is not None:
        tail = key - prefix_len
        in_tail = visible & (tail >= 0)[None, :]
        allowed = tl.load(mask_ptr + query[:, None] * mask_query_stride + tail[None, :], mask=in_tail, other=0) != 0
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        visible = tl.where((tail >= 0)[None, :], allowed, visible)
        # 0 * NaN is NaN: bad values are taken out here and given back, by their scores, to the queries that see them
        is_finite = tl.abs(values.to(tl.float32)) < float("inf")
        is_bad = tl.min(is_finite.to(tl.int32), 1) == 0
        values = tl.where(is_finite, values, 0.0)
    else:
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        if IN_TAIL:
            visible = visible & (key[None, :] - prefix_len <= query[:, None])
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    if IN_TAIL and mask_ptr is not None:
        scores = tl.where(is_bad[None, :], float("nan"), scores)
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
    return sums, new_maximum, total


@triton.jit
def _merge_splits(
    partial_ptr, log_total_ptr, out_ptr, first_query, num_queries, tile, kv_head, num_tokens, num_active,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the weighted mean of the active splits' results for the first MERGE_ROWS packed queries of a tile; the tile has no others."""
    packed = tile * BLOCK_M + tl.arange(0, MERGE_ROWS)
    query = packed // GROUP
    exists = query < num_queries
    row_place = (first_query + query) * NUM_HEADS + kv_head * GROUP + packed % GROUP
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    sums = tl.zeros((MERGE_ROWS, BLOCK_D), tl.float32)
    maximum = tl.full((MERGE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((MERGE_ROWS,), tl.float32)
    for first in range(0, num_active, MERGE_SPLITS):
        split = first + tl.arange(0, MERGE_SPLITS)
        place = (split * num_tokens).to(tl.int64)[None, :] * NUM_HEADS + row_place[:, None]
        stored = exists[:, None] & (split < num_active)[None, :]
        log_total = tl.load(log_total_ptr + place, mask=stored, other=float("-inf"), cache_modifier=".cg")
        source = partial_ptr + place[:, :, None] * HEAD_DIM + column[None, None, :]
        partial = tl.load(source, mask=stored[:, :, None] & in_head[None, None, :], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(log_total, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(log_total - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None] + tl.sum(partial * weights[:, :, None], 1)
        maximum = new_maximum
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + row_place.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], result, mask=exists[:, None] & in_head[None, :])


@triton.jit
def _zero_unowned(
    out_ptr, first, num_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Zero the packed queries first .. num_tokens, which belong to no row; every program of the grid's first axis takes some."""
    column = tl.arange(0, BLOCK_D)
    head = tl.program_id(1)
    for start in range(first + tl.program_id(0) * BLOCK_M, num_tokens, tl.num_programs(0) * BLOCK_M):
        token = start + tl.arange(0, BLOCK_M)
        mask = (token < num_tokens)[:, None] & (column < HEAD_DIM)[None, :]
        for head_index in range(head, NUM_HEADS, tl.num_programs(1)):
            place = (token.to(tl.int64) * NUM_HEADS + head_index)[:, None] * HEAD_DIM + column[None, :]
            tl.store(out_ptr + place, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), mask=mask)


# an integer argument is compiled anew for 1 and for multiples of 16 unless named here: a graph size must not cost a compilation
@triton.jit(
    do_not_specialize=[
        "batch", "num_tokens", "table_width", "mask_row_stride", "mask_query_stride", "mask_width", "window",
        "num_splits", "min_split_keys", "fresh_offset",
    ]
)  # fmt: skip
def _attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_ptr, log_total_ptr, counter_ptr,
    rows_ptr, query_start_ptr, prefix_lens_ptr, table_ptr, first_keys_ptr, positions_ptr, mask_ptr, scale_log2,
    batch, num_tokens, table_width, mask_row_stride, mask_query_stride, mask_width, window, num_splits, min_split_keys,
    cos_ptr, sin_ptr, slots_ptr, fresh_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr, TAIL_STAGES: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr, WIDE_OFFSETS: tl.constexpr, FRESH_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (tile of packed queries, split * NUM_KV_HEADS + key head, row); row number `batch` zeroes what belongs to no row.

    IS_SPLIT: partial is float32 [num_splits, T, NUM_HEADS, HEAD_DIM], log_total [num_splits, T, NUM_HEADS], -inf where a query sees no
    key of a split; counter has a zero for every (row, key head, tile).
    FRESH_BLOCK > 0: q holds raw heads as `qkv_attention.py` takes them; a row's tokens stand fresh_offset behind its prefix.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    if DEPENDENT:
        gdc_wait()
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = tl.program_id(1) // NUM_KV_HEADS
    row = tl.program_id(2)
    first_query = tl.load(query_start_ptr + row)
    if row == batch:
        _zero_unowned(out_ptr, first_query, num_tokens, NUM_HEADS, HEAD_DIM, BLOCK_D, BLOCK_M)
        return
    num_queries = tl.load(query_start_ptr + row + 1) - first_query
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = packed // GROUP
    exists = query < num_queries
    token = (first_query + query).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    column = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]

    prefix_len = tl.load(prefix_lens_ptr + row)
    table_row = tl.load(rows_ptr + row).to(tl.int64)
    table_ptr += table_row * table_width
    if mask_ptr is None:
        last_query = tl.minimum(num_queries - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
        num_keys = prefix_len + last_query + 1
    else:
        num_keys = prefix_len + mask_width
        mask_ptr += row.to(tl.int64) * mask_row_stride
    num_keys = tl.minimum(num_keys, table_width)
    first_key = 0
    if first_keys_ptr is not None:
        first_key = tl.load(first_keys_ptr + table_row)  # whole blocks are left out, so no other block needs a mask for it
    position = query
    if HAS_WINDOW:
        position = tl.load(positions_ptr + token, mask=exists, other=2147483647)
        # the tail of a masked tree is never outside the window
        oldest = tl.minimum(tl.maximum(tl.min(position, 0) - window + 1, 0), prefix_len if mask_ptr is not None else num_keys)
        first_key = tl.maximum(first_key, oldest)
    begin = first_key // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(tl.cdiv(num_keys - begin, num_splits), BLOCK_N) * BLOCK_N
    split_keys = tl.maximum(split_keys, min_split_keys)
    num_active = tl.cdiv(num_keys - begin, split_keys)
    if split >= num_active:
        return
    if DEPENDENT:
        gdc_launch_dependents()
    begin += split * split_keys
    end = tl.minimum(begin + split_keys, num_keys)
    prefix_end = tl.minimum(end, prefix_len) // BLOCK_N * BLOCK_N

    if FRESH_BLOCK > 0:
        if end > prefix_len + fresh_offset:
            store_fresh_keys(
                q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
                first_query, num_queries, prefix_len + fresh_offset, begin, end, kv_head,
                NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, FRESH_BLOCK,
            )  # fmt: skip
        query_position = tl.load(positions_ptr + token, mask=exists, other=0)
        source = q_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
        q = rotated(source, query_position, cos_ptr, sin_ptr, exists, HEAD_DIM, BLOCK_D)
        q = q.to(q_ptr.dtype.element_ty)
    else:
        q = tl.load(q_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(begin, prefix_end, BLOCK_N):
        sums, maximum, total = _attend_block(
            q, sums, maximum, total, k_cache_ptr, v_cache_ptr, table_ptr, mask_ptr, query, exists, position,
            start + tl.arange(0, BLOCK_N), first_key, prefix_end, prefix_len, scale_log2, mask_query_stride, window, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_D, HAS_WINDOW, False, WIDE_OFFSETS,
        )  # fmt: skip
    # a masked tail is a block or two: not worth the shared memory of a pipeline
    for start in tl.range(tl.maximum(begin, prefix_end), end, BLOCK_N, num_stages=TAIL_STAGES):
        sums, maximum, total = _attend_block(
            q, sums, maximum, total, k_cache_ptr, v_cache_ptr, table_ptr, mask_ptr, query, exists, position,
            start + tl.arange(0, BLOCK_N), first_key, end, prefix_len, scale_log2, mask_query_stride, window, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_D, HAS_WINDOW, True, WIDE_OFFSETS,
        )  # fmt: skip

    has_keys = total > 0.0
    result = sums / tl.where(has_keys, total, 1.0)[:, None]
    result_place = token * NUM_HEADS + head
    target = out_ptr + result_place[:, None] * HEAD_DIM + column[None, :]
    if IS_SPLIT:
        if num_active == 1:
            tl.store(target, result, mask=inside)
        else:
            place = split.to(tl.int64) * num_tokens * NUM_HEADS + result_place
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + column[None, :], result, mask=inside)
            log_total = tl.where(has_keys, maximum + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
            # NaN scores fail has_keys; they must reach the result, not vanish
            tl.store(log_total_ptr + place, tl.where(total == total, log_total, total), mask=exists)
            if is_last_arrival(counter_ptr + (row * NUM_KV_HEADS + kv_head) * tl.num_programs(0) + tile, num_active):
                _merge_splits(
                    partial_ptr, log_total_ptr, out_ptr, first_query, num_queries, tile, kv_head, num_tokens, num_active,
                    NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, MERGE_ROWS, MERGE_SPLITS,
                )  # fmt: skip
    else:
        tl.store(target, result, mask=inside)


@dataclass(frozen=True)
class AttentionTile:
    """What one program computes: block_queries (packed queries x heads of a group) x block_keys at a time."""

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int


def choose_tile(packed_rows: int, num_row_heads: int, is_masked: bool, is_wide: bool, head_dim: int) -> AttentionTile:
    """The tile for this many packed rows of each of num_row_heads (row, key head) pairs.

    Found by `benchmarks.attention_tiles`; where iterations of a model disagreed, these decided (`benchmarks/RESULTS.md`, runs 10 and 13).

    float32 has no matrix unit: its tile is small. Many programs hide the latency of one another's loads, so shared memory for two or three
    blocks of keys is worth less than room for more programs on a multiprocessor.
    """
    if is_wide:
        return AttentionTile(16, 32, 4, 2)
    if num_row_heads * triton.cdiv(packed_rows, 16) <= _NUM_MULTIPROCESSORS:
        return AttentionTile(16, 64, 4, 1)  # idle multiprocessors: reading keys again from the L2 is sooner done than larger tiles
    block_queries = max(16, min(triton.next_power_of_2(packed_rows), 64 if is_masked else 128))
    num_programs = num_row_heads * triton.cdiv(packed_rows, block_queries)
    if block_queries == 16:
        if num_programs <= _MANY_PROGRAMS // 2:
            return AttentionTile(16, 128, 4, 2)
        return AttentionTile(16, 64, 4, 2) if head_dim > 64 else AttentionTile(16, 64, 4, 5)
    if block_queries == 32 and head_dim > 64 and num_programs >= _MANY_PROGRAMS // 2:
        return AttentionTile(32, 32, 2, 3)
    if block_queries == 32:
        return AttentionTile(32, 64, 4, 2)
    return AttentionTile(block_queries, 64, 8 if block_queries == 128 else 4, 3)


def choose_splits(num_programs: int, max_keys: int, tile: AttentionTile) -> tuple[int, int]:
    """(programs that the keys of a row are split over, least keys of each), from host bounds.

    num_programs run without a split, max_keys is a row's bound. Few programs: splits fill the device, evenly. More: only rows of many keys
    are split, so that no launch waits for its longest row; the more programs, the fewer splits, for those without keys have to be launched
    too, and most where tiles are large.
    """
    num_blocks = triton.cdiv(max_keys, tile.block_keys)
    if num_blocks <= _ONE_SPLIT_BLOCKS:
        return 1, 0
    filling = 2 * _NUM_MULTIPROCESSORS // num_programs
    if filling > 1:
        return min(filling, num_blocks, _MAX_SPLITS), 0
    if tile.num_stages > _MOST_SPLIT_STAGES:  # long rows are walked quickly, and room for splits that end at once is scarce
        return 1, 0
    most_programs = _MOST_PROGRAMS if tile.block_queries > 16 else _MOST_SMALL_PROGRAMS
    num_splits = min(max_keys // _LONG_SPLIT_KEYS, most_programs // num_programs, _MAX_LONG_SPLITS)
    if num_splits <= 1:
        return 1, 0
    return num_splits, _LONG_SPLIT_KEYS if num_splits > 3 else 2 * _LONG_SPLIT_KEYS


def check_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs) -> None:
    """Raise ValueError when a shape, a stride or a dtype is not as `attention` says."""
    if q.dim() != 3 or not q.is_contiguous() or q.shape[2] != k_cache.shape[-1]:
        raise ValueError(f"attention needs contiguous queries [T, nh, {k_cache.shape[-1]}], got {tuple(q.shape)}")
    check_caches(q.shape[1], q.dtype, k_cache, v_cache, inputs)


def check_caches(num_heads: int, dtype: torch.dtype, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs) -> None:
    """Raise ValueError when caches or addressing are not as `attention` says, for num_heads query heads of this dtype."""
    if k_cache.shape != v_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"attention needs two contiguous caches [slots, nkv, hd], got {k_cache.shape} and {v_cache.shape}")
    if num_heads % k_cache.shape[1] or k_cache.dtype != dtype or v_cache.dtype != dtype:
        raise ValueError(f"attention needs whole groups and one dtype, got {num_heads} heads, {k_cache.shape}, {dtype}, {k_cache.dtype}")
    if not inputs.slot_table.is_contiguous() or (inputs.tail_mask is not None and inputs.tail_mask.stride(2) != 1):
        raise ValueError("attention needs a contiguous slot table and a tail mask of contiguous lines")
    if inputs.tail_mask is not None and inputs.tail_mask.shape[1] < inputs.max_query_len:
        raise ValueError(f"the tail mask has {inputs.tail_mask.shape[1]} queries, rows may have {inputs.max_query_len}")


def attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    num_splits: int | None = None,
    min_split_keys: int = 0,
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """One launch: [T, nh * hd]. ValueError when a shape, stride or dtype is not as `attention` says.

    num_splits and tile None choose them from the host bounds. A caller that needs a row's numbers independent of the other rows and of the
    bounds gives a tile, min_split_keys (a multiple of its block_keys) and num_splits >= keys / min_split_keys: splits then are
    min_split_keys long, always.
    """
    check_attention(q, k_cache, v_cache, inputs)
    return launch_attention(q.flatten(1), None, k_cache, v_cache, inputs, scale, window, num_splits, min_split_keys, tile)


def launch_attention(
    q: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    num_splits: int | None,
    min_split_keys: int,
    tile: AttentionTile | None,
) -> torch.Tensor:
    """The launch of `attention_triton`, q [T, nh * hd]; with rotary `tables` that of `qkv_attention_triton`, q its qkv. Checks nothing."""
    num_tokens = q.shape[0]
    _, num_kv_heads, head_dim = k_cache.shape
    num_heads = q.shape[1] // head_dim - (2 * num_kv_heads if tables else 0)
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    batch = inputs.rows.shape[0]
    packed_rows = inputs.max_query_len * (num_heads // num_kv_heads)
    mask = inputs.tail_mask
    if tile is None:
        is_wide = q.dtype not in (torch.bfloat16, torch.float16)
        tile = choose_tile(packed_rows, batch * num_kv_heads, mask is not None, is_wide, head_dim)
    num_tiles = triton.cdiv(packed_rows, tile.block_queries)
    tail_width = inputs.max_query_len if mask is None else mask.shape[2]
    if num_splits is None:
        max_keys = min(inputs.max_prefix_len + tail_width, inputs.slot_table.shape[1])
        num_splits, min_split_keys = choose_splits(batch * num_kv_heads * num_tiles, max_keys, tile)
    partial = log_total = counters = None
    if num_splits > 1:
        partial = torch.empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
        log_total = torch.empty((num_splits, num_tokens, num_heads), dtype=torch.float32, device=q.device)
        counters = arrival_counters(batch * num_kv_heads * num_tiles, q.device)
    block_dim = max(16, triton.next_power_of_2(head_dim))  # the matrix unit takes 16 columns or more
    merge_rows = min(tile.block_queries, triton.next_power_of_2(packed_rows))
    merge_splits = tile.num_warps * 32 * _MERGED_PER_THREAD // (merge_rows * block_dim)
    cos, sin = tables or (None, None)
    _attention_kernel[(num_tiles, num_kv_heads * num_splits, batch + 1)](
        q, k_cache, v_cache, out, partial, log_total, counters, inputs.rows, inputs.query_start, inputs.prefix_lens, inputs.slot_table,
        inputs.first_keys, inputs.positions, None if mask is None else mask.view(torch.uint8), scale * _LOG2_E, batch, num_tokens,
        inputs.slot_table.shape[1], *((0, 0) if mask is None else mask.stride()[:2]), tail_width, window or 0, num_splits, min_split_keys,
        cos, sin, inputs.out_slots if tables else None, 0 if mask is None else tail_width - inputs.max_query_len,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_dim,
        BLOCK_M=tile.block_queries, BLOCK_N=tile.block_keys, HAS_WINDOW=window is not None,
        IS_SPLIT=num_splits > 1, TAIL_STAGES=tile.num_stages if mask is None else 1,
        MERGE_ROWS=merge_rows, MERGE_SPLITS=max(1, min(16, merge_splits)), WIDE_OFFSETS=k_cache.numel() >= 2**31,
        FRESH_BLOCK=min(_MOST_FRESH_AT_ONCE, triton.next_power_of_2(inputs.max_query_len)) if tables else 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(q.device),
    )  # fmt: skip
    return out


def _visible_keys(inputs: AttentionInputs, query_index: torch.Tensor, num_columns: int, window: int | None) -> torch.Tensor:
    """bool [B, Q, num_columns]: the columns of the slot table that query i of each row sees; query_index [B, Q] is its packed index."""
    batch, num_queries = query_index.shape
    column = torch.arange(num_columns, device=query_index.device)
    prefix_lens = inputs.prefix_lens.long()[:, None, None]
    in_prefix = column < prefix_lens
    tail_column = column - prefix_lens  # [B, 1, columns], negative inside the prefix
    recent = True if window is None else column > inputs.positions.long()[query_index][:, :, None] - window
    if inputs.first_keys is not None:
        recent = recent & (column >= inputs.first_keys[inputs.rows].long()[:, None, None])
    if inputs.tail_mask is None:
        causal = tail_column <= torch.arange(num_queries, device=query_index.device)[:, None]
        return causal & recent
    width = inputs.tail_mask.shape[2]
    in_tail = (tail_column >= 0) & (tail_column < width)
    index = tail_column.clamp(0, width - 1).expand(batch, num_queries, num_columns)
    return (in_prefix & recent) | (in_tail & inputs.tail_mask[:, :num_queries].gather(2, index))


def _is_tame(tensor: torch.Tensor) -> bool:
    """Neither NaN nor so large that a product with it may overflow, in any slot, seen or not."""
    low, high = tensor.aminmax()
    return max(-low.item(), high.item()) < _TAME  # both are NaN if any number is, and compare false


def _masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Q, nh, hd] over k, v [B, L, nkv, hd] where visible [B, Q, L]: [B, Q, nh, hd]; a query that sees nothing gives zeros."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    # 0 * NaN is NaN: slots that no query sees may hold anything, bad numbers in others are given back to the queries that see them
    has_bad = k.is_cuda or not (_is_tame(k) and _is_tame(v))  # on a GPU asking would wait for it
    if has_bad:
        is_finite = (k.isfinite() & v.isfinite()).all(3).all(2)
        sees_bad = (visible & ~is_finite[:, None]).any(2)
        is_usable = (visible.any(1) & is_finite)[:, :, None, None]
        k, v = (torch.where(is_usable, tensor, 0) for tensor in (k, v))
    k, v = (tensor.to(q.dtype).transpose(1, 2) for tensor in (k, v))
    # the heads of a group become further queries of their key head: the keys need no copy per head
    folded = q.view(batch, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    sees_something = visible.any(2)
    mask = visible | ~sees_something[:, :, None]
    mask = mask[:, None, None].expand(-1, 1, group, -1, -1).reshape(batch, 1, group * num_queries, num_keys)
    out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(batch, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    out = torch.where(sees_something[:, :, None, None], out.reshape(q.shape), 0)
    return torch.where(sees_bad[:, :, None, None], torch.nan, out) if has_bad else out


@dataclass(frozen=True, eq=False)
class _PaddedQueries:
    """B rows, each padded to the longest run of Q queries, before C columns of the slot table; T packed queries."""

    query_index: torch.Tensor  # int64 [B, Q] packed index of each query
    slots: torch.Tensor  # int64 [B, C]
    visible: torch.Tensor  # bool [B, Q, C]
    row: torch.Tensor  # int64 [T] of each packed query
    step: torch.Tensor  # int64 [T] and its place there
    is_query: torch.Tensor  # bool [T, 1] tokens at and after query_start[B] are none

    @classmethod
    def of(cls, inputs: AttentionInputs, num_tokens: int, window: int | None) -> "_PaddedQueries":
        """Worked out once for all layers that share the inputs and the window."""
        key = num_tokens, window
        if key not in inputs.worked_out:
            inputs.worked_out[key] = cls._work_out(inputs, num_tokens, window)
        return inputs.worked_out[key]

    @classmethod
    def _work_out(cls, inputs: AttentionInputs, num_tokens: int, window: int | None) -> "_PaddedQueries":
        start, end = inputs.query_start[:-1].long(), inputs.query_start[1:].long()
        place = torch.arange(inputs.max_query_len, device=start.device)
        query_index = start[:, None] + place
        is_inside = query_index < end[:, None]
        query_index = query_index.clamp(max=num_tokens - 1)
        tail_width = inputs.max_query_len if inputs.tail_mask is None else inputs.tail_mask.shape[2]
        num_columns = min(inputs.max_prefix_len + tail_width, inputs.slot_table.shape[1])
        slots = inputs.slot_table[inputs.rows, :num_columns].long()
        visible = _visible_keys(inputs, query_index, num_columns, window) & is_inside[:, :, None]
        token = torch.arange(num_tokens, device=start.device)
        row = torch.searchsorted(end.contiguous(), token, right=True).clamp(max=len(end) - 1)
        step = (token - start[row]).clamp(max=inputs.max_query_len - 1)
        return cls(query_index, slots, visible, row, step, (token < end[-1])[:, None])


def attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
) -> torch.Tensor:
    """`attention` in plain torch: rows are padded to the longest run of queries; no host synchronisation on a GPU."""
    padded = _PaddedQueries.of(inputs, q.shape[0], window)
    out = _masked_attention(q[padded.query_index], k_cache[padded.slots], v_cache[padded.slots], padded.visible, scale)
    return torch.where(padded.is_query, out.flatten(2)[padded.row, padded.step], 0)


def attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
) -> torch.Tensor:
    """Attend from q [T, nh, hd] to the caches [slots, nkv, hd] as `inputs` tells: [T, nh * hd]. See the module docstring."""
    if q.is_cuda:
        return attention_triton(q, k_cache, v_cache, inputs, scale, window)
    return attention_reference(q, k_cache, v_cache, inputs, scale, window)
