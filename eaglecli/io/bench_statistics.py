"""Statistics of repeated measurements: median, spread, and intervals by resampling (Efron's bootstrap, percentiles of 2,000 draws).

A few repeats resampled are too sure of themselves: their deviations are stretched by sqrt(n / (n - 1)).
"""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
_NUM_DRAWS = 2000
_MAX_CELLS = 1 << 24  # of the table of draws: long runs are resampled in blocks of records

Interval = tuple[float, float]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    return float(np.median(np.asarray(values, np.float64)))


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None of a single value."""
    return float((max(values) - min(values)) / median(values)) if len(values) > 1 else None


def ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval | None:
    """Interval of mean(above) / mean(below) of independent repeats, resampled on a log scale; None with a single repeat on either side."""
    if min(len(above), len(below)) < 2:
        return None
    random = np.random.default_rng(seed)
    draws = _log_means(above, random) - _log_means(below, random)
    low, high = np.exp(np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)))
    return float(low), float(high)


def _log_means(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    logs = np.log(np.asarray(values, np.float64))
    count = len(logs)
    draws = logs[random.integers(0, count, (_NUM_DRAWS, count))].mean(1)
    return logs.mean() + (draws - logs.mean()) * np.sqrt(count / (count - 1))


def pooled_ratio_interval(above: np.ndarray, below: np.ndarray, seed: int = 0) -> Interval | None:
    """Interval of sum(above) / sum(below) over records [n] drawn with replacement; None with fewer than two records or nothing below."""
    if len(below) < 2 or not below.sum():
        return None
    num_blocks = min(len(below), _MAX_CELLS // _NUM_DRAWS)
    sums = np.stack([[part.sum() for part in np.array_split(values, num_blocks)] for values in (above, below)]).astype(np.float64)
    counts = np.random.default_rng(seed).multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), _NUM_DRAWS)
    drawn_above, drawn_below = (counts @ sums.T).T
    ratios = drawn_above[drawn_below > 0] / drawn_below[drawn_below > 0]
    low, high = np.quantile(ratios, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Mean, p50, p90 and p99; None of nothing."""
    names, ranks = ("p50", "p90", "p99"), (50, 90, 99)
    if not len(values):
        return dict.fromkeys(("mean", *names))
    array = np.asarray(values, np.float64)
    return {"mean": float(array.mean()), **dict(zip(names, map(float, np.percentile(array, ranks)), strict=True))}
