"""Statistics of repeated measurements: the one in the middle, spread, and intervals.

Of a few repeats: Student's t on a log scale with Welch's degrees of freedom. Of many
records: Efron's bootstrap, percentiles of 2,000 draws.
"""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
_NUM_DRAWS = 2000
_NUM_T_DRAWS = 1 << 15  # of Student's t, whose quantiles neither numpy nor torch knows: 2 % off at one degree of freedom, less at more
_MEDIAN_ERROR = np.sqrt(np.pi / 2)  # standard error of a median in those of the mean
_MAX_CELLS = 1 << 24  # of the table of draws: long runs are resampled in blocks of records

Interval = tuple[float, float]


def middle_place(values: Sequence[float]) -> int:
    """Where the middle value stands; the lower one of two: what is said of a measurement is said of one that was made."""
    return int(np.argsort(np.asarray(values, np.float64), kind="stable")[(len(values) - 1) // 2])


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / the middle one; None of a single value."""
    return float((max(values) - min(values)) / values[middle_place(values)]) if len(values) > 1 else None


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Interval of middle(above) / middle(below) of independent repeats; None with a single repeat on either side."""
    if min(len(above), len(below)) < 2:
        return None
    logs = [np.log(np.asarray(values, np.float64)) for values in (above, below)]
    center = float(logs[0][middle_place(above)] - logs[1][middle_place(below)])
    variances = np.array([values.var(ddof=1) / len(values) for values in logs])
    total = variances.sum()
    half = 0.0
    if total > 0:
        freedom = total**2 / (variances**2 / (np.array([len(above), len(below)]) - 1)).sum()
        draws = np.abs(np.random.default_rng(0).standard_t(freedom, _NUM_T_DRAWS))
        half = float(np.quantile(draws, CONFIDENCE) * _MEDIAN_ERROR * np.sqrt(total))
    return float(np.exp(center - half)), float(np.exp(center + half))


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
