"""Seconds of an iteration by mode and batch size: measured at the start, corrected by every iteration that runs.

The start measures rows of one length. What really runs takes longer or less: keys of real lengths are read, the host has its share.
Most of that is the same whatever the mode, so what the first iterations at a batch size show is carried over to all modes there; what
differs when another mode runs belongs to that mode. Corrections are kept apart for batches with long rows: one long row costs a tree
more than a chain. Pure arithmetic, no tensors.
"""

from bisect import bisect_left
from collections.abc import Mapping

NEVER = 1 << 30
Bucket = tuple[int, int]  # batch size, length class

_FIRST_COMMON_GAIN, _COMMON_GAIN = 0.2, 0.02  # part of an error that goes to all modes: in the first iterations, and later
_OWN_GAIN = 0.03  # part that goes to the mode; in its own first iterations all of it: their mean
_FIRST_ITERATIONS = 16
_KNOWN_AFTER = 8  # iterations of a mode after those first ones of all modes: before, its cost is little more than what the start measured
_FLOOR = 0.5  # of what was measured
_OUTLIER = 1.25  # so many times longer or shorter than estimated and measured is the most that an iteration counts as
_CATCH_UP_GAIN = 0.3
_MOST_CATCH_UP = 10  # times an iteration: more is a pause of the host


class IterationCosts:
    """Estimates for every mode and batch size."""

    def __init__(self, measured_s: Mapping[tuple[int, int], float]) -> None:
        """`measured_s`: seconds by (mode, batch size). Costs are straight lines between sizes; past the last one the line goes on."""
        if not measured_s or min(measured_s.values()) <= 0:
            raise ValueError("the costs of iterations are positive numbers of seconds")
        self._points: dict[int, list[tuple[int, float]]] = {}
        for (mode, size), seconds in sorted(measured_s.items()):
            self._points.setdefault(mode, []).append((size, seconds))
        self._sizes = sorted({size for _, size in measured_s})
        self._common_s: dict[Bucket, float] = {}
        self._own_s: dict[tuple[int, Bucket], float] = {}
        self._num_seen: dict[tuple[int, Bucket], int] = {}
        self._num_own: dict[tuple[int, Bucket], int] = {}  # the same, after the first iterations of all modes
        self._num_in_bucket: dict[Bucket, int] = {}
        self._last_seen: dict[tuple[int, Bucket], int] = {}
        self._num_iterations = 0
        self.catch_up_s = 0.0  # of an iteration before which the draft catches up: what it takes longer

    def seconds(self, mode: int, num_requests: int, length_class: int = 0) -> float:
        """The estimate, never below half of what was measured at the start."""
        measured, bucket = self._measured(mode, num_requests), self.bucket(num_requests, length_class)
        corrected = measured + self._common_s.get(bucket, 0.0) + self._own_s.get((mode, bucket), 0.0)
        return max(corrected, _FLOOR * measured)

    def floor_seconds(self, mode: int, num_requests: int) -> float:
        """No correction goes below half of what was measured at the start."""
        return _FLOOR * self._measured(mode, num_requests)

    def least_seconds(self, mode: int, num_requests: int, length_class: int = 0) -> float:
        """What it may be at best: of a mode that has not run there, what was measured, for other modes' errors may not be its own."""
        estimate = self.seconds(mode, num_requests, length_class)
        has_run = (mode, self.bucket(num_requests, length_class)) in self._num_seen
        return estimate if has_run else min(estimate, self._measured(mode, num_requests))

    def is_known(self, mode: int, num_requests: int, length_class: int = 0) -> bool:
        """Whether the mode has run there often enough to correct what the start measured of it."""
        return self._num_own.get((mode, self.bucket(num_requests, length_class)), 0) >= _KNOWN_AFTER

    def bucket(self, num_requests: int, length_class: int = 0) -> Bucket:
        """The measured size that stands for a batch size, and the class: batches that share both share what is learnt of them."""
        return self._sizes[min(bisect_left(self._sizes, num_requests), len(self._sizes) - 1)], length_class

    def observe(self, mode: int, num_requests: int, seconds: float, caught_up: bool, length_class: int = 0) -> None:
        """An iteration took so long."""
        expected, bucket = self.seconds(mode, num_requests, length_class), self.bucket(num_requests, length_class)
        self._num_iterations += 1
        if caught_up:
            longer = min(max(seconds - expected, 0.0), _MOST_CATCH_UP * expected)
            self.catch_up_s += _CATCH_UP_GAIN * (longer - self.catch_up_s)
            return
        measured = self._measured(mode, num_requests)
        least, most = min(expected, measured) / _OUTLIER, max(expected, measured) * _OUTLIER
        error = min(max(seconds, least), most) - expected
        num_seen = self._num_seen.get((mode, bucket), 0)
        is_first = self._num_in_bucket.get(bucket, 0) < _FIRST_ITERATIONS
        common_gain = _FIRST_COMMON_GAIN if is_first else _COMMON_GAIN
        own_gain = _OWN_GAIN if is_first else max(_OWN_GAIN, 1 / (num_seen + 1) - _COMMON_GAIN)
        self._common_s[bucket] = self._common_s.get(bucket, 0.0) + common_gain * error
        self._own_s[mode, bucket] = self._own_s.get((mode, bucket), 0.0) + own_gain * error
        self._num_seen[mode, bucket] = num_seen + 1
        self._num_own[mode, bucket] = self._num_own.get((mode, bucket), 0) + (not is_first)
        self._num_in_bucket[bucket] = self._num_in_bucket.get(bucket, 0) + 1
        self._last_seen[mode, bucket] = self._num_iterations

    def age(self, mode: int, num_requests: int, length_class: int = 0) -> int:
        """Iterations observed since the last one of the mode for such batches; NEVER if there was none."""
        last_seen = self._last_seen.get((mode, self.bucket(num_requests, length_class)))
        return NEVER if last_seen is None else self._num_iterations - last_seen

    def _measured(self, mode: int, num_requests: int) -> float:
        points = self._points[mode]
        right = min(max(bisect_left(points, (num_requests, 0.0)), 1), len(points) - 1)
        if len(points) == 1 or num_requests <= points[0][0]:
            return points[0][1]
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        return max(low_s + (high_s - low_s) * (num_requests - low) / (high - low), low_s / 2)
