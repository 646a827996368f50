"""Who decides how an engine speculates from one iteration to the next. Pure bookkeeping, no tensors.

An engine numbers its modes in the order of `EngineSettings.all_speculation`. Before every iteration it asks its policy for one;
what the iteration then did is told to the policy when its record is read, an iteration later. No decision can change the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, eq=False)
class StepObservation:
    """What one iteration did."""

    mode: int
    num_requests: int
    accept_counts: np.ndarray  # int32 [n] drafts accepted by each row that goes on
    num_tokens: int  # emitted by all rows
    seconds: float | None  # between its record and the one before; None where something else ran in between (a prefill, nothing at all)
    caught_up: bool  # the draft caught up with tokens that were decoded without it: not a cost of every iteration of the mode
    length_class: int = 0  # of its rows, as `choose` was told


class SpeculationPolicy(Protocol):
    """Chooses a mode for every iteration."""

    def choose(self, num_requests: int, length_class: int = 0) -> int:
        """The mode of the next iteration, of `num_requests` running requests; length_class: which of the graphs' bounds holds its rows."""
        ...

    def observe(self, observation: StepObservation) -> None:
        """Learn from an iteration."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the policy has to say, for stats.json."""
        ...


class FixedPolicy:
    """Always the same mode."""

    def __init__(self, mode: int = 0) -> None:
        self.mode = mode

    def choose(self, num_requests: int, length_class: int = 0) -> int:
        """That mode."""
        return self.mode

    def observe(self, observation: StepObservation) -> None:
        """Nothing is learnt."""

    def describe(self) -> dict[str, Any]:
        """Says what it is."""
        return {"policy": "fixed"}


class TablePolicy:
    """A mode for each range of batch sizes, as `eaglecli tune` finds them."""

    def __init__(self, modes: Sequence[tuple[int, int]]) -> None:
        """`modes`: (batch size, mode), ascending: the mode holds for batches up to that size, the last one above it too."""
        if not modes or [size for size, _ in modes] != sorted({size for size, _ in modes}):
            raise ValueError("a table of modes names ascending batch sizes")
        self._modes = tuple(modes)

    def choose(self, num_requests: int, length_class: int = 0) -> int:
        """The mode of the first range that holds the batch."""
        return next((mode for size, mode in self._modes if num_requests <= size), self._modes[-1][1])

    def observe(self, observation: StepObservation) -> None:
        """Nothing is learnt."""

    def describe(self) -> dict[str, Any]:
        """The table, by number of mode."""
        return {"policy": "table", "modes_by_batch_size": {str(size): mode for size, mode in self._modes}}


class ScriptedPolicy:
    """Asks a function, and hands it all observations: for measuring and for tests."""

    def __init__(self, choose: Callable[[int], int], observe: Callable[[StepObservation], None] = lambda observation: None) -> None:
        self._choose, self._observe = choose, observe

    def choose(self, num_requests: int, length_class: int = 0) -> int:
        """What the function says."""
        return self._choose(num_requests)

    def observe(self, observation: StepObservation) -> None:
        """Hands it on."""
        self._observe(observation)

    def describe(self) -> dict[str, Any]:
        """Says what it is."""
        return {"policy": "scripted"}
