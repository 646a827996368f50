"""When will it be done? By tokens, not by records: with the long ones first, half of the records are not half of the work.

An iteration takes a time of its own and some more for every token, how much of which depends on model and machine. Both are
fitted to the run so far; then what is left is so many iterations, by how far each row can still go side by side, and so many tokens.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

_WINDOW_SHARE = 0.5  # of the time so far: the start, when prompts come all at once, is forgotten
_MOST_SAMPLES = 200
_LIKELY_SHARE = 0.8  # of the time that iterations take whatever their number of tokens, as long as the run has not shown another one
_PROMPT_TOKEN_WEIGHT = 0.5  # of an output token, which takes the forwards of draft and tree: a rough guess, good enough for a share
_TRUST = 0.02  # in that, against what the samples say


@dataclass(frozen=True)
class Workload:
    """Where a run stands at one moment."""

    num_iterations: int = 0
    num_row_steps: int = 0  # summed over rows
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0  # delivered so far, by unfinished requests as well
    num_remaining_tokens: float | None = None  # of output; None: nobody knows
    num_remaining_prompt_tokens: float = 0.0
    num_remaining_row_steps: float = 0.0  # tokens that a row has to go on by, with all rows side by side


class EtaEstimator:
    """Seconds left, by the pace so far."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self._samples: deque[tuple[float, ...]] = deque([(now_s, 0, 0, 0, 0)])  # time, iterations, row steps, output, work

    def seconds_left(self, work: Workload, now_s: float) -> float | None:
        """None before anything is known. `now_s` never goes back."""
        self._take(work, now_s)
        samples = np.array(self._samples)
        seconds, iterations, row_steps, tokens, worked = np.diff(samples, axis=0).T
        if work.num_remaining_tokens is None or not tokens.sum() or not iterations.sum() or not row_steps.sum():
            return None
        per_iteration, per_token = _fit(seconds, iterations, worked)
        tokens_per_row_step = max(tokens.sum() / row_steps.sum(), 1.0)
        work_left = work.num_remaining_tokens + _PROMPT_TOKEN_WEIGHT * work.num_remaining_prompt_tokens
        return per_iteration * work.num_remaining_row_steps / tokens_per_row_step + per_token * work_left

    def _take(self, work: Workload, now_s: float) -> None:
        samples, window_s = self._samples, _WINDOW_SHARE * (now_s - self._started_s)
        if work.num_iterations > samples[-1][1] and now_s - samples[-1][0] >= window_s / _MOST_SAMPLES:
            worked = work.num_output_tokens + _PROMPT_TOKEN_WEIGHT * work.num_prefill_tokens
            samples.append((now_s, work.num_iterations, work.num_row_steps, work.num_output_tokens, worked))
        while len(samples) > 2 and samples[1][0] <= now_s - window_s:
            samples.popleft()


def _fit(seconds: np.ndarray, iterations: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Seconds of an iteration and of a token, which together make up all the time, by least squares over samples float64 [n].

    While both rise together they cannot be told apart: the likely share is one more equation.
    """
    total = seconds.sum()
    by_iterations, by_tokens = iterations * (total / iterations.sum()), tokens * (total / tokens.sum())
    difference, trust = by_iterations - by_tokens, _TRUST * float(seconds @ seconds)
    share = float(difference @ (seconds - by_tokens) + trust * _LIKELY_SHARE) / (float(difference @ difference) + trust)
    share = min(max(share, 0.0), 1.0)
    return share * total / iterations.sum(), (1 - share) * total / tokens.sum()


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
