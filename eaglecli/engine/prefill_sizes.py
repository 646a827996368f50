"""How large a prefill is made: exactly as large as its chunks, or padded to one of the sizes that graphs are captured at.

Attention takes a row's queries in runs of bounded length. Where chunks are padded, every chunk is cut into *segments* of at most
SEGMENT_LEN tokens, each a run of its own with all tokens before it as prefix: that bounds the launches of a captured prefill by its
number of tokens, whatever the lengths of its chunks.

Pure arithmetic, no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SEGMENT_LEN = 128  # tokens
_SMALLEST = 64  # tokens
_HALF_STEPS_FROM = 512  # tokens: from here on half-way sizes too, since padding costs time there
_ROW_FACTOR = 8  # between one number of rows and the next
_TOKENS_PER_ROW = 4  # fewer tokens than so many a row seldom meet: no graph of its own
_LAUNCH_S = 0.025  # the launches of an eager prefill
_OPERATIONS_PER_S = {2: 8e14, 4: 6e13}  # what a card computes meanwhile, by bytes of a number


@dataclass(frozen=True, order=True)
class PrefillSize:
    """What the buffers of one prefill hold, padding included."""

    num_tokens: int
    num_segments: int
    num_rows: int
    segment_len: int  # no segment is longer

    def holds(self, num_tokens: int, num_rows: int) -> bool:
        """Whether chunks of `num_rows` rows, cut into segments of `segment_len`, fit in."""
        return num_tokens <= self.num_tokens and num_rows <= self.num_rows


def exact_size(chunk_lens: Sequence[int]) -> PrefillSize:
    """The size of these chunks (tokens each) without padding, every chunk one segment."""
    return PrefillSize(sum(chunk_lens), len(chunk_lens), len(chunk_lens), max(chunk_lens))


def padded_size(num_tokens: int, num_rows: int) -> PrefillSize:
    """A size for any chunks of so many tokens and rows together: sum(ceil(n / s)) <= floor(sum(n) / s) + rows."""
    return PrefillSize(num_tokens, num_tokens // SEGMENT_LEN + num_rows, num_rows, min(SEGMENT_LEN, num_tokens))


def most_graph_tokens(num_parameters: int, bytes_per_number: int, chunk_tokens: int) -> int:
    """Up to how many tokens a prefill is worth a graph: above, the device takes longer than the host needs to launch it."""
    operations = _LAUNCH_S * _OPERATIONS_PER_S[bytes_per_number]
    return max(1, min(chunk_tokens, int(operations / (2 * max(num_parameters, 1)))))


def prefill_graph_sizes(most_tokens: int, most_rows: int) -> tuple[PrefillSize, ...]:
    """Sizes for prefills of up to `most_tokens` tokens of up to `most_rows` rows, the cheapest first."""
    tokens, size = [], _SMALLEST
    while size < most_tokens:
        tokens += [size, size + size // 2] if size >= _HALF_STEPS_FROM else [size]
        size *= 2
    tokens = [*(size for size in tokens if size < most_tokens), most_tokens]
    rows, count = [], _ROW_FACTOR
    while count < most_rows:
        rows.append(count)
        count *= _ROW_FACTOR
    rows.append(most_rows)
    return tuple(
        padded_size(num_tokens, num_rows)
        for num_tokens in tokens
        for num_rows in rows
        if num_rows == rows[0] or num_rows * _TOKENS_PER_ROW <= num_tokens
    )


def smallest_that_holds(sizes: Sequence[PrefillSize], num_tokens: int, num_rows: int) -> PrefillSize | None:
    """The first of `sizes` that the chunks fit into, None when there is none."""
    return next((size for size in sizes if size.holds(num_tokens, num_rows)), None)
