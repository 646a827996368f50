"""How many tokens an iteration of each mode is expected to add to a row, from what iterations of all modes have accepted lately.

Texts differ, and so do the beginning and the end of one: how often drafts are accepted says more of the text than of the mode. So what is
kept lately is one table, of the text: for every depth, how often a draft there is missed when its parent was accepted. What is kept for
long are relations. All chains share the table. The branches of a tree are worth `tries` independent drafts at every depth,

    misses of the tree = misses of a chain ** tries,

which is learnt when a tree and something else run one after the other, and weighed by how sure either is. A depth that was not seen
lately leans on the one before it, as the two were related when last they were seen: by their efforts, -log of misses, in which a
tree is a chain times its tries. Pure arithmetic, no tensors.
"""

import math
from collections.abc import Sequence

import numpy as np

from eaglecli.engine.settings import SpeculationSettings

_MEMORY_ROW_STEPS, _MEMORY_ITERATIONS = 200, 16  # evidence has lost all but 1/e of its weight after so many of both
_IDLE_MEMORY_ITERATIONS = 256  # and after so many that draft nothing
_COMPARED_ROW_STEPS, _COMPARED_ITERATIONS = 48, 8  # of so many is the evidence that is compared with another table's
_PRIOR_WEIGHT = 6.0  # trials that what an estimate leans on is worth
_FIRST_EFFORT = 1.2  # of depth 1, before anything was seen: 0.7 are accepted
_EFFORT_DECAY = 0.9  # from one depth to the next, before anything was seen
_FIRST_TRIES_PER_DOUBLING = 0.09  # of a tree's tokens, from two on: as trees of 16 and 32 were measured (benchmarks/RESULTS.md, run 12)
_COMMON_VARIANCE, _OWN_VARIANCE = 0.15, 0.005  # of the logarithm of tries, before a tree was seen
_GROWING_VARIANCE = 3e-4  # each one's own, a comparison: old ones count less
_DRIFT_VARIANCE = 0.2  # of the logarithm of the text's effort, between two tables' evidence
_MOST_ERROR, _MOST_LOG_TRIES = 0.5, 1.5  # one comparison may say so much; a tree is worth no more


class Counts:
    """Drafts and misses at depths 1, 2, ... Lists of floats: for so few numbers they are sooner done than arrays."""

    def __init__(self, num_steps: int) -> None:
        self.trials, self.misses = [0.0] * num_steps, [0.0] * num_steps

    def fade(self, weight: float) -> None:
        """Old evidence makes room."""
        self.trials = [weight * trials for trials in self.trials]
        self.misses = [weight * misses for misses in self.misses]

    def add(self, accept_counts: np.ndarray, num_steps: int) -> None:
        """Row-steps of a mode of `num_steps`, which accepted so many drafts each."""
        reached = len(accept_counts)
        for depth, missed in enumerate(np.bincount(accept_counts, minlength=num_steps).tolist()[:num_steps]):
            self.trials[depth] += reached
            self.misses[depth] += missed
            reached -= missed


