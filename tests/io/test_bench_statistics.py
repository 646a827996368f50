"""Medians, spreads, intervals by resampling, and splits of accept lengths."""

import numpy as np
import pytest

from eaglecli.io.bench_splits import (
    AnsweredRecord,
    compare_buckets,
    context_edges,
    split_accept_lengths,
    split_by_batch_size,
    split_by_context,
)
from eaglecli.io.bench_statistics import middle_place, percentiles, pooled_ratio_interval, ratio_interval, spread


def test_the_middle_of_an_even_number_is_the_lower_one_and_the_spread_goes_by_it():
    assert [middle_place(values) for values in ([3.0, 1.0, 2.0], [4.0, 1.0, 2.0, 3.0], [5.0])] == [2, 2, 0]
    assert (spread([3.0, 1.0, 2.0]), spread([4.0, 2.0]), spread([5.0])) == (1.0, 1.0, None)


def test_a_single_repeat_has_no_interval():
    assert ratio_interval([1.0], [1.0, 2.0]) is None
    assert ratio_interval([1.0, 2.0], [1.0]) is None


@pytest.mark.parametrize("num_repeats", [(2, 2), (3, 3), (5, 5), (8, 8), (2, 5)])
def test_the_interval_of_a_ratio_holds_the_true_one_about_as_often_as_it_says(num_repeats):
    random, hits, widths = np.random.default_rng(0), 0, []
    for _ in range(300):
        above, below = (rate * np.exp(random.normal(0, 0.02, count)) for rate, count in zip((300.0, 200.0), num_repeats, strict=True))
        low, high = ratio_interval(above, below)
        ratio = above[middle_place(above)] / below[middle_place(below)]
        assert low <= ratio <= high
        hits += low <= 1.5 <= high
        widths.append(high - low)
    assert 0.93 <= hits / 300 <= (0.99 if min(num_repeats) == 8 else 1.0)
    assert min(num_repeats) < 8 or np.median(widths) < 1.5 * 0.06  # at twice the standard error it is 0.06


def test_equal_repeats_make_a_narrow_interval():
    low, high = ratio_interval([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)


def test_the_interval_over_records_is_of_sums_and_not_of_means():
    steps = np.array([1, 1000, 1, 1000] * 50)
    accepted = np.where(steps == 1, 5, 2000)
    low, high = pooled_ratio_interval(accepted, steps)
    assert low <= accepted.sum() / steps.sum() <= high
    assert high < 2.2  # the mean of the records' ratios is 3.5


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_records_have_no_interval(count):
    assert pooled_ratio_interval(np.ones(count), np.ones(count)) is None


def test_many_records_are_resampled_in_bounded_memory():
    low, high = pooled_ratio_interval(np.full(100_000, 3), np.full(100_000, 2))
    assert low == pytest.approx(1.5, rel=0.01) and high == pytest.approx(1.5, rel=0.01)


def test_percentiles_of_nothing_are_none():
    assert percentiles([]) == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert percentiles([1.0, 3.0])["p50"] == 2.0


def record(tag: str, prompt: int, counts: list[int], decode_s: float = 1.0, reason: str = "length") -> AnsweredRecord:
    accept_counts = np.array(counts, np.int16)
    return AnsweredRecord(tag, reason, prompt, 1 + sum(counts) + len(counts), accept_counts, decode_s)


def test_accept_lengths_are_split_by_data_set_ending_and_place_in_the_answer():
    records = [record("a", 5, [0] + [1] * 39), record("b", 5, [0, 2], reason="stop")]
    splits = split_accept_lengths(records)
    assert splits["dataset"] == {"a": 1 + 39 / 40, "b": 2.0}
    assert splits["finish_reason"] == {"length": 1 + 39 / 40, "stop": 2.0}
    early = [0] + [1] * 31 + [0, 2]  # the next step begins with token 65 of the answer
    assert splits["answer_position"] == {"first_64": 1 + sum(early) / len(early), "rest": 2.0}


def test_no_draft_no_accept_length():
    assert split_accept_lengths([record("a", 5, [])])["dataset"] == {"a": None}


def test_buckets_end_where_the_longest_record_is():
    assert context_edges(64, 1000) == (32, 64, 128)
    assert context_edges(64, 40) == (32, 64)
    assert context_edges(64, 10) == (32,)


def test_a_record_belongs_to_the_bucket_of_its_whole_context():
    records = [record("a", 29, [0, 0], 1.0), record("a", 30, [0, 0], 2.0)]
    buckets = split_by_context(records, (32, 64))
    assert [(bucket["context_up_to"], bucket["records"]) for bucket in buckets] == [(32, 1), (64, 1)]
    assert [bucket["output_throughput_per_user"] for bucket in buckets] == [2.0, 1.0]
    plain = [{"context_above": 0, "output_throughput_per_user": 4.0}]
    compare_buckets(buckets, plain)
    assert [bucket["speedup"] for bucket in buckets] == [0.5, None]


def test_steps_are_split_by_requests_that_ran_in_them_and_earlier_ones_left_out():
    before = {"1": {"row_steps": 10, "accepted_drafts": 30}, "6": {"row_steps": 5, "accepted_drafts": 5}}
    after = {
        "1": {"row_steps": 14, "accepted_drafts": 32},
        "2": {"row_steps": 4, "accepted_drafts": 1},
        "5": {"row_steps": 10, "accepted_drafts": 10},
        "6": {"row_steps": 5, "accepted_drafts": 5},
        "8": {"row_steps": 10, "accepted_drafts": 30},
    }
    assert split_by_batch_size(before, after) == {"1": 1.5, "2": 1.25, "5-8": 3.0}
    assert split_by_batch_size(after, after) == {}
