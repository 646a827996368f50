# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""`attention` in an order of additions that depends on a query's own position and on nothing else, bit for bit.

The keys of a query are the columns of its row up to itself, in the order of their *positions*: the prefix, then its own path through
the tail (tail_mask None: all of the tail up to the query; with a mask: the entries it sees, in order, so parents stand before children).
A token therefore meets the same keys in the same places whether it is a prompt token in any chunk, a decoding step, or a node of any tree.
A key in place j has position j, for windows too. Queries that belong to no row give zeros.

GPU: one program a query, a key head and a split. Keys are walked in blocks of _BLOCK_KEYS from position 0 on; the splits of a query are
cut by its number of keys, and the last of them to finish merges their results one after the other.
CPU: the same blocks one after the other. Every product has the same shape for every query; how many there are is the number of products.
Source: Dao, "FlashAttention-2" (running softmax) and Dao et al., "Flash-Decoding" (split over keys).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eaglecli.kernels.attention import check_attention
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.last_arrival import arrival_counters, is_last_arrival
from eaglecli.kernels.launch import launch_options

_BLOCK_KEYS = 64
_MAX_SPLITS = 8
_MIN_SPLIT_KEYS = 256  # fewer are walked sooner than results are merged
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_tokens", "table_width", "mask_row_stride", "mask_query_stride", "mask_width", "window"])
def _row_invariant_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_ptr, log_total_ptr, counter_ptr,
    rows_ptr, query_start_ptr, prefix_lens_ptr, table_ptr, first_keys_ptr, positions_ptr, mask_ptr, scale_log2,
    num_tokens, table_width, mask_row_stride, mask_query_stride, mask_width, window,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr, MASK_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (query of its row, split * NUM_KV_HEADS + key head, row). partial is float32 [MAX_SPLITS, T, NUM_HEADS, HEAD_DIM]."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    query = tl.program_id(0)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = tl.program_id(1) // NUM_KV_HEADS
    row = tl.program_id(2)
    first_query = tl.load(query_start_ptr + row)
    if query >= tl.load(query_start_ptr + row + 1) - first_query:
        return
    token = (first_query + query).to(tl.int64)
    prefix_len = tl.load(prefix_lens_ptr + row)
    table_row = tl.load(rows_ptr + row).to(tl.int64)
    table_ptr += table_row * table_width
    entry = tl.arange(0, MASK_BLOCK)
    if mask_ptr is None:
        num_keys = prefix_len + query + 1
    else:
        line = mask_ptr + row.to(tl.int64) * mask_row_stride + query * mask_query_stride
        sees = tl.load(line + entry, mask=entry < mask_width, other=0).to(tl.int32)
        place_on_path = tl.where(sees != 0, tl.cumsum(sees, 0) - 1, -1)
        num_keys = prefix_len + tl.sum(sees, 0)
    num_keys = tl.minimum(num_keys, table_width)
    first_key = tl.full([], 0, tl.int32)
    if first_keys_ptr is not None:
        first_key = tl.load(first_keys_ptr + table_row)
    if HAS_WINDOW:
        first_key = tl.maximum(tl.load(positions_ptr + token) - window + 1, first_key)
    split_keys = tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    split_keys = tl.maximum(split_keys, MIN_SPLIT_KEYS)
    first_split = first_key // split_keys
    num_active = tl.cdiv(num_keys, split_keys) - first_split
    if split >= num_active:
        return
    begin = (first_split + split) * split_keys
    end = tl.minimum(begin + split_keys, num_keys)

    head = tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_D)
    exists = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    place = token * NUM_HEADS + kv_head * GROUP + head
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + column[None, :], mask=exists, other=0.0)
    sums = tl.zeros((BLOCK_HEADS, BLOCK_D), tl.float32)
    maximum = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        used = (key >= first_key) & (key < end)
        table_column = key
        if mask_ptr is not None:
            tail = key - prefix_len
            on_path = place_on_path[None, :] == tail[:, None]
            table_column = tl.where(tail < 0, key, prefix_len + tl.sum(tl.where(on_path, entry[None, :], 0), 1))
        slot = tl.load(table_ptr + table_column, mask=used, other=0).to(tl.int64)
        source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        loaded = used[:, None] & (column < HEAD_DIM)[None, :]
        keys = tl.load(k_cache_ptr + source, mask=loaded, other=0.0)
        values = tl.load(v_cache_ptr + source, mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(used[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
        maximum = new_maximum

    result = sums / total[:, None]
    target = out_ptr + place[:, None] * HEAD_DIM + column[None, :]
    if num_active == 1:
        tl.store(target, result, mask=exists)
    else:
        part_stride = num_tokens.to(tl.int64) * NUM_HEADS
        part = place + split * part_stride
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + column[None, :], result, mask=exists)
        tl.store(log_total_ptr + part, maximum + tl.log2(total), mask=head < GROUP)
        if is_last_arrival(counter_ptr + token * NUM_KV_HEADS + kv_head, num_active):
            sums = tl.zeros((BLOCK_HEADS, BLOCK_D), tl.float32)
            maximum = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_HEADS,), tl.float32)
            for other in range(0, num_active):
                part = place + other * part_stride
                log_total = tl.load(log_total_ptr + part, mask=head < GROUP, other=0.0, cache_modifier=".cg")
                partial = tl.load(
                    partial_ptr + part[:, None] * HEAD_DIM + column[None, :], mask=exists, other=0.0, cache_modifier=".cg"
                )  # fmt: skip
                new_maximum = tl.maximum(maximum, log_total)
                weight, decay = tl.exp2(log_total - new_maximum), tl.exp2(maximum - new_maximum)
                total = total * decay + weight
                sums = sums * decay[:, None] + partial * weight[:, None]
                maximum = new_maximum
            tl.store(target, sums / total[:, None], mask=exists)


