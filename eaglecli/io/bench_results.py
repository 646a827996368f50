"""The files of a bench: one JSON line a configuration, one object of the whole, and the comparison of two such objects."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eaglecli.errors import UserError
from eaglecli.io.bench_statistics import Interval, ratio_interval
from eaglecli.io.run_directory import BENCH_FILES

RESULTS, BENCH, REPORT = BENCH_FILES
TOLERANCE = 0.02  # two runs of the same thing agree within this
SAMPLING_CONDITIONS = ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "random_seed")
_CONDITIONS = ("device", "dtype", "weights", "dataset", "target", "draft", "is_deterministic", "context_length", *SAMPLING_CONDITIONS)

Verdict = Literal["same", "faster", "slower"]


@dataclass(frozen=True)
class Difference:
    """One configuration in two files: `ratio` of output throughput, new over old."""

    label: str
    old: float
    new: float
    interval: Interval | None

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old

    @property
    def verdict(self) -> Verdict:
        """Not the same: more than 2 % apart, and the interval, where there is one, on that side of 1."""
        low, high = self.interval or (self.ratio, self.ratio)
        if self.ratio < 1 - TOLERANCE and high < 1:
            return "slower"
        return "faster" if self.ratio > 1 + TOLERANCE and low > 1 else "same"

    def describe(self) -> dict[str, Any]:
        """For the results."""
        return {
            "label": self.label,
            "old_output_throughput": self.old,
            "new_output_throughput": self.new,
            "ratio": self.ratio,
            "interval": self.interval,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, what one of them lacks, and conditions that are not the same."""

    differences: tuple[Difference, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    changed_conditions: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Nothing became slower."""
        return all(difference.verdict != "slower" for difference in self.differences)

    def describe(self) -> dict[str, Any]:
        """For the results."""
        return {
            "configurations": [difference.describe() for difference in self.differences],
            "only_old": list(self.only_old),
            "only_new": list(self.only_new),
            "changed_conditions": list(self.changed_conditions),
        }


def read_bench(path: Path) -> dict[str, Any]:
    """The object of an earlier run: its file, or the directory that holds it. Raises UserError."""
    file = path / BENCH if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--compare {path} cannot be read: {error.strerror or error}", f"name a {BENCH} of an earlier bench") from error
    except ValueError as error:
        raise UserError(f"--compare {file} is not JSON: {' '.join(str(error).split())}", f"name a {BENCH} of an earlier bench") from error
    found = document.get("configurations") if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) and {"label", "repeats"} <= item.keys() for item in found):
        raise UserError(f"--compare {file} is no result of eaglecli bench", f"name a {BENCH} of an earlier bench")
    return document


def compare_benches(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Configuration by configuration, by label. Raises UserError when they have none in common."""
    before, after = ({_key(item): item for item in document["configurations"]} for document in (old, new))
    common = [key for key in after if key in before]
    check_comparable(old, list(after))
    return Comparison(
        differences=tuple(_difference(before[key], after[key]) for key in common),
        only_old=tuple(key for key in before if key not in after),
        only_new=tuple(key for key in after if key not in before),
        changed_conditions=tuple(_changed(old.get("conditions") or {}, new.get("conditions") or {})),
    )


def check_comparable(old: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raises UserError when the earlier object has none of the configurations, named by `configuration_key`."""
    before = [_key(item) for item in old["configurations"]]
    if not {*keys} & {*before}:
        raise UserError("--compare: the two results have no configuration in common", f"the file has {', '.join(before)}")


def configuration_key(label: str, simulated_accept_length: float | None) -> str:
    """What a configuration is known by in two results."""
    return label + (f", simulated {simulated_accept_length:g}" if simulated_accept_length is not None else "")


def _key(item: Mapping[str, Any]) -> str:
    return configuration_key(item["label"], item.get("simulated_accept_length"))


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference:
    before, after = ([repeat["output_throughput"] for repeat in item["repeats"]] for item in (old, new))
    return Difference(_key(new), old["output_throughput"], new["output_throughput"], ratio_interval(after, before))


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in _CONDITIONS:
        if old.get(name) != new.get(name) and (name in old or name not in SAMPLING_CONDITIONS):  # of older files nobody knows
            yield f"{name}: {old.get(name)} then, {new.get(name)} now"


def vllm_names(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The same figures under the names of vLLM's throughput bench and of its speculative decoding counters."""
    accept = configuration["accept"] or {}
    return {
        "elapsed_time": configuration["total_latency"],
        "num_requests": configuration["successful_requests"],
        "total_num_tokens": configuration["total_input_tokens"] + configuration["total_output_tokens"],
        "requests_per_second": configuration["request_throughput"],
        "tokens_per_second": configuration["total_throughput"],
        "output_tokens_per_second": configuration["output_throughput"],
        "mean_acceptance_length": accept.get("accept_length"),
        "num_drafts": accept.get("spec_verify_ct"),
        "num_draft_tokens": accept.get("spec_num_proposed_drafts"),
        "num_accepted_tokens": accept.get("spec_num_correct_drafts"),
        "acceptance_rate_per_position": accept.get("accept_rate_per_position"),
    }


def to_lines(configurations: Sequence[Mapping[str, Any]]) -> bytes:
    """results.jsonl."""
    return b"".join(json.dumps(item, ensure_ascii=False, allow_nan=False).encode() + b"\n" for item in configurations)
