"""How long will an output be? Learnt from those that ended and from those that have not ended yet. No tensors.

Lengths are seen through caps: an output cut at its cap, or still growing, says only that it is longer than that. So what is
estimated is the chance to end within a range of lengths for outputs that reach it: a life table, in which a cut output counts
for the part of the range that it was seen in (Cutler and Ederer 1958). From the chances follow the share of outputs that reach a
length and the mean length that is left under any cap. Before anything was seen no output ends by itself; later, past the lengths
seen, half of those that are left end with each doubling of the length.
"""

from bisect import bisect_left

import numpy as np

_PRIOR_OUTPUTS = 2  # imaginary ones in every range: the first few real ones are not believed outright
_FEW_OUTPUTS = 16  # when many more than these were seen, each doubling of the length ends half of the imaginary ones; before, none end
_SMALLEST_LOG_SHARE = -20.0
_RANGES_PER_OCTAVE = 3


def _edges(longest: int) -> np.ndarray:
    """int64 [n + 1]: ranges four tokens wide at first, then in proportion to the length; the last one is past `longest`."""
    powers = np.arange(0, 1 + _RANGES_PER_OCTAVE * (max(longest, 8) - 1).bit_length())
    wide = np.ceil(2 ** (3 + powers / _RANGES_PER_OCTAVE)).astype(np.int64)
    return np.unique(np.concatenate([[0, 4], wide]))


class OutputLengths:
    """A life table of outputs. `observe` costs a microsecond; the table is made anew when enough has been seen since."""

    def __init__(self, longest: int) -> None:
        """`longest`: no output has more tokens."""
        self._edges = _edges(longest)
        self._edge_list: list[int] = self._edges.tolist()
        num_ranges = len(self._edges) - 1
        # by the range of the last token, of outputs that were cut (row 0) and of those that ended by themselves (row 1)
        self._num_outputs = [[0] * num_ranges, [0] * num_ranges]
        self._num_tokens = [[0] * num_ranges, [0] * num_ranges]  # in that range alone
        self.num_observed = 0
        self.num_in_table = 0
        self._make_table(np.zeros(0, np.int64))

    def observe(self, num_tokens: int, ended_by_itself: bool) -> None:
        """One output is finished."""
        place = bisect_left(self._edge_list, num_tokens, 1, len(self._edge_list) - 1) - 1  # ranges hold their upper edge
        self._num_outputs[ended_by_itself][place] += 1
        self._num_tokens[ended_by_itself][place] += num_tokens - self._edge_list[place]
        self.num_observed += 1

    def refresh(self, running: np.ndarray) -> bool:
        """Make the table anew if a quarter more outputs were seen than are in it. running int64 [n]: lengths of those that go on."""
        is_due = self.num_observed > self.num_in_table + self.num_in_table // 4
        if is_due:
            self._make_table(running)
        return is_due

    def expected(self, cap: int) -> float:
        """Mean number of tokens of a whole output of at most `cap`."""
        found = self._expected.get(cap)
        if found is None:
            found = self._expected[cap] = float(self.remaining(np.zeros(1, np.int64), np.array([cap]))[0])
        return found

    def remaining(self, num_done: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """float64 [n]: mean number of tokens still to come of outputs that have num_done int [n] tokens and go on, to `caps` at most."""
        left = np.interp(caps, self._edges, self._mean_below) - np.interp(num_done, self._edges, self._mean_below)
        reached = np.exp(np.interp(num_done, self._edges, self._log_share))
        return np.clip(left / reached, 1.0, np.maximum(caps - num_done, 1))

    def token_steps(self, num_done: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """float64 [n]: mean over outputs, as in `remaining`, of the tokens still to come summed over the steps that they are kept for."""
        below_cap, below_done = (np.interp(lengths, self._edges, self._mean_moment_below) for lengths in (caps, num_done))
        reached = np.exp(np.interp(num_done, self._edges, self._log_share))
        return np.maximum((below_cap - below_done) / reached - num_done * self.remaining(num_done, caps), 0.0)

    def _make_table(self, running: np.ndarray) -> None:
        lower, upper = self._edges[:-1], self._edges[1:]
        width = upper - lower
        place = np.clip(np.searchsorted(self._edges, running) - 1, 0, len(width) - 1)
        (num_cut, num_ends), (tokens_of_cut, tokens_of_ends) = np.array(self._num_outputs), np.array(self._num_tokens)
        num_cut = num_cut + np.bincount(place, minlength=len(width))
        tokens_of_cut = tokens_of_cut + np.bincount(place, running - lower[place], len(width))
        num_passed = (num_cut + num_ends)[::-1].cumsum()[::-1] - num_cut - num_ends
        num_seen = num_passed + num_ends + tokens_of_cut / width + _PRIOR_OUTPUTS
        prior_ends = _PRIOR_OUTPUTS * (1 - np.maximum(lower, width) / upper) * self.num_observed / (self.num_observed + _FEW_OUTPUTS)
        chance = (num_ends + prior_ends) / num_seen
        log_share = np.cumsum(np.log1p(-np.minimum(chance, 0.99)))
        self._log_share = np.maximum(np.concatenate([[0.0], log_share]), _SMALLEST_LOG_SHARE)
        mean_of_ends = (tokens_of_ends + prior_ends * width / 2) / np.maximum(num_ends + prior_ends, 1e-9)
        mean_within = width * (1 - chance) + chance * mean_of_ends
        mean_in_range = np.exp(self._log_share[:-1]) * mean_within
        self._mean_below = np.concatenate([[0.0], np.cumsum(mean_in_range)])
        self._mean_moment_below = np.concatenate([[0.0], np.cumsum(mean_in_range * (lower + width / 2))])
        self._expected: dict[int, float] = {}  # by cap, of this table
        self.num_in_table = self.num_observed
