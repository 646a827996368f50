"""From what the engine looks forward to, and what it was not given yet, to what the time left is estimated from."""

from eaglecli.engine.outlook import Outlook
from eaglecli.io.eta import Workload


def workload_of(outlook: Outlook, num_unread: int | None) -> Workload:
    """`num_unread`: requests that the engine knows nothing of, each taken for a mean one of those it knows; None: nobody knows how many."""
    forecast, remaining, num_prompt_tokens, num_row_steps = outlook.forecast, None, 0.0, 0.0
    if num_unread is not None and outlook.num_requests:
        share = num_unread / outlook.num_requests
        remaining = forecast.num_tokens + share * (outlook.num_output_tokens + forecast.num_tokens)
        num_prompt_tokens = forecast.num_prompt_tokens + share * (outlook.num_prefill_tokens + forecast.num_prompt_tokens)
        num_row_steps = max(forecast.num_row_steps * remaining / max(forecast.num_tokens, 1.0), forecast.longest)
    return Workload(
        num_iterations=outlook.num_iterations,
        num_row_steps=outlook.num_row_steps,
        num_prefill_tokens=outlook.num_prefill_tokens,
        num_output_tokens=outlook.num_output_tokens,
        num_remaining_tokens=remaining,
        num_remaining_prompt_tokens=num_prompt_tokens,
        num_remaining_row_steps=num_row_steps,
    )
