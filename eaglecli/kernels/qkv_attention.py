"""Rotary embedding, cache store and attention of one layer in one launch.

    qkv [T, (nh + 2 * nkv) * hd] of a product -> keys and values in the cache, [T, nh * hd] attended

On the GPU it is the attention kernel, told to rotate queries as it loads them. Whichever program walks the column of a fresh key
rotates and stores that key first: a barrier of its threads is enough, no other program waits. Programs of other tiles that walk
the same column store the same bits. A launch less for every layer, worth up to 3 % of an iteration (benchmarks/RESULTS.md, run 12).

No row may see what another row stores. With a tail mask every row has max_query_len queries, whose own keys are the last ones of its
tail. Tokens that no row owns are not stored.
"""

import torch

from eaglecli.kernels.attention import AttentionTile, attention_reference, check_caches, launch_attention
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.rotary_store import check_rotary, rotary_store_reference


def qkv_attention_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    num_splits: int | None = None,
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """`rotary_store` without norms at `inputs.positions` and `inputs.out_slots`, then `attention`, in one launch: [T, nh * hd].

    cos and sin float32 [P, hd/2], caches [slots, nkv, hd]; num_splits and tile as in `attention_triton`. ValueError when a shape, stride or
    dtype is not so.
    """
    check_rotary(qkv, cos, sin, k_cache, v_cache)
    if not qkv.is_contiguous():
        raise ValueError(f"qkv_attention needs contiguous rows, got strides {qkv.stride()}")
    _, num_kv_heads, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    check_caches(num_heads, qkv.dtype, k_cache, v_cache, inputs)
    return launch_attention(qkv, (cos, sin), k_cache, v_cache, inputs, scale, window, num_splits, 0, tile)


def qkv_attention_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The same in plain torch: the two steps that are joined."""
    q = rotary_store_reference(qkv, inputs.positions, cos, sin, inputs.out_slots, k_cache, v_cache, None, None, 0.0)
    return attention_reference(q, k_cache, v_cache, inputs, scale, window)
