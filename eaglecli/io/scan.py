"""The first pass over the input: every record is read and checked before a model is loaded, nothing is kept but counts."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from eaglecli.io.lines import check_format
from eaglecli.io.prompts import InputSelection, read_prompts
from eaglecli.io.record_ids import IdPlan, IdScan, id_hash
from eaglecli.io.records import PromptRecord, RecordError

MAX_NAMED_LINES = 20


@dataclass(frozen=True)
class InputScan:
    """What the input holds. `first_error` is None when every record is good."""

    num_good: int
    num_bad: int
    kinds: Mapping[str, int]  # "prompt" and "messages": how many records of each
    sha256: str  # of the bytes read (all of them, unless a limit stopped the reading)
    ids: IdPlan
    repeated_lines: tuple[int, ...]  # physical lines of records that share an id, the first of them
    first_error: RecordError | None

    @property
    def num_records(self) -> int:
        """Good and bad ones."""
        return self.num_good + self.num_bad


def scan_input(selection: InputSelection) -> InputScan:
    """Reads the selected records once. Raises UserError when the file cannot be read or is no JSON lines."""
    check_format(selection.path)
    digest = hashlib.sha256()
    kinds: Counter[str] = Counter()
    num_bad, first_error, ids = 0, None, IdScan()
    for record in read_prompts(_from_the_start(selection), IdPlan(), digest):
        ids.add(record.key)  # those before the offset too: an occurrence counts from the file's start
        if record.key.index < selection.offset:
            continue
        if isinstance(record, PromptRecord):
            kinds["prompt" if record.text is not None else "messages"] += 1
            continue
        num_bad += 1
        first_error = first_error or record
    plan = ids.plan()
    lines = _repeated_lines(selection, plan) if plan.repeated else ()
    return InputScan(sum(kinds.values()), num_bad, dict(kinds), digest.hexdigest(), plan, lines, first_error)


def _from_the_start(selection: InputSelection) -> InputSelection:
    return replace(selection, offset=0, limit=None if selection.limit is None else selection.offset + selection.limit)


def _repeated_lines(selection: InputSelection, plan: IdPlan) -> tuple[int, ...]:
    lines: list[int] = []
    for record in read_prompts(_from_the_start(selection), plan):
        if record.key.has_own_id and id_hash(record.key.id_json) in plan.repeated:
            lines.append(record.key.line)
            if len(lines) == MAX_NAMED_LINES:
                break
    return tuple(lines)
