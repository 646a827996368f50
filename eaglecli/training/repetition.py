"""Repetition loops: where an answer begins to say the same thing over and over.

A loop is a stretch in which every token equals the one `period` places before it, long enough not to be chance: at least
`_MIN_REPEATS` further rounds and `_MIN_LOOP_TOKENS` tokens. Such text is easy to draft and teaches nothing, and it would
fill the draft vocabulary's counts.
"""

import numpy as np

_MAX_PERIOD = 64
_MIN_REPEATS = 3
_MIN_LOOP_TOKENS = 32


def find_loop(token_ids: np.ndarray) -> int | None:
    """Index at which the first loop begins to repeat itself (its first round lies before it), or None. token_ids int [n]."""
    count = len(token_ids)
    if count <= _MIN_LOOP_TOKENS:
        return None
    padded = np.concatenate([np.full(_MAX_PERIOD, -1, token_ids.dtype), token_ids])
    periods = np.arange(1, _MAX_PERIOD + 1)[:, None]
    shifted = np.lib.stride_tricks.sliding_window_view(padded, count)[_MAX_PERIOD - periods[:, 0]]
    place = np.arange(count)
    last_difference = np.maximum.accumulate(np.where(shifted != token_ids, place, -1), axis=1)
    is_loop = place - last_difference >= np.maximum(_MIN_LOOP_TOKENS, _MIN_REPEATS * periods)
    if not is_loop.any():
        return None
    period, end = np.nonzero(is_loop)
    return int((last_difference[period, end] + 1).min())
