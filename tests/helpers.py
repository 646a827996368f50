"""Runs a model on plain token lists: addressing for a prefill, a chunk, a step or a tree, without the engine."""

from collections.abc import Sequence

import torch

from eaglecli.kernels.attention_inputs import AttentionInputs


def new_kv_cache(num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cache [num_layers, 2, num_slots, num_kv_heads, head_dim] full of NaN, so that a read of an unwritten slot shows."""
    return torch.full((num_layers, 2, num_slots, num_kv_heads, head_dim), float("nan"), dtype=dtype)


def scattered_slot_table(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    """int32 [num_rows, num_columns] with distinct slots from 1 on in random order; slot 0 stays the dummy slot."""
    generator = torch.Generator().manual_seed(seed)
    slots = 1 + torch.randperm(num_rows * num_columns, generator=generator)
    return slots.view(num_rows, num_columns).to(torch.int32)


def packed_inputs(
    slot_table: torch.Tensor,
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    tail_mask: torch.Tensor | None = None,
    positions: Sequence[int] | None = None,
) -> AttentionInputs:
    """Row b runs query_lens[b] new tokens behind prefix_lens[b] cached ones; positions count on unless they are given."""
    columns = [torch.arange(prefix, prefix + count) for prefix, count in zip(prefix_lens, query_lens, strict=True)]
    out_slots = torch.cat([slot_table[row, column] for row, column in enumerate(columns)])
    return AttentionInputs(
        rows=torch.arange(len(query_lens), dtype=torch.int32),
        query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
        prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32),
        slot_table=slot_table,
        out_slots=out_slots.to(torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32) if positions is not None else torch.cat(columns).to(torch.int32),
        tail_mask=tail_mask,
        max_query_len=max(query_lens),
        max_prefix_len=max(prefix_lens),
    )
