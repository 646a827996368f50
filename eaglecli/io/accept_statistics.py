"""Accept-length statistics: the counts of one answer, their sums over a run, and every ratio made of them, each defined once.

V verify steps, A accepted drafts (before any cut), T turns, C delivered tokens: C = T + A + V - cut for every answer.
The headline accept length is (sum A + sum V) / sum V; the other formulas in use are given beside it under their own names.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LOW_ACCEPT_LENGTH = 1.1

DEFINITIONS = {
    "V": "verify steps (spec_verify_ct)",
    "A": "accepted draft tokens before any cut (spec_num_correct_drafts)",
    "C": "delivered tokens, the first token and the end token included",
    "T": "turns of a conversation that were generated (1 here)",
    "cut": "tokens of the last step that were not delivered, accepted drafts and bonus alike (spec_num_cut_tokens)",
    "identity": "C = T + A + V - cut for every record",
    "accept_length": "(sum A + sum V) / sum V; vLLM mean acceptance length, SGLang log accept len",
    "spec_accept_length": "C / V of one record; SGLang meta_info.spec_accept_length",
    "accept_length_macro": "mean over records of C / V; specforge benchmark",
    "accept_length_delivered": "sum C / sum V; SpecForge bench_eagle3",
    "accept_length_trt": "C / (V + 1) of one record, mean over records in the run; TensorRT-LLM AL",
    "engine.speculation.modes.*.accept_length": "accept_length over the steps of that mode",
    "accept_length_to_eos": "accept_length over the steps up to the one that delivers the first end token",
    "spec_num_proposed_drafts": "nodes of the verified trees, the root not counted",
    "spec_accept_rate": "sum A / sum of proposed nodes (spec_num_proposed_drafts)",
    "depth_accept_rate": "sum A / (sum V * num_steps)",
    "accept_rate_per_position": "share of steps that accepted at least i drafts, i = 1 .. num_steps",
    "spec_correct_drafts_histogram": "steps by number of accepted drafts, 0 .. num_steps",
    "spec_verify_ct_to_eos": "V up to the step that delivers the first end token",
    "spec_num_correct_drafts_to_eos": "A up to the step that delivers the first end token",
}


@dataclass(eq=False)  # not frozen, like `Answer`
class AnswerCounts:
    """Counts of one answer. `accept_counts` int [V]: drafts accepted by each step."""

    num_completion_tokens: int
    num_verify_steps: int
    num_accepted_drafts: int
    num_proposed_drafts: int
    num_cut_tokens: int
    accept_counts: Sequence[int] | np.ndarray
    first_end_position: int | None = None  # place of the first end token in the answer, from 0
    num_turns: int = 1


def describe_answer(counts: AnswerCounts, num_steps: int) -> dict[str, Any]:
    """The `spec` object of one generation line."""
    accepted, steps = counts.num_accepted_drafts, counts.num_verify_steps
    histogram = _histogram(counts.accept_counts, num_steps)
    steps_to_end, accepted_to_end = _until_end(counts)
    return {
        "spec_verify_ct": steps,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": counts.num_proposed_drafts,
        "spec_num_cut_tokens": counts.num_cut_tokens,
        "accept_length": _ratio(accepted + steps, steps),
        "spec_accept_length": _ratio(counts.num_completion_tokens, steps),
        "accept_length_trt": _ratio(counts.num_completion_tokens, steps + 1),
        "spec_accept_rate": _ratio(accepted, counts.num_proposed_drafts),
        "depth_accept_rate": _ratio(accepted, steps * num_steps),
        "accept_rate_per_position": _rates_per_position(histogram),
        "spec_correct_drafts_histogram": histogram,
        "spec_verify_ct_to_eos": steps_to_end,
        "spec_num_correct_drafts_to_eos": accepted_to_end,
    }


@dataclass
class AcceptTotals:
    """Sums over the answers of a run; memory does not grow with their number."""

    num_steps: int
    num_records: int = 0
    num_completion_tokens: int = 0
    num_verify_steps: int = 0
    num_accepted_drafts: int = 0
    num_proposed_drafts: int = 0
    num_cut_tokens: int = 0
    num_identity_violations: int = 0
    accepted_to_end: int = 0
    steps_to_end: int = 0
    num_records_with_steps: int = 0
    sum_delivered_per_step: float = 0.0
    sum_delivered_per_step_trt: float = 0.0
    histogram: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.num_steps + 1)

    def add(self, counts: AnswerCounts) -> None:
        """Adds one answer."""
        to_end = _until_end(counts)
        self._add(
            histogram=_histogram(counts.accept_counts, self.num_steps),
            steps=counts.num_verify_steps,
            accepted=counts.num_accepted_drafts,
            proposed=counts.num_proposed_drafts,
            cut=counts.num_cut_tokens,
            to_end=to_end,
            num_completion_tokens=counts.num_completion_tokens,
            num_turns=counts.num_turns,
        )

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Adds one answer by its line in generations.jsonl: a run that is taken up again has nothing else of it."""
        spec = line["spec"]
        self._add(
            histogram=spec["spec_correct_drafts_histogram"],
            steps=spec["spec_verify_ct"],
            accepted=spec["spec_num_correct_drafts"],
            proposed=spec["spec_num_proposed_drafts"],
            cut=spec["spec_num_cut_tokens"],
            to_end=(spec["spec_verify_ct_to_eos"], spec["spec_num_correct_drafts_to_eos"]),
            num_completion_tokens=line["usage"]["completion_tokens"],
            num_turns=len(line.get("turns") or (1,)),
        )

    def _add(
        self,
        histogram: Sequence[int],
        steps: int,
        accepted: int,
        proposed: int,
        cut: int,
        to_end: tuple[int, int],
        num_completion_tokens: int,
        num_turns: int,
    ) -> None:
        adds_up = sum(histogram) == steps and sum(map(operator.mul, histogram, range(len(histogram)))) == accepted
        self.num_records += 1
        self.num_completion_tokens += num_completion_tokens
        self.num_verify_steps += steps
        self.num_accepted_drafts += accepted
        self.num_proposed_drafts += proposed
        self.num_cut_tokens += cut
        self.num_identity_violations += not (adds_up and num_completion_tokens == num_turns + accepted + steps - cut)
        self.steps_to_end += to_end[0]
        self.accepted_to_end += to_end[1]
        self.sum_delivered_per_step_trt += num_completion_tokens / (steps + 1)
        if steps:
            self.num_records_with_steps += 1
            self.sum_delivered_per_step += num_completion_tokens / steps
        for number, count in enumerate(histogram):
            self.histogram[number] += count

    @property
    def accept_length(self) -> float | None:
        """The headline, or None before the first verify step."""
        return _ratio(self.num_accepted_drafts + self.num_verify_steps, self.num_verify_steps)

    def describe(self) -> dict[str, Any]:
        """The `accept` object of stats.json."""
        return {
            "accept_length": self.accept_length,
            "accept_length_macro": _ratio(self.sum_delivered_per_step, self.num_records_with_steps),
            "accept_length_delivered": _ratio(self.num_completion_tokens, self.num_verify_steps),
            "accept_length_trt": _ratio(self.sum_delivered_per_step_trt, self.num_records),
            "accept_length_to_eos": _ratio(self.accepted_to_end + self.steps_to_end, self.steps_to_end),
            "spec_accept_rate": _ratio(self.num_accepted_drafts, self.num_proposed_drafts),
            "depth_accept_rate": _ratio(self.num_accepted_drafts, self.num_verify_steps * self.num_steps),
            "accept_rate_per_position": _rates_per_position(self.histogram),
            "spec_correct_drafts_histogram": list(self.histogram),
            "spec_verify_ct": self.num_verify_steps,
            "spec_num_correct_drafts": self.num_accepted_drafts,
            "spec_num_proposed_drafts": self.num_proposed_drafts,
            "spec_num_cut_tokens": self.num_cut_tokens,
            "identity": {"holds": self.num_identity_violations == 0, "num_violations": self.num_identity_violations},
        }


def _histogram(accept_counts: Sequence[int] | np.ndarray, num_steps: int) -> list[int]:
    return np.bincount(np.asarray(accept_counts, dtype=np.int64), minlength=num_steps + 1).tolist()


def _rates_per_position(histogram: Sequence[int]) -> list[float]:
    """Share of steps that accepted at least i drafts: never rises with i. Empty before the first step."""
    at_least = list(itertools.accumulate(reversed(histogram)))
    total = at_least.pop()
    return [count / total for count in reversed(at_least)] if total else []


def _until_end(counts: AnswerCounts) -> tuple[int, int]:
    """(steps, accepted drafts) up to the step that delivers the first end token; the first token comes from the prefill."""
    end = counts.first_end_position
    if end is None:
        return counts.num_verify_steps, counts.num_accepted_drafts
    if end == 0 or not len(counts.accept_counts):
        return 0, 0
    delivered = (np.asarray(counts.accept_counts, dtype=np.int64) + 1).cumsum()  # behind the first token, by the end of each step
    num_steps = min(int(delivered.searchsorted(end)) + 1, len(delivered))
    return num_steps, int(delivered[num_steps - 1]) - num_steps


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
