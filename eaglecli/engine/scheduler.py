"""Who runs: admission, prefill in chunks, growth page by page and preemption. Pure bookkeeping, no tensors.

A request is admitted when the pages that are free are enough for it and for what all admitted ones are likely to want yet; it takes
only those for the tokens that it knows and for its first steps, and grows from there. Estimates can be wrong: when the pool
runs out, the one admitted last gives everything back and is computed again later, prompt and output so far as one prompt.
Seniority, the order of first admission, decides, so the oldest always goes on, and with the pool to itself it always fits.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from eaglecli.engine.outlook import Forecast, make_forecast
from eaglecli.engine.output_lengths import OutputLengths
from eaglecli.engine.pages import PagePool
from eaglecli.engine.sequence import EmittedOutput, PrefillChunk, Sequence
from eaglecli.engine.settings import EngineSettings
from eaglecli.engine.waiting import WaitingQueue

_PROMPT_TOKEN_WORK = 1 / 16  # of the work of an output token: many prompt tokens go through the model at a time
_FIRST_STEPS = 4  # a row's first steps, in longest runs, that need no growth: two may be in flight before it is looked at


@dataclass(frozen=True, eq=False)
class Growth:
    """Pages that a sequence got behind the `num_before` that it had."""

    sequence: Sequence
    num_before: int
    pages: list[int]


class Scheduler:
    """Waiting -> prefilling -> running, and back to waiting when memory runs out."""

    def __init__(self, pool: PagePool, settings: EngineSettings, group_size: int = 1) -> None:
        """While others run, requests are admitted when `group_size` rows and memory for as many, or that share of it, are free.

        So their prompts share a prefill.
        """
        policy, num_rows = settings.scheduling, settings.max_running_requests
        self.pool = pool
        self.lengths = OutputLengths(settings.context_length)
        self.waiting = WaitingQueue(self._work_of if policy.longest_first else None, policy.max_overtaking)
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.capacity = np.zeros(num_rows, np.int64)  # tokens that the pages of each row hold, 0 of a free row
        self._prompt_lens = np.zeros(num_rows, np.int64)
        self._caps = np.zeros(num_rows, np.int64)
        self._never_stops = np.zeros(num_rows, bool)
        self._policy = policy
        self._group_size = group_size
        self._lookahead = settings.lookahead
        self._chunk_size = settings.chunked_prefill_size
        self._growth = max(policy.growth_tokens, _FIRST_STEPS * settings.run_width)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_admitted = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.waiting or self.prefilling or self.running)

    def most_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence takes if it runs to its cap."""
        return self.pool.pages_for(sequence.limit + self._lookahead)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def admit(self, num_output_tokens: np.ndarray) -> list[Sequence]:
        """Give rows and pages to as many waiting requests as fit. num_output_tokens int64 [rows]: output of each row so far."""
        admitted: list[Sequence] = []
        is_running = len(self._free_rows) < len(self.capacity)
        if not self.waiting or len(self._free_rows) < (self._group_size if is_running else 1):
            return admitted
        rows = np.flatnonzero(self.capacity)
        if self.lengths.refresh(num_output_tokens[rows]):
            self.waiting.sort_again()
        pledged = self._pledged_pages(rows, num_output_tokens[rows])
        if is_running and self.pool.num_free - pledged < self._group_pages():
            return admitted
        while self.waiting and self._free_rows:
            sequence = self.waiting.first()
            num_pages = self._first_pages(sequence)
            wanted = self._wanted_pages(sequence, num_pages)
            is_alone = not (len(rows) or admitted)
            if (num_pages if is_alone else pledged + wanted) > self.pool.num_free:
                break
            self._admit_first(num_pages)
            admitted.append(sequence)
            pledged += wanted - num_pages
        self.prefilling.extend(admitted)
        return admitted

    def next_chunks(self) -> list[PrefillChunk]:
        """The tokens to prefill in this step, at most `chunk_size`; sequences that are done by them start running."""
        chunks, budget = [], self._chunk_size
        for sequence in self.prefilling:
            if budget == 0:
                break
            end = min(sequence.num_to_prefill, sequence.num_prefilled + budget)
            chunks.append(PrefillChunk(sequence, sequence.num_prefilled, end))
            budget -= end - sequence.num_prefilled
            sequence.num_prefilled = end
        done = [chunk.sequence for chunk in chunks if chunk.is_last]
        self.prefilling = [sequence for sequence in self.prefilling if sequence.num_prefilled < sequence.num_to_prefill]
        self.running.extend(done)
        return chunks

    def grow(self, sequences: Items[Sequence], num_tokens: Iterable[int]) -> list[Growth] | None:
        """Pages for so many tokens and more for each of the sequences; None, and nothing changed, when the pool has not enough."""
        wanted_pages = map(self.pool.pages_for, num_tokens)
        missing = [max(0, num_pages - len(sequence.pages)) for sequence, num_pages in zip(sequences, wanted_pages, strict=True)]
        spare = self.pool.num_free - sum(missing)
        if spare < 0:
            return None
        growths = []
        for sequence, num_pages in zip(sequences, missing, strict=True):
            wanted = min(self.pool.pages_for(self._growth), self.most_pages(sequence) - len(sequence.pages))
            num_more = max(0, min(wanted - num_pages, spare))
            spare -= num_more
            if not num_pages + num_more:
                continue
            growth = Growth(sequence, len(sequence.pages), self.pool.allocate(num_pages + num_more))
            self._give(sequence, growth.pages)
            growths.append(growth)
        return growths

    def youngest(self) -> Sequence:
        """The sequence that was admitted last, of those that hold pages."""
        return max(self.prefilling + self.running, key=lambda sequence: sequence.seniority)

    def preempt(self, sequence: Sequence, emitted: EmittedOutput) -> None:
        """Take row and pages from a sequence and queue it again, with all output that it was given so far."""
        self.release(sequence)
        sequence.row, sequence.num_prefilled = -1, 0
        sequence.emitted, sequence.was_preempted = emitted, True
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back the row and all pages of a sequence."""
        (self.prefilling if sequence.num_prefilled < sequence.num_to_prefill else self.running).remove(sequence)
        self._free_rows.append(sequence.row)
        self.capacity[sequence.row] = 0
        self.pool.free(sequence.pages)
        sequence.pages = []

    def forecast(self, num_output_tokens: np.ndarray) -> Forecast:
        """What is to be expected of all sequences here; num_output_tokens int64 [rows]."""
        rows, waiting = np.flatnonzero(self.capacity), list(self.waiting)

        def of_all(of_rows: np.ndarray, of_waiting: Callable[[Sequence], int]) -> np.ndarray:
            return np.concatenate([of_rows[rows], np.fromiter(map(of_waiting, waiting), np.int64, len(waiting))])

        num_done = of_all(num_output_tokens, lambda sequence: len(sequence.emitted.token_ids))
        caps = of_all(self._caps, lambda sequence: sequence.cap)
        never_stops = of_all(self._never_stops, lambda sequence: sequence.never_stops).astype(bool)
        remaining = self._remaining(num_done, caps, never_stops)
        token_steps = np.where(never_stops, remaining**2 / 2, self.lengths.token_steps(num_done, caps))
        known = num_done + of_all(self._prompt_lens, lambda sequence: sequence.prompt_len)
        num_prompt_tokens = sum(sequence.num_to_prefill - sequence.num_prefilled for sequence in (*waiting, *self.prefilling))
        return make_forecast(remaining, known, token_steps, self.capacity[rows], len(self.capacity), num_prompt_tokens)

    def check(self) -> None:
        """Prove that every row and page is free or held by exactly one sequence."""
        held = self.prefilling + self.running
        self.pool.check([sequence.pages for sequence in held])
        rows = self._free_rows + [sequence.row for sequence in held]
        assert len(set(rows)) == len(rows) == len(self.capacity), "a row is lost or held twice"
        for sequence in held:
            assert self.capacity[sequence.row] == len(sequence.pages) * self.pool.page_size, "a row's capacity is not that of its pages"

    def _admit_first(self, num_pages: int) -> None:
        sequence = self.waiting.remove_first()
        row = sequence.row = self._free_rows.pop()
        self._prompt_lens[row], self._caps[row], self._never_stops[row] = sequence.prompt_len, sequence.cap, sequence.never_stops
        self._give(sequence, self.pool.allocate(num_pages))
        if sequence.seniority < 0:
            sequence.seniority = self._num_admitted
            sequence.admitted_s = time.perf_counter()
            self._num_admitted += 1

    def _give(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.pages += pages
        self.capacity[sequence.row] = len(sequence.pages) * self.pool.page_size

    def _first_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence takes at admission."""
        if not self._policy.grows:
            return self.most_pages(sequence)
        return self.pool.pages_for(min(sequence.limit, sequence.num_known + self._growth) + self._lookahead)

    def _group_pages(self) -> float:
        """Pages for a group of requests like the next one, at most the group's share of all."""
        size = min(self._group_size, len(self.waiting))
        first = self.waiting.first()
        wanted = self._wanted_pages(first, self._first_pages(first))
        return min(size * wanted, self.pool.num_pages * self._group_size / len(self.capacity))

    def _pledged_pages(self, rows: np.ndarray, num_done: np.ndarray) -> float:
        """Pages that rows int64 [n] with output num_done int64 [n] are likely to want beside those that they have."""
        tokens = self._prompt_lens[rows] + num_done + self._lookahead
        tokens = tokens + self._policy.pledged_share * self._remaining_of_rows(rows, num_done)
        return float(np.maximum(tokens - self.capacity[rows], 0).sum()) / self.pool.page_size

    def _wanted_pages(self, sequence: Sequence, first_pages: int) -> float:
        """Pages that must be free for a waiting sequence: those of its admission, or for the pledged share of what is still to come."""
        tokens = sequence.num_known + self._policy.pledged_share * self._remaining_of_waiting(sequence) + self._lookahead
        return max(float(first_pages), tokens / self.pool.page_size)

    def _remaining_of_rows(self, rows: np.ndarray, num_done: np.ndarray) -> np.ndarray:
        return self._remaining(num_done, self._caps[rows], self._never_stops[rows])

    def _remaining(self, num_done: np.ndarray, caps: np.ndarray, never_stops: np.ndarray) -> np.ndarray:
        """float64 [n]: mean output still to come; up to the cap for those that no token can end."""
        return np.where(never_stops, caps - num_done, self.lengths.remaining(num_done, caps))

    def _remaining_of_waiting(self, sequence: Sequence) -> float:
        if not (sequence.is_resumed or sequence.never_stops):
            return self.lengths.expected(sequence.cap)
        num_done = len(sequence.emitted.token_ids)
        if sequence.never_stops:
            return float(sequence.cap - num_done)
        return float(self.lengths.remaining(np.array([num_done]), np.array([sequence.cap]))[0])

    def _work_of(self, sequence: Sequence) -> float:
        own_work = self._remaining_of_waiting(sequence) + _PROMPT_TOKEN_WORK * sequence.prompt_len
        return own_work * (1 + sequence.request.num_follow_ups)
