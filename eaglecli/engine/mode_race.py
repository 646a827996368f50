"""Which of an engine's modes is the fastest at one batch size: all in one run, taking turns, the slower half dropped round by round.

Because no mode changes the text and a pause costs the draft nothing, modes can take turns of a few iterations over the same
requests: they are compared on the same text, the same lengths and the same minute of the machine. A round gives every mode that is left
as many iterations as the round before gave it twice ("successive halving": Jamieson and Talwalkar, AISTATS 2016).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request
from eaglecli.engine.speculation_policy import StepObservation

TURN_ITERATIONS = 8
FIRST_ROUND_ITERATIONS, FIRST_ROUND_ROW_STEPS = 16, 96  # of each mode in the first round: whichever is more
_FULL = 0.75  # of the batch must run for an iteration to count, and rows are filled again when fewer do


@dataclass
class ModeTime:
    """What was seen of one mode."""

    mode: int
    step_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_row_steps: int = 0

    @property
    def tokens_per_row_step(self) -> float:
        """Accept length as delivered."""
        return self.num_tokens / self.num_row_steps if self.num_row_steps else 0.0

    @property
    def median_step_s(self) -> float:
        """Of an iteration; a pause of the host does not move it."""
        return median(self.step_s) if self.step_s else float("inf")

    def tokens_per_second(self, batch_size: int) -> float:
        """Of a full batch that does nothing but decode."""
        return batch_size * self.tokens_per_row_step / self.median_step_s


class ModeRace:
    """A policy that lets modes take turns and measures them."""

    def __init__(self, modes: Sequence[int], batch_size: int, first_round: int | None = None) -> None:
        """`first_round`: iterations of each mode in the first round; None: enough to tell modes apart."""
        self.batch_size = batch_size
        self.times = {mode: ModeTime(mode) for mode in modes}
        self._left = list(modes)
        self._wanted = first_round or max(FIRST_ROUND_ITERATIONS, -(-FIRST_ROUND_ROW_STEPS // batch_size))
        self._num_rounds = dict.fromkeys(modes, 0)  # that each has finished
        self._turn, self._turn_left = 0, TURN_ITERATIONS

    @property
    def is_done(self) -> bool:
        """One mode has won."""
        return not self._left

    def choose(self, num_requests: int, length_class: int = 0) -> int:
        """The mode whose turn it is; while few requests run, they stay with it."""
        if not self._left:
            return self.ranking()[0].mode
        if num_requests >= _FULL * self.batch_size:
            self._turn_left -= 1
            if self._turn_left < 0:
                self._turn, self._turn_left = self._turn + 1, TURN_ITERATIONS - 1
        waiting = [mode for mode in self._left if len(self.times[mode].step_s) < self._wanted] or self._left
        return waiting[self._turn % len(waiting)]

    def observe(self, observation: StepObservation) -> None:
        """Count an iteration of an almost full batch that nothing disturbed; at the end of a round drop the slower half."""
        is_clean = observation.seconds is not None and not observation.caught_up
        if not is_clean or observation.num_requests < _FULL * self.batch_size or observation.mode not in self._left:
            return
        time = self.times[observation.mode]
        time.step_s.append(observation.seconds or 0.0)
        time.num_tokens += observation.num_tokens
        time.num_row_steps += observation.num_requests
        if all(len(self.times[mode].step_s) >= self._wanted for mode in self._left):
            for mode in self._left:
                self._num_rounds[mode] += 1
            fastest = sorted(self._left, key=self._rate, reverse=True)
            faster = fastest[: (len(fastest) + 1) // 2]
            self._left = faster if len(faster) > 1 else []
            self._wanted *= 2

    def ranking(self) -> list[ModeTime]:
        """Fastest first, modes of later rounds before those that were dropped earlier."""
        order = sorted(self.times, key=lambda mode: (self._num_rounds[mode], self._rate(mode)), reverse=True)
        return [self.times[mode] for mode in order]

    def _rate(self, mode: int) -> float:
        return self.times[mode].tokens_per_second(self.batch_size)

    def describe(self) -> dict[str, Any]:
        """Says what it is."""
        return {"policy": "race"}


def run_race(engine: Engine, requests: Iterable[Request], race: ModeRace, budget_s: float) -> None:
    """Run the race over `requests`, again and again if they are few, until it is done or `budget_s` seconds are over.

    Free rows are filled together, so that prefills disturb few iterations. The engine is idle before and after, its policy as before.
    """
    policy, engine.policy = engine.policy, race
    source, num_running, started = itertools.cycle(requests), 0, perf_counter()
    try:
        while not race.is_done and perf_counter() - started < budget_s:
            if num_running < _FULL * race.batch_size:
                for _ in range(race.batch_size - num_running):
                    engine.add(next(source))
                num_running = race.batch_size
            num_running -= len(engine.step())
        while not engine.is_idle:
            engine.step()
    finally:
        engine.policy = policy
