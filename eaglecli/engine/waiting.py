"""Who is admitted next: preempted sequences, then the one with the most work. No tensors.

The long ones go first so that none is left over at the end, running alone while all other rows are empty (the rule LPT of
Graham 1969). Ties go by arrival. So that a short one does not wait for ever in an endless input, nobody is overtaken by one that
arrived more than `max_overtaking` after him.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator

from eaglecli.engine.sequence import Sequence

WorkOf = Callable[[Sequence], float]  # in any unit


class WaitingQueue:
    """Sequences that have no row. `work_of` None means first come, first served."""

    def __init__(self, work_of: WorkOf | None, max_overtaking: int) -> None:
        self._work_of = work_of
        self._max_overtaking = max_overtaking
        self._num_arrived = 0
        self._by_arrival: OrderedDict[int, Sequence] = OrderedDict()
        self._by_work: list[tuple[float, int]] = []  # heap of (-work, arrival); entries of those that have left stay until they surface
        self._preempted: list[tuple[int, Sequence]] = []  # heap of (seniority, sequence): seniorities are distinct

    def __len__(self) -> int:
        return len(self._by_arrival) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from (sequence for _, sequence in self._preempted)
        yield from self._by_arrival.values()

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._by_arrival[sequence.arrival] = sequence
        if self._work_of is not None:
            heapq.heappush(self._by_work, (-self._work_of(sequence), sequence.arrival))

    def put_back(self, sequence: Sequence) -> None:
        """One that had a row and lost it: it comes before all that had none."""
        heapq.heappush(self._preempted, (sequence.seniority, sequence))

    def first(self) -> Sequence:
        """Who is admitted next; the queue is not empty."""
        if self._preempted:
            return self._preempted[0][1]
        oldest = next(iter(self._by_arrival))
        if self._work_of is None:
            return self._by_arrival[oldest]
        while self._by_work[0][1] not in self._by_arrival:
            heapq.heappop(self._by_work)
        longest = self._by_work[0][1]
        return self._by_arrival[oldest if longest - oldest > self._max_overtaking else longest]

    def remove_first(self) -> Sequence:
        """Takes out what `first` names."""
        sequence = self.first()
        if self._preempted:
            heapq.heappop(self._preempted)
        else:
            del self._by_arrival[sequence.arrival]
        return sequence

    def sort_again(self) -> None:
        """After the estimate of work has changed."""
        if self._work_of is not None:
            self._by_work = [(-self._work_of(sequence), arrival) for arrival, sequence in self._by_arrival.items()]
            heapq.heapify(self._by_work)
