"""Accept length by parts of a run: data set, how an answer ended, early and late in the answer, length of the context, requests at a time.

Row B16 of the known failures: past the length that a draft was trained for, acceptance fades; the pooled figure hides it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EARLY_TOKENS = 64
_LIMIT_SHARES = (0.5, 1.0, 2.0)  # bucket edges in lengths that the draft was made for


@dataclass(frozen=True, eq=False)
class AnsweredRecord:
    """What the splits need of one answer."""

    tag: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    accept_counts: np.ndarray  # int [V]
    decode_s: float  # from the first token to the last

    @property
    def context(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens


def context_edges(draft_limit: int, longest: int) -> tuple[int, ...]:
    """Ascending upper ends of the buckets that records up to `longest` fall into; the last bucket is open."""
    edges = [max(1, int(share * draft_limit)) for share in _LIMIT_SHARES]
    return tuple(edge for number, edge in enumerate(edges) if number == 0 or edges[number - 1] < longest)


def split_accept_lengths(records: Sequence[AnsweredRecord]) -> dict[str, Any]:
    """`accept_length` by data set, finish reason, and place in the answer."""
    by_tag = {tag: [record for record in records if record.tag == tag] for tag in _names(record.tag for record in records)}
    reasons = _names(record.finish_reason for record in records)
    by_reason = {reason: [record for record in records if record.finish_reason == reason] for reason in reasons}
    return {
        "dataset": {tag: _accept_length(part) for tag, part in by_tag.items()},
        "finish_reason": {reason: _accept_length(part) for reason, part in by_reason.items()},
        "answer_position": _by_position(records),
    }


def split_by_batch_size(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """`accept_length` by requests that ran in the step, sizes up to each power of two together ("5-8").

    Both: `accepted_by_requests` of an engine's summary, whose difference counts.
    """
    steps, accepted = Counter[int](), Counter[int]()
    for size, counts in after.items():
        bucket = (int(size) - 1).bit_length()
        earlier = before.get(size, {})
        steps[bucket] += counts["row_steps"] - earlier.get("row_steps", 0)
        accepted[bucket] += counts["accepted_drafts"] - earlier.get("accepted_drafts", 0)
    names = {bucket: f"{(1 << bucket) // 2 + 1}-{1 << bucket}" if bucket > 1 else str(1 << bucket) for bucket in sorted(steps)}
    return {names[bucket]: 1 + accepted[bucket] / steps[bucket] for bucket in sorted(steps) if steps[bucket]}


def split_by_context(records: Sequence[AnsweredRecord], edges: Sequence[int]) -> list[dict[str, Any]]:
    """One entry a bucket of context length, empty ones left out: records, accept length, tokens per second of one request."""
    found = []
    for low, high in zip((0, *edges), (*edges, None), strict=True):
        part = [record for record in records if record.context > low and (high is None or record.context <= high)]
        if part:
            decode_s = sum(record.decode_s for record in part)
            tokens = sum(record.num_output_tokens - 1 for record in part)
            found.append(
                {
                    "context_above": low,
                    "context_up_to": high,
                    "records": len(part),
                    "accept_length": _accept_length(part),
                    "output_throughput_per_user": tokens / decode_s if decode_s > 0 else None,
                }
            )
    return found


def compare_buckets(buckets: list[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
    """Put the `speedup` over the same bucket of a plain run into every bucket that has one."""
    rates = {bucket["context_above"]: bucket["output_throughput_per_user"] for bucket in plain}
    for bucket in buckets:
        ours, theirs = bucket["output_throughput_per_user"], rates.get(bucket["context_above"])
        bucket["speedup"] = ours / theirs if ours and theirs else None


def _names(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _accept_length(records: Sequence[AnsweredRecord]) -> float | None:
    steps = sum(len(record.accept_counts) for record in records)
    return 1 + sum(int(record.accept_counts.sum()) for record in records) / steps if steps else None


def _by_position(records: Sequence[AnsweredRecord]) -> dict[str, float | None]:
    """A step belongs to where its first token stands in the answer."""
    accepted, steps = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for record in records:
        emitted = record.accept_counts.astype(np.int64) + 1
        is_late = (1 + np.cumsum(emitted) - emitted >= EARLY_TOKENS).astype(np.int64)
        steps += np.bincount(is_late, minlength=2)
        accepted += np.bincount(is_late, weights=record.accept_counts, minlength=2).astype(np.int64)
    names = (f"first_{EARLY_TOKENS}", "rest")
    return {name: float(1 + accepted[i] / steps[i]) if steps[i] else None for i, name in enumerate(names)}
