"""One difference between what was and what should have been, and what it is called.

    tie       the candidates are equal in the run's dtype: either may win
    numeric   they are nearer than numbers move with the shape of a batch: the larger of 1e-3 and twice (two candidates) the largest
              movement of a score that is measured right there between one row and many
    bug       neither

With deterministic inference numbers do not move, so nothing but a tie excuses a difference.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["tie", "numeric", "bug"]
Check = Literal["text", "choice", "acceptance", "balance", "counts"]

LEAST_LIMIT = 1e-3


@dataclass(frozen=True)
class Difference:
    """`place` counts output tokens (verify steps for acceptance) from 0; `gap` between the candidates, `limit` what it must be below."""

    check: Check
    kind: Kind
    key: Hashable
    place: int
    sentence: str  # for people: what was found, what was expected
    gap: float | None = None
    limit: float | None = None


def judge(gap: float, limit: float) -> Kind:
    """What a difference of candidates `gap` apart is called."""
    if gap == 0.0:
        return "tie"
    return "numeric" if gap < limit else "bug"  # NaN is below nothing
