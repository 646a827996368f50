"""Speculation that does not lose: the mode that is expected to give the most tokens a second, at every batch size.

    expected rate = tokens of a row-step (`Acceptance`) / seconds of an iteration (`IterationCosts`)

The first iterations belong to mode 0, which was asked for, if it could win. A mode is left only for one that is better by a margin. What
is not run is not learnt of, so now and then a mode of which too little is known, or nothing lately, is tried for a few iterations: only
one that could win (if all its drafts were right; plain decoding, which has none, if the start measured it twice too dear), and only when
the time that it may lose, if it is less often right than expected, fits into a fixed share of all time and what is granted at the start.
A mode that was tried in vain waits longer for its next trial. Short trials tell most: while a long one
runs, the text moves on. Pure bookkeeping, no tensors; the clock is the engine's observations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from eaglecli.engine.acceptance import Acceptance
from eaglecli.engine.iteration_costs import Bucket, IterationCosts
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.engine.speculation_policy import StepObservation

MARGIN = 1.02  # another mode must be so much better
QUICK_MARGIN = 1.15  # than the last one, to be taken before this has run for
DWELL_ITERATIONS = 8
DECISION_ITERATIONS = 8  # from one decision to the next at the same batch size: deciding costs the host as much as a small launch
TRIAL_SHARE = 0.01  # of all time that trials may lose
GRANTED_ITERATIONS = 5  # at the start: trials may lose the time of so many more
SURE = 0.05  # doubt of how a mode compares with what runs that needs no trial
TRIAL_ROW_STEPS = 32
MOST_TRIAL_ITERATIONS = 16
FIRST_WAIT_ITERATIONS, LONGEST_WAIT_ITERATIONS = 32, 1024
ENOUGH_EVIDENCE = 64.0  # trials of a draft token, faded: below it a mode is not known well
NUM_LOGGED_CHANGES = 200


@dataclass(frozen=True)
class ModeChange:
    """One change of mode between two iterations."""

    iteration: int
    num_requests: int
    before: int
    after: int
    is_trial: bool
    tokens: tuple[float, float]  # expected of a row-step, before and after
    seconds: tuple[float, float]  # expected of an iteration


class AdaptivePolicy:
    """See the module docstring. Modes are numbered as the engine does."""

    def __init__(
        self,
        modes: Sequence[SpeculationSettings],
        max_requests: Sequence[int],
        costs: IterationCosts,
        watch: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Mode m is for batches of up to max_requests[m]; at least one is for all. `watch` is told of every change that is no trial."""
        self.acceptance, self.costs = Acceptance(modes), costs
        self._modes, self._max_requests, self.watch = tuple(modes), tuple(max_requests), watch
        self._best: dict[Bucket, int] = {}
        self._last: int | None = None  # mode of the iteration before
        self._held: int | None = None  # the same, trials left out
        self._held_since = 0
        self._iteration = 0
        self._elapsed_s = self._trial_loss_s = 0.0
        self._trial: tuple[int, int] | None = None  # mode, iterations left
        self._pending: list[StepObservation] = []
        self._length_class = 0  # of the rows that a decision is made for
        self._decided_for, self._decide_at, self._seconds = (0, 0), 0, 0.0
        self._tried_at = [-LONGEST_WAIT_ITERATIONS] * len(modes)
        self._wait = [FIRST_WAIT_ITERATIONS] * len(modes)
        self.num_changes = self.num_trials = self.num_trial_iterations = 0
        self.changes: list[ModeChange] = []

    def choose(self, num_requests: int, length_class: int = 0) -> int:
        """The mode of the next iteration. What iterations cost is learnt apart for every length class."""
        self._iteration += 1
        self._length_class = length_class
        is_settled = (num_requests, length_class) == self._decided_for and self._iteration < self._decide_at and self._trial is None
        if is_settled and self._last is not None:
            self._elapsed_s += self._seconds
            return self._last
        self._learn()
        allowed = [mode for mode, most in enumerate(self._max_requests) if num_requests <= most]
        best = self._settle(num_requests, allowed)
        mode = self._try_out(num_requests, allowed, best)
        self._seconds = self._cost_s(mode, num_requests)
        self._elapsed_s += self._seconds
        self._note(mode, num_requests, is_trial=mode != best)
        is_brief = self._is_beginning(num_requests) or (mode != best and self._trial is None)
        self._decided_for, self._decide_at = (num_requests, length_class), self._iteration + (1 if is_brief else DECISION_ITERATIONS)
        return mode

    def observe(self, observation: StepObservation) -> None:
        """Learn what an iteration accepted and how long it took."""
        self._pending.append(observation)

    def _learn(self) -> None:
        """Take in what was observed since the last decision."""
        for mode, observations in groupby(self._pending, key=lambda observation: observation.mode):
            counts = [observation.accept_counts for observation in observations]
            self.acceptance.observe(mode, np.concatenate(counts), len(counts))
        for observation in self._pending:
            if observation.seconds is not None:
                self.costs.observe(
                    observation.mode, observation.num_requests, observation.seconds, observation.caught_up, observation.length_class
                )
        self._pending.clear()

    def rate(self, mode: int, num_requests: int) -> float:
        """Expected tokens a second of one row."""
        return self.acceptance.tokens(mode) / self._cost_s(mode, num_requests)

    def _cost_s(self, mode: int, num_requests: int) -> float:
        return self.costs.seconds(mode, num_requests, self._length_class)

    def describe(self) -> dict[str, Any]:
        """What was found out and what was done."""
        return {
            "policy": "adaptive",
            "num_changes": self.num_changes,
            "num_trials": self.num_trials,
            "num_trial_iterations": self.num_trial_iterations,
            "expected_tokens": {str(mode): self.acceptance.tokens(number) for number, mode in enumerate(self._modes)},
            "choice_by_batch_size": {
                f"{size}, length class {length_class}" if length_class else str(size): str(self._modes[mode])
                for (size, length_class), mode in sorted(self._best.items())
            },
            "changes": [
                {
                    "iteration": change.iteration,
                    "num_requests": change.num_requests,
                    "before": str(self._modes[change.before]),
                    "after": str(self._modes[change.after]),
                    "is_trial": change.is_trial,
                }
                for change in self.changes
            ],
        }

    def _settle(self, num_requests: int, allowed: Sequence[int]) -> int:
        """The mode that holds at this batch size: the one before, until another is better by the margin."""
        bucket = self.costs.bucket(num_requests, self._length_class)
        rates = {mode: self.rate(mode, num_requests) for mode in allowed}
        best, held = max(allowed, key=rates.__getitem__), self._best.get(bucket)
        if self._is_beginning(num_requests) and 0 in rates and self._could_win(0, num_requests, best):
            best = held = 0
        if held not in rates or rates[best] > MARGIN * rates[held]:
            self._best[bucket] = held = best
        is_early = self._iteration - self._held_since < DWELL_ITERATIONS
        if self._held in rates and is_early and rates[held] < QUICK_MARGIN * rates[self._held]:
            return self._held
        if held != self._held:
            self._held, self._held_since = held, self._iteration
            self._wait[held] = FIRST_WAIT_ITERATIONS
        return held

    def _try_out(self, num_requests: int, allowed: Sequence[int], best: int) -> int:
        """`best`, or a mode that is on trial."""
        if self._trial is None:
            mode = None if self._is_beginning(num_requests) else self._next_trial(num_requests, allowed, best)
            if mode is None:
                return best
            self.num_trials += 1
            self._trial = (mode, self._trial_length(num_requests))
            self._trial_loss_s += self._trial_risk_s(mode, num_requests, best)
        mode, left = self._trial
        self._trial = (mode, left - 1) if left > 1 and mode in allowed else None
        if mode not in allowed or mode == best:
            return best
        self._tried_at[mode] = self._iteration
        self.num_trial_iterations += 1
        return mode

    def _next_trial(self, num_requests: int, allowed: Sequence[int], best: int) -> int | None:
        """The most promising of the modes whose turn it is, or None."""
        due = [
            mode
            for mode in allowed
            if mode != best
            and self._iteration - self._tried_at[mode] > self._wait[mode]
            and self._could_win(mode, num_requests, best)
            and self._is_unsure(mode, num_requests, best)
        ]
        mode = max(due, key=lambda mode: self._promise(mode, num_requests), default=None)
        allowance_s = self._trial_allowance_s(num_requests, best)
        if mode is None or self._trial_loss_s + self._trial_risk_s(mode, num_requests, best) > allowance_s:
            return None
        growth = 1.5 if self._modes[best].num_steps else 2
        self._wait[mode] = min(int(growth * self._wait[mode]), LONGEST_WAIT_ITERATIONS)
        return mode

    def _promise(self, mode: int, num_requests: int) -> tuple[bool, float]:
        """What trials are ranked by. Plain decoding promises little, so that its turn would never come: at last it comes first."""
        is_overdue = self._iteration > LONGEST_WAIT_ITERATIONS and self._is_plain_unknown(mode, num_requests)
        return is_overdue, self.rate(mode, num_requests) * (1 + self.acceptance.doubt(mode))

    def _is_plain_unknown(self, mode: int, num_requests: int) -> bool:
        """Plain decoding whose cost is what the start measured: where that was too dear, nothing else would ever say so."""
        return self._modes[mode].num_steps == 0 and not self.costs.is_known(mode, num_requests, self._length_class)

    def _trial_allowance_s(self, num_requests: int, best: int) -> float:
        """Seconds that all trials up to now may lose."""
        return TRIAL_SHARE * self._elapsed_s + GRANTED_ITERATIONS * self._cost_s(best, num_requests)

    def _is_unsure(self, mode: int, num_requests: int, best: int) -> bool:
        """While decoding plainly nothing is learnt of any draft; else of modes that the running one tells too little of."""
        is_guessed = self._modes[best].num_steps == 0 or self.acceptance.evidence(mode) < ENOUGH_EVIDENCE
        return (
            is_guessed
            or self.acceptance.doubt(mode) > SURE
            or self._is_plain_unknown(mode, num_requests)
            or self.costs.age(mode, num_requests, self._length_class) > LONGEST_WAIT_ITERATIONS
        )

    def _could_win(self, mode: int, num_requests: int, best: int) -> bool:
        """If all its drafts were right, and what is not known cost no more than was measured, or of plain decoding half of it."""
        most = self._modes[mode].num_steps + 1
        least_s = self.costs.least_seconds(mode, num_requests, self._length_class)
        if self._is_plain_unknown(mode, num_requests):
            least_s = min(least_s, self.costs.floor_seconds(mode, num_requests))
        return most / least_s > MARGIN * self.rate(best, num_requests)

    def _is_beginning(self, num_requests: int) -> bool:
        """Mode 0 is being tried, as it were."""
        return self._iteration <= self._trial_length(num_requests)

    def _trial_length(self, num_requests: int) -> int:
        return min(max(-(-TRIAL_ROW_STEPS // num_requests), 2), MOST_TRIAL_ITERATIONS)

    def _trial_risk_s(self, mode: int, num_requests: int, best: int) -> float:
        """Seconds that a trial loses if it accepts less than expected: half as much where nothing drafts now, else by half its doubt."""
        lost_share = self.acceptance.doubt(mode) if self._modes[best].num_steps else 1.0
        tokens = 1 + (self.acceptance.tokens(mode) - 1) * (1 - lost_share / 2)
        lost = self._cost_s(mode, num_requests) - tokens / self.rate(best, num_requests)
        return max(lost, 0.0) * self._trial_length(num_requests) + self.costs.catch_up_s

    def _note(self, mode: int, num_requests: int, is_trial: bool) -> None:
        last, self._last = self._last, mode
        if last is None or last == mode:
            return
        self.num_changes += 1
        tokens = (self.acceptance.tokens(last), self.acceptance.tokens(mode))
        seconds = (self._cost_s(last, num_requests), self._cost_s(mode, num_requests))
        change = ModeChange(self._iteration, num_requests, last, mode, is_trial, tokens, seconds)
        if len(self.changes) < NUM_LOGGED_CHANGES:
            self.changes.append(change)
        if not is_trial:
            self.watch(self._sentence(change))

    def _sentence(self, change: ModeChange) -> str:
        parts = (
            f"{self._modes[mode]} ({tokens:.2f} tokens in {seconds * 1e3:.2f} ms)"
            for mode, tokens, seconds in zip((change.before, change.after), change.tokens, change.seconds, strict=True)
        )
        return f"iteration {change.iteration}, {change.num_requests} requests: speculation {' -> '.join(parts)}"