def row_invariant_attention_triton(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
) -> torch.Tensor:
    """One launch, and one that clears the output: [T, nh * hd]. ValueError when a shape, stride or dtype is not as `attention` says."""
    check_attention(q, k_cache, v_cache, inputs)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    out = torch.zeros((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    mask = inputs.tail_mask
    mask_width = 1 if mask is None else mask.shape[2]
    partial = torch.empty((_MAX_SPLITS, num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
    log_total = torch.empty((_MAX_SPLITS, num_tokens, num_heads), dtype=torch.float32, device=q.device)
    max_keys = min(inputs.max_prefix_len + (inputs.max_query_len if mask is None else mask_width), inputs.slot_table.shape[1])
    num_splits = min(_MAX_SPLITS, triton.cdiv(max_keys, _MIN_SPLIT_KEYS))  # of programs; those without keys leave early
    _row_invariant_attention_kernel[(inputs.max_query_len, num_kv_heads * num_splits, inputs.rows.shape[0])](
        q, k_cache, v_cache, out, partial, log_total, arrival_counters(num_tokens * num_kv_heads, q.device),
        inputs.rows, inputs.query_start, inputs.prefix_lens, inputs.slot_table, inputs.first_keys, inputs.positions,
        None if mask is None else mask.view(torch.uint8), scale * _LOG2_E, num_tokens, inputs.slot_table.shape[1],
        *((0, 0) if mask is None else mask.stride()[:2]), mask_width, window or 0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_HEADS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)), BLOCK_KEYS=_BLOCK_KEYS, MAX_SPLITS=_MAX_SPLITS,
        MIN_SPLIT_KEYS=_MIN_SPLIT_KEYS, MASK_BLOCK=max(16, triton.next_power_of_2(mask_width)), HAS_WINDOW=window is not None,
        num_warps=4, num_stages=2, **launch_options(q.device),
    )  # fmt: skip
    return out


@dataclass(frozen=True, eq=False)
class _QueryKeys:
    """slots int64 [T, C]: the cache slots of every query's keys, in the order of their positions; the first num_keys int64 [T] count."""

    slots: torch.Tensor
    num_keys: torch.Tensor
    table_row: torch.Tensor  # int64 [T] each query's row of the slot table


def _keys_of_queries(inputs: AttentionInputs, num_tokens: int) -> _QueryKeys:
    token = torch.arange(num_tokens, device=inputs.rows.device)
    row = torch.searchsorted(inputs.query_start[1:].long().contiguous(), token, right=True)
    is_owned = row < inputs.rows.shape[0]
    row = torch.where(is_owned, row, 0)
    query = torch.where(is_owned, token - inputs.query_start.long()[row], 0)
    prefix = inputs.prefix_lens.long()[row][:, None]
    tail_width = inputs.max_query_len if inputs.tail_mask is None else inputs.tail_mask.shape[2]
    num_columns = min(inputs.max_prefix_len + tail_width, inputs.slot_table.shape[1])
    column = torch.arange(num_columns, device=token.device).expand(num_tokens, -1)
    if inputs.tail_mask is None:
        num_tail = query + 1
    else:
        sees = inputs.tail_mask[row, query]
        path = torch.sort(~sees, dim=1, stable=True).indices  # the entries seen, in order, come first
        num_tail = sees.sum(1)
        on_path = path.gather(1, (column - prefix).clamp(0, tail_width - 1))
        column = torch.where(column < prefix, column, (prefix + on_path).clamp(max=inputs.slot_table.shape[1] - 1))
    num_keys = torch.where(is_owned, (prefix[:, 0] + num_tail).clamp(max=num_columns), 0)
    table_row = inputs.rows.long()[row]
    return _QueryKeys(inputs.slot_table.long()[table_row[:, None], column], num_keys, table_row)


def row_invariant_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
) -> torch.Tensor:
    """`row_invariant_attention_triton` in plain torch; reads the lengths on the host."""
    check_attention(q, k_cache, v_cache, inputs)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    keys = _keys_of_queries(inputs, num_tokens)
    first_key = torch.zeros_like(keys.num_keys) if window is None else (inputs.positions.long() - window + 1).clamp(min=0)
    if inputs.first_keys is not None:
        first_key = torch.maximum(first_key, inputs.first_keys.long()[keys.table_row])
    folded = (q.float() * scale).view(num_tokens * num_kv_heads, group, head_dim)
    sums = torch.zeros_like(folded)
    maximum = torch.full((num_tokens * num_kv_heads, group, 1), -torch.inf, device=q.device)
    total = torch.zeros_like(maximum)
    for start in range(0, int(keys.num_keys.max()) if num_tokens else 0, _BLOCK_KEYS):
        place = torch.arange(start, start + _BLOCK_KEYS, device=q.device)
        used = (place >= first_key[:, None]) & (place < keys.num_keys[:, None])
        slots = torch.where(used, keys.slots[:, place.clamp(max=keys.slots.shape[1] - 1)], 0)

        def block(cache: torch.Tensor, slots: torch.Tensor = slots, used: torch.Tensor = used) -> torch.Tensor:
            """[T * nkv, keys, hd], zero where no key is: 0 * NaN is NaN."""
            values = torch.where(used[:, :, None, None], cache[slots].float(), 0.0)
            return values.transpose(1, 2).reshape(num_tokens * num_kv_heads, _BLOCK_KEYS, head_dim)

        visible = used.repeat_interleave(num_kv_heads, 0)[:, None]
        scores = torch.where(visible, torch.bmm(folded, block(k_cache).transpose(1, 2)), -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(2, keepdim=True))
        shift = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
        weights, decay = torch.exp(scores - shift), torch.exp(maximum - shift)
        total = total * decay + weights.sum(2, keepdim=True)
        sums = sums * decay + torch.bmm(weights, block(v_cache))
        maximum = new_maximum
    has_keys = total != 0.0  # NaN has keys: it must reach the result
    return torch.where(has_keys, sums / torch.where(has_keys, total, 1.0), 0.0).view(num_tokens, -1).to(q.dtype)
