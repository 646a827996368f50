"""Admission, growth and preemption without a model: outputs of given lengths grow by random runs, pages and rows always add up."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglecli.engine.pages import PagePool
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.scheduler import Scheduler
from eaglecli.engine.sequence import NOTHING_EMITTED, Sequence
from eaglecli.engine.settings import EngineSettings, SchedulingSettings, SpeculationSettings

NUM_ROWS, RUN_WIDTH, LOOKAHEAD, CHUNK, PAGE_SIZE = 4, 3, 5, 16, 4
CONTEXT = 400


def make_sequence(key: int, prompt_len: int, cap: int, stops: bool = True) -> Sequence:
    sampling = SamplingParams(max_new_tokens=cap, stop_token_ids=(7,) if stops else ())
    return Sequence(Request(key, np.zeros(prompt_len, np.int32), sampling))


def make_scheduler(num_tokens: int, policy: SchedulingSettings, group_size: int = 1) -> Scheduler:
    settings = EngineSettings(
        CONTEXT,
        num_tokens,
        NUM_ROWS,
        PAGE_SIZE,
        chunked_prefill_size=CHUNK,
        speculation=SpeculationSettings(RUN_WIDTH - 1, LOOKAHEAD, LOOKAHEAD),
        scheduling=policy,
    )
    assert (settings.run_width, settings.lookahead) == (RUN_WIDTH, LOOKAHEAD)
    return Scheduler(PagePool(settings.num_pages, PAGE_SIZE), settings, group_size)


@dataclass
class Simulation:
    """Runs sequences whose outputs end at `lengths[key]`."""

    scheduler: Scheduler
    lengths: list[int]
    random: np.random.Generator
    output: np.ndarray = field(default_factory=lambda: np.zeros(NUM_ROWS, np.int64))
    finished: Counter = field(default_factory=Counter)
    preempted: list[tuple[int, list[int]]] = field(default_factory=list)  # seniority, seniorities of those that held pages

    def step(self) -> None:
        scheduler = self.scheduler
        while scheduler.grow(*self._outgrown()) is None:
            scheduler.check()
            victim = scheduler.youngest()
            self.preempted.append((victim.seniority, [s.seniority for s in scheduler.running + scheduler.prefilling]))
            scheduler.preempt(victim, replace(NOTHING_EMITTED, token_ids=np.zeros(self.output[victim.row], np.int32)))
        for sequence in scheduler.admit(self.output):
            self.output[sequence.row] = len(sequence.emitted.token_ids)
        scheduler.check()
        for chunk in scheduler.next_chunks():
            assert chunk.start < chunk.end <= chunk.sequence.num_to_prefill
        for sequence in list(scheduler.running):
            row, goal = sequence.row, self.lengths[sequence.request.key]
            assert self._most_tokens(sequence) <= scheduler.capacity[row], "the next iteration would write past the row's pages"
            self.output[row] = min(self.output[row] + self.random.integers(1, RUN_WIDTH + 1), goal)
            if self.output[row] == goal:
                scheduler.lengths.observe(goal, goal < sequence.cap)
                scheduler.release(sequence)
                self.finished[sequence.request.key] += 1

    def _outgrown(self) -> tuple[list[Sequence], list[int]]:
        short = [s for s in self.scheduler.running if self._most_tokens(s) > self.scheduler.capacity[s.row]]
        return short, [self._most_tokens(sequence) for sequence in short]

    def _most_tokens(self, sequence: Sequence) -> int:
        return min(sequence.prompt_len + int(self.output[sequence.row]) + RUN_WIDTH, sequence.limit) + LOOKAHEAD


POLICIES = st.builds(
    SchedulingSettings,
    longest_first=st.booleans(),
    grows=st.booleans(),
    pledged_share=st.sampled_from([0.0, 0.25, 1.0]),
    max_overtaking=st.sampled_from([2, 1000]),
)
SHAPES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 300), st.floats(0, 1), st.booleans()), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(365, 800), POLICIES, st.integers(0, 99))
def test_every_request_ends_once_and_all_pages_come_back(shapes, num_tokens, policy, seed):
    scheduler = make_scheduler(num_tokens, policy)
    lengths = []
    for key, (prompt_len, cap, share, stops) in enumerate(shapes):
        lengths.append(max(1, round(share * cap)) if stops else cap)
        scheduler.add(make_sequence(key, prompt_len, cap, stops))
    run = Simulation(scheduler, lengths, np.random.default_rng(seed))
    most_steps = sum(lengths) + sum(prompt_len for prompt_len, *_ in shapes) + 100
    while not scheduler.is_idle and most_steps * 4:
        run.step()
        most_steps -= 1
        assert most_steps > -3 * sum(lengths), "no end in sight"
    assert run.finished == Counter(range(len(shapes)))
    assert scheduler.pool.num_free == scheduler.pool.num_pages
    for seniority, holders in run.preempted:
        assert seniority == max(holders) and len(holders) > 1, "the oldest never gives way"
    if not policy.grows:
        assert not run.preempted


def test_a_pool_for_one_takes_one_after_the_other():
    scheduler = make_scheduler(120, SchedulingSettings(pledged_share=0.0))
    for key in range(3):
        scheduler.add(make_sequence(key, 10, 105, stops=False))
    run = Simulation(scheduler, [105] * 3, np.random.default_rng(0))
    for _ in range(2000):
        run.step()
    assert run.finished == Counter(range(3))


def test_memory_is_kept_for_what_admitted_ones_are_likely_to_want():
    for share, num_admitted in ((0.0, 3), (1.0, 1)):
        scheduler = make_scheduler(300, SchedulingSettings(pledged_share=share))
        for key in range(4):
            scheduler.add(make_sequence(key, 10, 200, stops=False))
        assert len(scheduler.admit(np.zeros(NUM_ROWS, np.int64))) == num_admitted


def test_short_outputs_seen_before_let_more_requests_in():
    counts = []
    for length in (200, 10):
        scheduler = make_scheduler(600, SchedulingSettings(pledged_share=1.0))
        for _ in range(100):
            scheduler.lengths.observe(length, length < 200)
        for key in range(4):
            scheduler.add(make_sequence(key, 10, 200))
        counts.append(len(scheduler.admit(np.zeros(NUM_ROWS, np.int64))))
    assert counts == [2, 4]


def test_what_is_left_counts_waiting_and_running_ones():
    scheduler = make_scheduler(2000, SchedulingSettings())
    for key in range(6):
        scheduler.add(make_sequence(key, 10, 50, stops=False))
    output = np.zeros(NUM_ROWS, np.int64)
    for sequence in scheduler.admit(output):
        output[sequence.row] = 20
    found = scheduler.forecast(output)
    assert (found.num_tokens, found.longest, found.num_prompt_tokens) == (4 * 30 + 2 * 50, 50, 60)
    assert found.num_row_steps == 220 / NUM_ROWS


@pytest.mark.parametrize("num_follow_ups", [0, 2])
def test_the_first_turn_of_a_long_conversation_comes_before_a_longer_single_one(num_follow_ups):
    scheduler = make_scheduler(2000, SchedulingSettings())
    scheduler.add(make_sequence(0, 10, 100))
    talk = make_sequence(1, 10, 50).request
    scheduler.add(Sequence(Request(1, talk.prompt_ids, talk.sampling, num_follow_ups=num_follow_ups)))
    assert scheduler.admit(np.zeros(NUM_ROWS, np.int64))[0].request.key == (1 if num_follow_ups else 0)


def test_requests_are_admitted_by_the_group_while_others_run() -> None:
    scheduler, output = make_scheduler(4096, SchedulingSettings(), group_size=2), np.zeros(NUM_ROWS, np.int64)
    for key in range(NUM_ROWS + 3):
        scheduler.add(make_sequence(key, 4, 8))
    running = scheduler.admit(output)
    assert len(running) == NUM_ROWS, "nobody ran: there was nothing to wait for"
    while scheduler.prefilling:
        scheduler.next_chunks()
    scheduler.release(running[0])
    assert scheduler.admit(output) == []
    scheduler.release(running[1])
    assert len(scheduler.admit(output)) == 2
    scheduler.check()


def test_the_last_request_is_admitted_though_its_group_is_never_full() -> None:
    scheduler, output = make_scheduler(4096, SchedulingSettings(), group_size=NUM_ROWS), np.zeros(NUM_ROWS, np.int64)
    for key in range(NUM_ROWS + 1):
        scheduler.add(make_sequence(key, 4, 8))
    running = scheduler.admit(output)
    while scheduler.prefilling:
        scheduler.next_chunks()
    for sequence in running:
        assert scheduler.admit(output) == []
        scheduler.release(sequence)
    assert len(scheduler.admit(output)) == 1


def test_where_memory_is_short_requests_are_admitted_by_the_group_as_well() -> None:
    """Each takes 10 pages of 30: with one row's pages free there is a row and memory for one, but not for the group of two."""
    scheduler, output = make_scheduler(120, SchedulingSettings(grows=False), group_size=2), np.zeros(NUM_ROWS, np.int64)
    for key in range(6):
        scheduler.add(make_sequence(key, 5, 30, stops=False))
    running = scheduler.admit(output)
    assert len(running) == 3
    while scheduler.prefilling:
        scheduler.next_chunks()
    output[:] = 29
    scheduler.release(running[0])
    assert scheduler.admit(output) == []
    scheduler.release(running[1])
    assert len(scheduler.admit(output)) == 2
    scheduler.check()
