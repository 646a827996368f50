"""What is to be expected of the requests that an engine was given."""

import numpy as np
import pytest

from eaglecli.commands._workload import workload_of
from eaglecli.engine.outlook import Forecast, Outlook, make_forecast


def forecast(remaining: list[float], capacity: list[int], num_rows: int, known: int = 10) -> Forecast:
    left = np.array(remaining)
    return make_forecast(left, np.full(len(left), known), left**2 / 2, np.array(capacity, np.int64), num_rows, 0)


def test_with_memory_for_all_the_rows_share_the_work():
    found = forecast([40.0] * 6, capacity=[20, 20], num_rows=2)
    assert (found.num_tokens, found.num_row_steps, found.longest) == (240.0, 120.0, 40.0)


def test_with_rows_for_more_than_memory_has_room_for_memory_sets_the_pace():
    """Two of eight rows are held by pages for 10 known and 20 more tokens: each sequence takes 30 tokens and what it grows by."""
    found = forecast([40.0] * 6, capacity=[30, 30], num_rows=8)
    assert found.num_row_steps == pytest.approx(6 * (30 * 40 + 40**2 / 2) / 60)


def test_rows_without_work_are_no_want_of_memory():
    assert forecast([40.0] * 2, capacity=[30, 30], num_rows=8).num_row_steps == 80 / 8


def test_unread_records_count_as_the_mean_of_those_seen():
    outlook = Outlook(10, 5, 50, 300, 700, Forecast(num_tokens=300.0, num_prompt_tokens=100, num_row_steps=60.0, longest=50.0))
    work = workload_of(outlook, 20)
    assert work.num_remaining_tokens == 300 + 20 * 100
    assert work.num_remaining_prompt_tokens == 100 + 20 * 40
    assert work.num_remaining_row_steps == pytest.approx(60 * 2300 / 300)
    assert workload_of(outlook, 0).num_remaining_row_steps == 60
    assert workload_of(outlook, None).num_remaining_tokens is None
    assert workload_of(Outlook(), 20).num_remaining_tokens is None
