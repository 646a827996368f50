"""Who is admitted next: the longest, ties by arrival, the preempted before all, nobody overtaken for ever."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.sequence import Sequence
from eaglecli.engine.waiting import WaitingQueue


def sequence(work: int) -> Sequence:
    return Sequence(Request(work, np.zeros(1, np.int32), SamplingParams(max_new_tokens=work)))


def queue(works: list[int], longest_first: bool = True, max_overtaking: int = 1000) -> WaitingQueue:
    waiting = WaitingQueue((lambda item: float(item.cap)) if longest_first else None, max_overtaking)
    for work in works:
        waiting.add(sequence(work))
    return waiting


def drain(waiting: WaitingQueue) -> list[Sequence]:
    return [waiting.remove_first() for _ in range(len(waiting))]


@given(st.lists(st.integers(1, 5), max_size=30))
def test_longest_first_and_ties_in_the_order_of_arrival(works):
    found = [(-item.cap, item.arrival) for item in drain(queue(works))]
    assert found == sorted((-work, arrival) for arrival, work in enumerate(works))


@given(st.lists(st.integers(1, 5), max_size=30))
def test_without_an_order_of_work_the_first_come_is_the_first_served(works):
    assert [item.cap for item in drain(queue(works, longest_first=False))] == works


def test_preempted_ones_come_back_before_all_others_and_the_oldest_of_them_first():
    waiting = queue([9, 8])
    for seniority in (5, 3, 4):
        lost = sequence(1)
        lost.seniority = seniority
        waiting.put_back(lost)
    assert len(waiting) == len(list(waiting)) == 5
    assert [item.seniority for item in drain(waiting)] == [3, 4, 5, -1, -1]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=200), st.integers(0, 20), st.integers(1, 10))
def test_in_an_endless_stream_nobody_is_overtaken_by_one_that_came_more_than_the_bound_later(works, bound, window):
    waiting, source = queue([1], max_overtaking=bound), iter(works)
    served = []
    while len(waiting):
        for work in source:
            waiting.add(sequence(work))
            if len(waiting) >= window:
                break
        served.append(waiting.remove_first().arrival)
    assert sorted(served) == list(range(len(works) + 1))
    for place, arrival in enumerate(served):
        assert all(later - arrival <= bound for later in served[:place])


def test_a_new_estimate_of_work_sorts_those_that_wait_already():
    favourite = [3]
    waiting = WaitingQueue(lambda item: float(item.cap == favourite[0]), 1000)
    for work in (1, 2, 3):
        waiting.add(sequence(work))
    assert waiting.first().cap == 3
    favourite[0] = 2
    waiting.sort_again()
    waiting.add(sequence(2))
    assert [item.arrival for item in drain(waiting)] == [1, 3, 0, 2]
