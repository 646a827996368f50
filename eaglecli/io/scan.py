"""The first pass over the input: every record is read and checked before a model is loaded, nothing is kept but counts.

What can be read only once (standard input, hub streams) has no first pass: its first record is waited for, the rest is
counted as it comes.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from eaglecli.errors import UserError
from eaglecli.io.prompts import InputSelection, count_rows, read_prompts
from eaglecli.io.record_choice import RecordChoice, places_of
from eaglecli.io.record_ids import IdPlan, IdScan, id_hash
from eaglecli.io.records import PromptRecord, RecordError
from eaglecli.io.sampling_options import EVERY_NEED, SamplingNeeds

MAX_NAMED_LINES = 20


@dataclass(frozen=True)
class InputScan:
    """What the input holds. `first_error` is None when every record is good."""

    num_good: int
    num_bad: int
    kinds: Mapping[str, int]  # how many records of each shape
    sha256: str  # of the bytes read (all of them, unless a limit stopped the reading)
    ids: IdPlan
    repeated_lines: tuple[int, ...]  # physical lines of records that share an id, the first of them
    first_error: RecordError | None
    formats: Mapping[str, str] = field(default_factory=dict)  # what each source is, in words
    is_complete: bool = True  # False while a stream is being read: the counts are those so far
    sample_counts: Mapping[int | None, int] = field(default_factory=dict)  # good records by the samples they ask for; None: the run's
    needs: SamplingNeeds = field(default_factory=SamplingNeeds)  # of all records; of a stream: whatever may come

    @property
    def num_records(self) -> int:
        """Good and bad ones."""
        return self.num_good + self.num_bad

    def num_results(self, num_samples: int) -> int:
        """Answers and errors to expect, with `num_samples` of each record that does not say."""
        return self.num_bad + sum((asked or num_samples) * count for asked, count in self.sample_counts.items())


class InputReader:
    """The records of a selection together with what is known of them. Raises UserError when a source cannot be read."""

    def __init__(self, selection: InputSelection) -> None:
        self.selection = _with_places(selection)
        self._tally = _Tally()
        self._stream: Iterator[PromptRecord | RecordError] | None = None
        if selection.is_read_once:
            records = self._counted(read_prompts(self.selection, IdPlan(), self._tally.digest, self._tally.formats))
            first = list(itertools.islice(records, 1))
            self._stream = itertools.chain(first, records)
            self._is_complete = not first
        else:
            self._scan = scan_input(self.selection)

    @property
    def scan(self) -> InputScan:
        """The whole input, or what was read of a stream until now."""
        return self._scan if self._stream is None else self._tally.scan(IdPlan(), (), self._is_complete)

    def records(self) -> Iterator[PromptRecord | RecordError]:
        """All records; those of a stream once."""
        return read_prompts(self.selection, self._scan.ids) if self._stream is None else self._stream

    def _counted(self, records: Iterator[PromptRecord | RecordError]) -> Iterator[PromptRecord | RecordError]:
        for record in records:
            self._tally.add(record)
            yield record
        self._is_complete = True


@dataclass
class _Tally:
    """Counts of one pass."""

    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    formats: dict[str, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    num_bad: int = 0
    first_error: RecordError | None = None
    sample_counts: Counter[int | None] = field(default_factory=Counter)
    needs: SamplingNeeds = field(default_factory=SamplingNeeds)

    def add(self, record: PromptRecord | RecordError) -> None:
        if isinstance(record, PromptRecord):
            self.kinds[record.shape] += 1
            self.sample_counts[record.options.get("num_samples")] += 1
            if record.options:
                self.needs = self.needs.and_of(record.options)
            return
        self.num_bad += 1
        self.first_error = self.first_error or record

    def scan(self, ids: IdPlan, repeated_lines: tuple[int, ...], is_complete: bool = True) -> InputScan:
        kinds = dict(self.kinds)
        return InputScan(
            num_good=sum(kinds.values()),
            num_bad=self.num_bad,
            kinds=kinds,
            sha256=self.digest.hexdigest(),
            ids=ids,
            repeated_lines=repeated_lines,
            first_error=self.first_error,
            formats=dict(self.formats),
            is_complete=is_complete,
            sample_counts=dict(self.sample_counts),
            needs=self.needs if is_complete else EVERY_NEED,
        )


def scan_input(selection: InputSelection) -> InputScan:
    """Reads the selected records once. Raises UserError when a source cannot be read."""
    tally, ids, choice = _Tally(), IdScan(), selection.choice
    for record in read_prompts(_all_before_the_end(selection), IdPlan(), tally.digest, tally.formats):
        if not (isinstance(record, RecordError) and record.code == "duplicate_id"):
            ids.add(record.key)  # those that are not chosen too: an occurrence counts from the start of the input
        if _is_chosen(selection, choice, record):
            tally.add(record)
    plan = ids.plan()
    return tally.scan(plan, _repeated_lines(selection, plan) if plan.repeated else ())


def _with_places(selection: InputSelection) -> InputSelection:
    if selection.choice.shuffle_seed is None or selection.places is not None:
        return selection
    if selection.is_read_once:
        raise UserError(f"{selection.name} cannot be shuffled: it is read once", "save it to a file, or leave --shuffle-seed out")
    return replace(selection, places=places_of(count_rows(selection), selection.choice))


def _all_before_the_end(selection: InputSelection) -> InputSelection:
    """Every record that must be looked at: with a limit and no shuffling, none behind it."""
    choice = selection.choice
    limit = None if choice.limit is None or selection.places is not None else choice.offset + choice.limit
    return replace(selection, choice=RecordChoice(limit=limit), places=None)


def _is_chosen(selection: InputSelection, choice: RecordChoice, record: PromptRecord | RecordError) -> bool:
    index = record.key.index
    place = index if selection.places is None else int(selection.places[index])
    return choice.takes_place(place) and choice.takes_id(record.key)


def _repeated_lines(selection: InputSelection, plan: IdPlan) -> tuple[int, ...]:
    lines: list[int] = []
    for record in read_prompts(_all_before_the_end(selection), plan):
        is_second_batch_line = isinstance(record, RecordError) and record.code == "duplicate_id"
        if record.key.has_own_id and not is_second_batch_line and id_hash(record.key.id_json) in plan.repeated:
            lines.append(record.key.line)
            if len(lines) == MAX_NAMED_LINES:
                break
    return tuple(lines)
