"""From two runs of the same requests, without and with a draft, to what is to be said about them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np

from eaglecli.engine.request import Completion
from eaglecli.verification.checks import check_acceptance, check_balance, check_choices, check_counts, compare_texts
from eaglecli.verification.difference import Check, Difference, Kind
from eaglecli.verification.reference_run import ReferenceRun, RunRules
from eaglecli.verification.text_pass import Models

CHECKS: tuple[Check, ...] = get_args(Check)


@dataclass
class Findings:
    """Of one set of requests. By depth 1, 2 ..: steps that accepted a draft there (`found`), and that should have (`expected`)."""

    name: str
    num_texts: int = 0
    num_equal: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    found_by_depth: list[int] = field(default_factory=list)
    expected_by_depth: list[int] = field(default_factory=list)
    num_fewer: int = 0  # steps that accepted fewer drafts than expected
    num_more: int = 0
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # answers that ended in an error, which cannot be verified

    @property
    def is_good(self) -> bool:
        """Nothing was found that numbers do not excuse, and something was looked at."""
        return self.num_texts > 0 and not self.errors and self.count("bug") == 0

    def count(self, kind: Kind, check: Check | None = None) -> int:
        """Differences of a kind, of one check or of all."""
        return sum(item.kind == kind and check in (None, item.check) for item in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Counts, shares and every difference."""
        accept_length = 1 + self.num_accepted / self.num_steps if self.num_steps else None
        counts = {check: {kind: self.count(kind, check) for kind in ("tie", "numeric", "bug")} for check in CHECKS}
        own = {name: value for name, value in asdict(self).items() if name != "differences"}
        return {**own, "accept_length": accept_length, "counts": counts, "differences": [asdict(item) for item in self.differences]}


def examine(
    name: str,
    models: Models,
    rules: RunRules,
    plain: Mapping[Any, Completion],
    drafted: Mapping[Any, Completion],
) -> Findings:
    """Run all checks on two runs of the same requests, completions by key."""
    num_steps = rules.speculation.num_steps
    findings = Findings(name, found_by_depth=[0] * num_steps, expected_by_depth=[0] * num_steps)
    for key, without in plain.items():
        answer = drafted[key]
        failed = [completion for completion in (without, answer) if completion.error]
        if failed:
            findings.errors.append(f"prompt {key}: {failed[0].error}")
            continue
        run = ReferenceRun(models, rules, answer)
        findings.num_texts += 1
        findings.num_tokens += len(answer.output_ids)
        in_text = list(compare_texts(run, without))
        findings.num_equal += not in_text
        in_counts = list(check_counts(answer))
        findings.differences += [*in_text, *check_choices(run), *in_counts, *check_counts(without)]
        if in_text:
            findings.differences += check_choices(ReferenceRun(models, rules, without))
        if not in_counts:  # or nobody knows where a step began
            findings.differences += check_acceptance(run)
            _count_depths(findings, run)
    findings.differences += check_balance(findings.num_fewer, findings.num_more)
    return findings


def _count_depths(findings: Findings, run: ReferenceRun) -> None:
    text, accept_counts = run.ids.tolist(), run.completion.accept_counts[list(run.trees)]  # of the steps that had drafts
    delivered = np.array([tree.place.num_delivered for tree in run.trees.values()], np.int64)
    found = np.minimum(accept_counts, delivered)
    expected = np.array([tree.num_accepted(text) for tree in run.trees.values()], np.int64)
    findings.num_steps += len(found)
    findings.num_fewer += int((found < expected).sum())
    findings.num_more += int((found > expected).sum())
    findings.num_accepted += int(accept_counts.sum())
    for depth in range(len(findings.found_by_depth)):
        findings.found_by_depth[depth] += int((found > depth).sum())
        findings.expected_by_depth[depth] += int((expected > depth).sum())


def are_good(findings: Sequence[Findings]) -> bool:
    """Whether the run may be called verified."""
    return bool(findings) and all(item.is_good for item in findings)
