"""Sizes of graphs: the default list, what of a list is of use, what padding costs."""

import pytest

from eaglecli.engine.graph_sizes import default_graph_sizes, graph_lengths, padded_size, padding_waste, reachable_sizes, waste_of_size


@pytest.mark.parametrize(
    ("max_requests", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)), (70, (1, 2, 4, 8, 16, 24, 32, 48, 64, 70))],
)
def test_default_sizes_end_with_the_largest_batch(max_requests, sizes):
    assert default_graph_sizes(max_requests) == sizes


def test_default_sizes_grow_apart_and_never_pass_the_largest_batch():
    sizes = default_graph_sizes(512)
    gaps = [large - small for small, large in zip(sizes, sizes[1:], strict=False)]
    assert gaps == sorted(gaps) and sizes[-1] == 512 and len(sizes) < 30


@pytest.mark.parametrize(("num_requests", "size"), [(1, 2), (2, 2), (3, 4), (8, 8), (9, 9), (30, 30)])
def test_a_batch_runs_at_the_smallest_size_that_holds_it(num_requests, size):
    assert padded_size(num_requests, (2, 4, 8)) == size


@pytest.mark.parametrize(("sizes", "kept"), [((1, 2, 4, 8, 16), (1, 2, 4, 8)), ((64,), (64,)), ((2, 5, 6), (2, 5)), ((), ())])
def test_sizes_that_no_batch_of_five_is_padded_to_are_left_out(sizes, kept):
    assert reachable_sizes(sizes, 8 if sizes and sizes[0] == 1 else 5) == kept


@pytest.mark.parametrize(
    ("context_length", "lengths"),
    [(256, (256,)), (1000, (1000,)), (1024, (512, 1024)), (2048, (512, 2048)), (4096, (512, 2048, 4096)), (131072, (512, 2048, 131072))],
)
def test_short_rows_have_graphs_where_contexts_are_at_least_twice_as_long(context_length, lengths):
    assert graph_lengths(context_length) == lengths


def test_waste_counts_padding_rows_among_all_rows():
    assert padding_waste((4,), [0, 1, 0, 0, 0]) == 3 / 4
    assert padding_waste((1, 4), [9, 2, 0, 0, 1]) == 0.0
    assert padding_waste((4,), [0, 0, 0, 0, 0, 2]) == 0.0  # above the largest size nothing is padded
    assert padding_waste((4,), []) == 0.0
    assert waste_of_size(8, (1, 2, 4, 8)) == 1 - (5 + 6 + 7 + 8) / 32
    assert waste_of_size(1, (1, 2)) == 0.0
