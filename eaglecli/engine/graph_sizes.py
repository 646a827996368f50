"""Which batch sizes have a graph, in requests: the default list, what of a list can be reached, and what padding to it costs.
And for which lengths of their rows, in tokens.

Pure arithmetic, no tensors.
"""

from collections.abc import Sequence

# dense where a step is short and waste weighs most; one more request costs little where batches are large
_DENSE_SIZES = (1, 2, 4, 8, 16, 24, 32)
_STEPS = ((128, 16), (256, 32), (1024, 64))  # (up to, distance)
# how attention splits the keys of rows is shaped by the bound of their lengths: see `kernels.attention.choose_splits`
_SHORT_LENGTHS = (512, 2048)


def default_graph_sizes(max_requests: int) -> tuple[int, ...]:
    """1 2 4 8 16 24 32 48 64 80 ... up to `max_requests`, which is always the last: a full batch meets a graph."""
    sizes, size = list(_DENSE_SIZES), _DENSE_SIZES[-1]
    for last, distance in _STEPS:
        while size < last:
            size += distance
            sizes.append(size)
    return (*(size for size in sizes if size < max_requests), max_requests)


def graph_lengths(context_length: int) -> tuple[int, ...]:
    """Bounds of the rows' lengths that every size is captured for, in tokens, ascending; the last is the longest context."""
    return (*(length for length in _SHORT_LENGTHS if 2 * length <= context_length), context_length)


def reachable_sizes(sizes: Sequence[int], max_requests: int) -> tuple[int, ...]:
    """Of ascending `sizes` those that a batch of at most `max_requests` can be padded to."""
    return tuple(size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < max_requests)


def padded_size(num_requests: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds the batch; its own size when none does."""
    return next((size for size in sizes if size >= num_requests), num_requests)


def padding_waste(sizes: Sequence[int], num_batches: Sequence[int]) -> float:
    """Share of the rows run that are padding, when `num_batches[n]` batches of n requests are run (n = 0, 1, ...)."""
    rows = sum(count * padded_size(size, sizes) for size, count in enumerate(num_batches) if size)
    real = sum(count * size for size, count in enumerate(num_batches))
    return 1 - real / rows if rows else 0.0


def waste_of_size(size: int, sizes: Sequence[int]) -> float:
    """`padding_waste` of the batches that are padded to `size`, each of their sizes taken once."""
    smallest = max((other for other in sizes if other < size), default=0) + 1
    return padding_waste((size,), [int(count >= smallest) for count in range(size + 1)])
