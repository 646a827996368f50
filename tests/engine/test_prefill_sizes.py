"""Sizes that prefills are padded to: they hold what is promised, and waste little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.engine.prefill_sizes import (
    SEGMENT_LEN,
    exact_size,
    most_graph_tokens,
    padded_size,
    prefill_graph_sizes,
    smallest_that_holds,
)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40))
def test_a_padded_size_has_room_for_the_segments_of_any_chunks(chunk_lens):
    size = padded_size(sum(chunk_lens), len(chunk_lens))
    assert sum(-(-length // SEGMENT_LEN) for length in chunk_lens) <= size.num_segments


@given(st.integers(1, 9000), st.integers(1, 300), st.data())
def test_whatever_fits_into_one_step_has_a_size(most_tokens, most_rows, data):
    sizes = prefill_graph_sizes(most_tokens, most_rows)
    num_tokens = data.draw(st.integers(1, most_tokens))
    num_rows = data.draw(st.integers(1, min(most_rows, num_tokens)))
    size = smallest_that_holds(sizes, num_tokens, num_rows)
    if num_rows <= 8 or most_rows * 4 <= most_tokens:
        assert size is not None and size.num_tokens >= num_tokens and size.num_rows >= num_rows
    if num_tokens >= 64 and num_rows <= 8:
        assert size.num_tokens < 2 * num_tokens


def test_many_tokens_are_padded_by_half_at_most():
    sizes = prefill_graph_sizes(8192, 8)
    assert [size.num_tokens for size in sizes] == [64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert {size.num_rows for size in sizes} == {8}


def test_few_graphs_serve_many_rows():
    sizes = prefill_graph_sizes(8192, 256)
    assert {size.num_rows for size in sizes} == {8, 64, 256}
    assert len(sizes) == 12 + 10 + 7
    assert smallest_that_holds(sizes, 300, 65).num_tokens == 1024
    assert smallest_that_holds(sizes, 8193, 1) is None


@pytest.mark.parametrize(
    ("num_parameters", "bytes_per_number", "expected"),
    [(106_000_000, 2, 8192), (7_000_000_000, 2, 1428), (7_000_000_000, 4, 107), (10**13, 2, 1), (0, 4, 8192)],
)
def test_a_large_model_needs_no_graph_for_long_prefills(num_parameters, bytes_per_number, expected):
    assert most_graph_tokens(num_parameters, bytes_per_number, 8192) == expected


def test_an_exact_size_is_one_segment_a_chunk():
    size = exact_size([3, 200, 1])
    assert (size.num_tokens, size.num_segments, size.num_rows, size.segment_len) == (204, 3, 3, 200)
