"""The inputs of one prefill: packed on the host, copied in one go to a buffer that never moves, read from there by a graph.

The buffer is one int32 vector; a `PrefillSize` says which part of it is what. Regions begin at multiples of 16 values, so that a kernel
compiled for aligned pointers serves every size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eaglecli.engine.prefill_sizes import PrefillSize
from eaglecli.engine.sequence import PrefillChunk
from eaglecli.engine.staging import to_device

_ALIGNMENT = 16  # values
CHOSEN_LATER = -1  # stands for a next token that the target has yet to choose


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """T packed tokens of B rows in S segments, the size's padding included. Rows that choose their first token come first.

    Padding tokens belong to no segment and to the dummy row; padding segments are empty; padding rows are the dummy row.
    """

    input_ids: torch.Tensor  # int32 [T]
    next_ids: torch.Tensor  # int32 [T] the token after each, CHOSEN_LATER where the target chooses it
    positions: torch.Tensor  # int32 [T]
    token_rows: torch.Tensor  # int32 [T]
    segment_rows: torch.Tensor  # int32 [S]
    segment_start: torch.Tensor  # int32 [S + 1] first packed token of each segment
    prefix_lens: torch.Tensor  # int32 [S] tokens of the row before the segment
    rows: torch.Tensor  # int32 [B]
    choosing_rows: torch.Tensor  # int32 [B] the same, the dummy row where no first token is chosen
    num_known: torch.Tensor  # int32 [B] tokens known of each row; 1 for padding
    last_index: torch.Tensor  # int32 [B] packed index of each chunk's last token


def _lengths(size: PrefillSize) -> tuple[int, ...]:
    """Values of every field of `PrefillBatch`, in order."""
    tokens, segments, rows = size.num_tokens, size.num_segments, size.num_rows
    return (tokens, tokens, tokens, tokens, segments, segments + 1, segments, rows, rows, rows, rows)


def _regions(size: PrefillSize) -> Iterator[slice]:
    """Where every field of `PrefillBatch` lies."""
    start = 0
    for length in _lengths(size):
        yield slice(start, start + length)
        start += -(-length // _ALIGNMENT) * _ALIGNMENT


def buffer_len(sizes: Sequence[PrefillSize]) -> int:
    """Values that a buffer for all these sizes has."""
    return max([*_regions(size)][-1].stop for size in sizes)


def view_batch(buffer: torch.Tensor, size: PrefillSize) -> PrefillBatch:
    """The parts of the int32 `buffer` that a prefill of this size reads."""
    return PrefillBatch(*(buffer[region] for region in _regions(size)))


def pack_chunks(chunks: Sequence[PrefillChunk], size: PrefillSize, dummy_row: int) -> np.ndarray:
    """int32 vector of what `view_batch` gives for `size`. Chunks that choose a token must come first."""
    packed = np.zeros(buffer_len([size]), np.int32)
    batch = [packed[region] for region in _regions(size)]
    input_ids, next_ids, positions, token_rows, segment_rows, segment_start, prefix_lens, rows, choosing_rows, num_known, last_index = batch
    for padded in (token_rows, segment_rows, rows, choosing_rows):
        padded[:] = dummy_row
    num_known[:] = 1
    if not chunks:
        return packed
    known = [chunk.sequence.known_ids for chunk in chunks]
    chunk_rows = np.array([chunk.sequence.row for chunk in chunks])
    starts, lens = np.array([(chunk.start, chunk.end - chunk.start) for chunk in chunks]).T
    ends = lens.cumsum()
    first, num_tokens = ends - lens, ends[-1]  # packed index of each chunk's first token
    input_ids[:num_tokens] = np.concatenate([ids[chunk.start : chunk.end] for ids, chunk in zip(known, chunks, strict=True)])
    next_ids[: num_tokens - 1] = input_ids[1:num_tokens]
    next_ids[ends - 1] = [ids[chunk.end] if chunk.end < len(ids) else CHOSEN_LATER for ids, chunk in zip(known, chunks, strict=True)]
    positions[:num_tokens] = np.arange(num_tokens) + np.repeat(starts - first, lens)
    token_rows[:num_tokens] = np.repeat(chunk_rows, lens)
    num_segments = -(-lens // size.segment_len)
    last_segments = num_segments.cumsum()
    num_before = np.arange(last_segments[-1]) - np.repeat(last_segments - num_segments, num_segments)  # segments of the same chunk
    segments = slice(last_segments[-1])
    segment_rows[segments] = np.repeat(chunk_rows, num_segments)
    segment_start[segments] = np.repeat(first, num_segments) + num_before * size.segment_len
    prefix_lens[segments] = np.repeat(starts, num_segments) + num_before * size.segment_len
    segment_start[last_segments[-1] :] = num_tokens
    rows[: len(chunks)], num_known[: len(chunks)], last_index[: len(chunks)] = chunk_rows, [len(ids) for ids in known], ends - 1
    num_choosing = sum(chunk.chooses_token for chunk in chunks)
    choosing_rows[:num_choosing] = chunk_rows[:num_choosing]
    return packed


def load_chunks(buffer: torch.Tensor, chunks: Sequence[PrefillChunk], size: PrefillSize, dummy_row: int) -> None:
    """Write the packed chunks to the front of `buffer`, without waiting for the device."""
    packed = pack_chunks(chunks, size, dummy_row)
    buffer[: len(packed)].copy_(to_device(packed, buffer.device), non_blocking=True)
