"""How many tokens an iteration of each mode is expected to add to a row, from what iterations of all modes have accepted lately.

Kept are, for every depth, how often a draft there was accepted when its parent was. A chain's drafts do not depend on how many
follow them, so all chains share one such table and a short one tells of the first depths of a long one. Every tree has its own.
Where little was seen the estimate leans on the nearest thing that was: the depth before, a tree's on the chains' and a chain's on
the trees'. Old evidence fades: where new evidence comes it makes room for it; where none comes the estimate stays what it was, but
little will change it. Pure arithmetic, no tensors.
"""

import math
from collections.abc import Sequence

import numpy as np

from eaglecli.engine.settings import SpeculationSettings

_MEMORY_ROW_STEPS, _MEMORY_ITERATIONS = 200, 16  # evidence of a table has lost all but 1/e of its weight after so many of both in it
_IDLE_MEMORY_ITERATIONS = 256  # over so many iterations that have nothing to say of it
_PRIOR_WEIGHT = 6.0  # trials that what an estimate leans on is worth
_FIRST_RATE = 0.7  # of depth 1, before anything was seen
_RATE_DECAY = 0.95  # from one depth to the next, before anything was seen


class DepthRates:
    """One table: trials and acceptances at depths 1, 2, ... Lists of floats: for so few numbers they are sooner done than arrays."""

    def __init__(self, num_steps: int) -> None:
        self.trials = [0.0] * num_steps
        self._accepted = [0.0] * num_steps
        self._anchor: list[float | None] = [None] * num_steps  # what was known when last something was seen

    def observe(self, accept_counts: np.ndarray, num_steps: int, num_iterations: int) -> None:
        """Row-steps of a mode of `num_steps`, which accepted so many drafts each."""
        weight = math.exp(-min(len(accept_counts) / _MEMORY_ROW_STEPS, num_iterations / _MEMORY_ITERATIONS))
        reached = len(accept_counts)
        for depth, ended in enumerate(np.bincount(accept_counts, minlength=num_steps).tolist()[:num_steps]):
            self.trials[depth] = weight * self.trials[depth] + reached
            reached -= ended
            self._accepted[depth] = weight * self._accepted[depth] + reached
            if self.trials[depth] >= _PRIOR_WEIGHT:
                self._anchor[depth] = self._accepted[depth] / self.trials[depth]

    def fade(self, num_iterations: int) -> None:
        """So many iterations passed that had nothing to say."""
        weight = math.exp(-num_iterations / _IDLE_MEMORY_ITERATIONS)
        self.trials = [weight * trials for trials in self.trials]
        self._accepted = [weight * accepted for accepted in self._accepted]

    def is_known(self, depth: int) -> bool:
        """Whether enough was seen once of `depth`, from 1."""
        return self._anchor[depth - 1] is not None

    def rate(self, depth: int, leaning_on: float = 0.0) -> float:
        """Of `depth`; what was known of it stands before what else could be leant on."""
        anchor = self._anchor[depth - 1]
        prior = leaning_on if anchor is None else anchor
        return (self._accepted[depth - 1] + _PRIOR_WEIGHT * prior) / (self.trials[depth - 1] + _PRIOR_WEIGHT)


class Acceptance:
    """Expected tokens of a row-step for each of an engine's modes."""

    def __init__(self, modes: Sequence[SpeculationSettings]) -> None:
        self._modes = tuple(modes)
        deepest = max(mode.num_steps for mode in modes)
        self._chains = DepthRates(deepest)
        self._tables = [self._chains if mode.topk == 1 else DepthRates(mode.num_steps) for mode in modes]
        self._tokens: dict[int, float] = {}  # worked out since something was observed

    def observe(self, mode: int, accept_counts: np.ndarray, num_iterations: int = 1) -> None:
        """int [n]: drafts that each row accepted in so many iterations of the mode."""
        self._tokens.clear()
        num_steps, table = self._modes[mode].num_steps, self._tables[mode]
        if num_steps and len(accept_counts):
            table.observe(accept_counts, num_steps, num_iterations)
        for other in {id(other): other for other in self._tables}.values():
            if other is not table or not num_steps:
                other.fade(num_iterations)

    def tokens(self, mode: int) -> float:
        """Accepted drafts and one more: 1 for plain decoding."""
        if mode not in self._tokens:
            expected, reached = 1.0, 1.0
            for rate in self._rates(mode):
                reached *= rate
                expected += reached
            self._tokens[mode] = expected
        return self._tokens[mode]

    def evidence(self, mode: int) -> float:
        """Trials that the estimate of the mode's shallowest unsure depth rests on; plain decoding needs none."""
        num_steps = self._modes[mode].num_steps
        if not num_steps:
            return math.inf
        table, reached = self._tables[mode], 1.0
        for depth, rate in enumerate(self._rates(mode), start=1):
            if reached < 0.05:  # too few get there to matter
                break
            if table.trials[depth - 1] < _PRIOR_WEIGHT:
                return table.trials[depth - 1]
            reached *= rate
        return table.trials[0]

    def _rates(self, mode: int) -> list[float]:
        speculation, table = self._modes[mode], self._tables[mode]
        rates: list[float] = []
        for depth in range(1, speculation.num_steps + 1):
            rates.append(table.rate(depth, self._leaning_on(speculation, depth, rates)))
        return rates

    def _leaning_on(self, speculation: SpeculationSettings, depth: int, shallower: Sequence[float]) -> float:
        before = shallower[-1] * _RATE_DECAY if shallower else _FIRST_RATE
        if speculation.topk > 1:
            is_known = depth <= len(self._chains.trials) and self._chains.is_known(depth)
            return 1 - (1 - self._chains.rate(depth)) ** _branching(speculation.topk) if is_known else before
        for other, table in zip(self._modes, self._tables, strict=True):
            if other.topk > 1 and other.num_steps >= depth and table.is_known(depth):
                return min(before, 1 - (1 - table.rate(depth)) ** (1 / _branching(other.topk)))
        return before


def _branching(topk: int) -> float:
    """How many independent tries the branches of a tree are worth: a guess, until the tree was seen."""
    return 1 + 0.5 * math.log2(topk)