class Acceptance:
    """Expected tokens of a row-step for each of an engine's modes."""

    def __init__(self, modes: Sequence[SpeculationSettings]) -> None:
        self._modes = tuple(modes)
        deepest = max(mode.num_steps for mode in modes)
        trees = [number for number, mode in enumerate(modes) if mode.topk > 1]
        self._table = [trees.index(number) + 1 if number in trees else 0 for number in range(len(modes))]  # 0: that of all chains
        first = [math.log(1 + _FIRST_TRIES_PER_DOUBLING * math.log2(modes[number].num_draft_tokens / 2)) for number in trees]
        self._log_tries = np.array([0.0, *first])
        self._variance = np.zeros((len(trees) + 1,) * 2)  # of the guesses: what trees have in common, and each one's own
        self._variance[1:, 1:] = _COMMON_VARIANCE + _OWN_VARIANCE * np.eye(len(trees))
        self._recent = self._before = Counts(deepest)  # lately: of the table that runs, and of the one that did before
        self._before_table, self._is_compared = 0, True
        self._counts, self._running = Counts(deepest), 0  # of the text, as the table that drafted last sees it
        self._steps = [_FIRST_EFFORT] + [_EFFORT_DECAY] * (deepest - 1)  # a depth's effort by that of the one before; the first one's own
        self._tokens: dict[int, float] = {}  # worked out since something was observed

    def observe(self, mode: int, accept_counts: np.ndarray, num_iterations: int = 1) -> None:
        """int [n]: drafts that each row accepted in so many iterations of the mode."""
        self._tokens.clear()
        num_steps, table = self._modes[mode].num_steps, self._table[mode]
        self._recent.fade(math.exp(-min(len(accept_counts) / _COMPARED_ROW_STEPS, num_iterations / _COMPARED_ITERATIONS)))
        if not num_steps:
            self._before.fade(math.exp(-num_iterations / _COMPARED_ITERATIONS))
        if not num_steps or not len(accept_counts):
            self._counts.fade(math.exp(-num_iterations / _IDLE_MEMORY_ITERATIONS))
            return
        if table != self._running:
            self._change(table)
        self._recent.add(accept_counts, num_steps)
        if not self._is_compared and self._recent.trials[0] >= _COMPARED_ROW_STEPS / 2:
            self._compare()
        self._counts.fade(math.exp(-min(len(accept_counts) / _MEMORY_ROW_STEPS, num_iterations / _MEMORY_ITERATIONS)))
        self._counts.add(accept_counts, num_steps)
        self._keep_steps()

    def tokens(self, mode: int) -> float:
        """Accepted drafts and one more: 1 for plain decoding."""
        if mode not in self._tokens:
            tries = math.exp(self._log_tries[self._table[mode]] - self._log_tries[self._running])
            expected, reached = 1.0, 1.0
            for effort in self._efforts(self._modes[mode].num_steps):
                reached *= 1 - math.exp(-tries * effort)
                expected += reached
            self._tokens[mode] = expected
        return self._tokens[mode]

    def doubt(self, mode: int) -> float:
        """Standard deviation of the logarithm of the mode's tries beside what runs."""
        one, other, variance = self._table[mode], self._running, self._variance
        return math.sqrt(max(variance[one, one] + variance[other, other] - 2 * variance[one, other], 0.0))

    def evidence(self, mode: int) -> float:
        """Trials that the estimate of the mode's shallowest unsure depth rests on; plain decoding needs none."""
        num_steps, reached = self._modes[mode].num_steps, 1.0
        for trials, effort in zip(self._counts.trials, self._efforts(num_steps), strict=False):
            if reached < 0.05:  # too few get there to matter
                break
            if trials < _PRIOR_WEIGHT:
                return trials
            reached *= 1 - math.exp(-effort)
        return self._counts.trials[0] if num_steps else math.inf

    def _efforts(self, num_steps: int) -> list[float]:
        """-log of the misses at each depth, for the table that runs."""
        efforts, before = [], 1.0
        for step, trials, misses in zip(self._steps[:num_steps], self._counts.trials, self._counts.misses, strict=False):
            missed = (misses + _PRIOR_WEIGHT * math.exp(-step * before)) / (trials + _PRIOR_WEIGHT)
            before = -math.log(max(missed, 1e-3))
            efforts.append(before)
        return efforts

    def _keep_steps(self) -> None:
        """What can be leant on once the evidence has faded."""
        efforts = self._efforts(len(self._steps))
        for depth, (effort, before) in enumerate(zip(efforts, [1.0, *efforts], strict=False)):
            if self._counts.trials[depth] >= _PRIOR_WEIGHT:
                self._steps[depth] = effort / max(before, 1e-3)

    def _change(self, table: int) -> None:
        """Another table runs: what the one before knew of the text becomes what this one would have seen."""
        if not self._is_compared:
            self._compare()
        tries = math.exp(self._log_tries[table] - self._log_tries[self._running])
        efforts = self._efforts(len(self._steps))
        self._counts.misses = [trials * math.exp(-tries * effort) for trials, effort in zip(self._counts.trials, efforts, strict=True)]
        self._steps[0] *= tries
        self._before, self._before_table, self._recent = self._recent, self._running, Counts(len(self._steps))
        self._running, self._is_compared = table, False

    def _compare(self) -> None:
        """Two tables saw the same text, one after the other: the error is shared among tries by how unsure each is (a Kalman filter)."""
        self._is_compared, new, old = True, self._recent, self._before
        if not min(new.trials[0], old.trials[0]):
            return
        tries = math.exp(self._log_tries[self._running] - self._log_tries[self._before_table])
        total, missed, expected = 1.0, 0.5, 0.5
        for trials, misses, old_trials, old_misses in zip(new.trials, new.misses, old.trials, old.misses, strict=True):
            if old_trials > 1:
                total, missed = total + trials, missed + misses
                expected += trials * ((old_misses + 0.5) / (old_trials + 1)) ** tries
        error = np.clip(math.log(math.log(missed / total) / math.log(expected / total)), -_MOST_ERROR, _MOST_ERROR)
        weights = np.zeros(len(self._log_tries))
        weights[self._running], weights[self._before_table] = 1.0, -1.0
        shares = self._variance @ weights
        spread = weights @ shares + _DRIFT_VARIANCE + 1 / new.trials[0] + 1 / old.trials[0]
        self._log_tries = np.clip(self._log_tries + shares / spread * error, 0.0, _MOST_LOG_TRIES)
        self._variance -= np.outer(shares, shares) / spread
        self._variance[1:, 1:] += _GROWING_VARIANCE * np.eye(len(weights) - 1)
