"""Addressing of one forward: which slots every query reads and writes.

All forwards of the engine (ragged prefill and extend, draft steps, tree verify) have one shape: every row owns a
contiguous run of the packed queries; each query sees the row's whole *prefix* and some of the row's *tail*.

    slot_table[row]:  | prefix: prefix_len slots | tail: tail_width slots | look-ahead ...
    query i of a row sees  prefix (all)  +  tail[w] where tail_mask[b, i, w]     (tree: ancestors and itself)
                           prefix (all)  +  tail[0..i]                           (tail_mask None: causal)

Key w of the prefix has position w. A row's keys before `first_keys` are not there. Tail keys are never further back than `window`
when a tail mask is given: the engine refuses windows shorter than the tree is deep.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# attend(q, k_cache, v_cache, inputs, scale, window), see `attention.attention`
AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "AttentionInputs", float, int | None], torch.Tensor]
QkvAttentionFunction = Callable[..., torch.Tensor]  # see `kernels/qkv_attention.py`


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """See the module docstring. B rows, T packed queries, R x C slot table. For one forward: what is worked out of it is kept with it."""

    rows: torch.Tensor  # int32 [B] row of the slot table
    query_start: torch.Tensor  # int32 [B+1] first packed query of each row; row b owns query_start[b]:query_start[b+1]
    prefix_lens: torch.Tensor  # int32 [B] keys before the tail
    slot_table: torch.Tensor  # int32 [R, C]
    out_slots: torch.Tensor  # int32 [T] where each token's k and v are stored; the dummy slot 0 for padding
    positions: torch.Tensor  # int32 [T] position of each query (for sliding windows)
    tail_mask: torch.Tensor | None  # bool [B, Q, W]; None = causal tail
    max_query_len: int  # host bound: no row has more queries
    max_prefix_len: int  # host bound: no row has a longer prefix
    first_keys: torch.Tensor | None = None  # int32 [R] of the table: keys before it are not there; a multiple of 128, at most prefix_lens
    attend: AttentionFunction | None = None  # what computes it; None: `attention.attention`, which goes by the device
    attend_qkv: QkvAttentionFunction | None = None  # rotates and stores too; None where there is none, or a row sees what another stores
    worked_out: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # of these inputs, the same for every layer
