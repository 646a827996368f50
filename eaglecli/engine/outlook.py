"""What is done and what is to be expected of all requests that the engine was given: a snapshot, made now and then."""

from dataclasses import dataclass

import numpy as np

OUTLOOK_INTERVAL_S = 2.0  # looking over thousands of waiting requests takes a few milliseconds


@dataclass(frozen=True)
class Forecast:
    """Estimates, see `output_lengths`. A row step is one token more for one row; all rows do theirs side by side."""

    num_tokens: float = 0.0  # output still to come
    num_prompt_tokens: int = 0  # still to be prefilled
    num_row_steps: float = 0.0  # that it takes if rows, or memory, are as full as they can be
    longest: float = 0.0  # row steps of the longest request: it cannot be shared out


@dataclass(frozen=True)
class Outlook:
    """Counts at one moment. Only `forecast` is an estimate."""

    num_requests: int = 0  # given to the engine, finished ones included
    num_iterations: int = 0
    num_row_steps: int = 0  # summed over rows
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    forecast: Forecast = Forecast()
    made_s: float = 0.0  # time.perf_counter


def make_forecast(
    remaining: np.ndarray, known: np.ndarray, token_steps: np.ndarray, capacity: np.ndarray, num_rows: int, num_prompt_tokens: int
) -> Forecast:
    """Two lower bounds of a makespan: by rows, and by memory when that is what keeps waiting sequences out.

    Of n sequences, the first m have rows: remaining float64 [n] output still to come, known int64 [n] tokens that each has, token_steps
    float64 [n] tokens still to come summed over the steps that they are kept for, capacity int64 [m] tokens that their pages hold.
    Memory is taken for all that is known, and for as much more as by those with rows.
    """
    num_tokens, longest, num_held = float(remaining.sum()), float(remaining.max(initial=0.0)), len(capacity)
    num_row_steps = num_tokens / num_rows
    if 0 < num_held < min(num_rows, len(remaining)):
        spare = (capacity - known[:num_held]).mean()
        num_row_steps = max(num_row_steps, float((known + spare) @ remaining + token_steps.sum()) / float(capacity.sum()))
    return Forecast(num_tokens, num_prompt_tokens, num_row_steps, longest)
