"""Records of the input: every row of every source as a prompt record or an error record, with its index, id and sampling options."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eaglecli.io.chat_messages import check_unicode
from eaglecli.io.field_mapping import MISSING, FieldMapping, look_up
from eaglecli.io.formats import TextRules, open_rows
from eaglecli.io.input_sources import can_be_read_again
from eaglecli.io.openai_batch import is_batch_line, read_batch_line
from eaglecli.io.record_choice import RecordChoice
from eaglecli.io.record_ids import IdPlan, OccurrenceCounter, generated_id
from eaglecli.io.record_shapes import SHAPES, PromptContent, read_shape
from eaglecli.io.records import PromptRecord, RecordError, RecordFault, RecordKey
from eaglecli.io.rows import Row, to_json
from eaglecli.io.sampling_options import read_options

ID_FIELDS = ("id", "custom_id", "question_id", "task_id")
BATCH = "openai-batch"


@dataclass(frozen=True)
class InputSelection:
    """What is read and how. `sources`: paths, `-`, hub names, as `expand_inputs` gives them.

    `input_format` is a value of --input-format; `places` gives each index its place when the order is shuffled.
    """

    sources: tuple[str, ...]
    input_format: str = "auto"
    encoding: str | None = None
    delimiter: str | None = None
    allow_blank: bool = False
    keep_fields: bool = False
    mapping: FieldMapping = field(default_factory=FieldMapping)
    choice: RecordChoice = field(default_factory=RecordChoice)
    places: Sequence[int] | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The sources that are files or folders."""
        return tuple(Path(name) for name in self.sources if can_be_read_again(name))

    @property
    def path(self) -> Path:
        """The first source."""
        return Path(self.sources[0])

    @property
    def is_read_once(self) -> bool:
        """Whether a source is a pipe or a hub stream: then there is no first pass."""
        return not all(map(can_be_read_again, self.sources))

    @property
    def name(self) -> str:
        """The input in a few words."""
        first = "standard input" if self.sources[0] == "-" else self.sources[0]
        return first if len(self.sources) == 1 else f"{first} and {len(self.sources) - 1} more"

    @property
    def shapes(self) -> tuple[str, ...]:
        """Shapes that a record may have: the one asked for, those of mapped fields, or all."""
        if self.input_format in SHAPES or self.input_format == BATCH:
            return (self.input_format,)
        if self.mapping.template is not None:
            return ("prompt",)
        mapped = tuple(shape for shape, item in SHAPES.items() if any(name in self.mapping.sources for name in item.names))
        return mapped or (*SHAPES, BATCH)

    @property
    def text_rules(self) -> TextRules:
        """How bytes become rows."""
        if self.mapping.template is not None or self.mapping.sources:
            wanted = tuple(path.partition(".")[0] for target, path in self.mapping.sources.items() if target != "id")
        else:
            wanted = ()
        names = tuple(name for shape in self.shapes if shape in SHAPES for name in SHAPES[shape].names)
        return TextRules(self.input_format, self.encoding, self.delimiter, wanted or names)


def read_prompts(
    selection: InputSelection, ids: IdPlan, digest: Any = None, formats: dict[str, str] | None = None
) -> Iterator[PromptRecord | RecordError]:
    """Every chosen record, good or bad, in input order. `index` counts from the start of the first source.

    `formats` is told what each source is. Raises UserError when a source cannot be read; a bad record is yielded, never raised.
    """
    reader = _RecordReader(selection, ids)
    choice, places = selection.choice, selection.places
    for index, row in enumerate(_read_rows(selection, digest, formats)):
        place = index if places is None else int(places[index]) if index < len(places) else index
        if places is None and choice.limit is not None and index >= choice.offset + choice.limit:
            return
        record = reader.read(row, index)
        if choice.takes_place(place) and choice.takes_id(record.key):
            yield record


def count_rows(selection: InputSelection) -> int:
    """How many records the input has, good and bad."""
    return sum(1 for _ in _read_rows(selection, None, None))


def _read_rows(selection: InputSelection, digest: Any, formats: dict[str, str] | None) -> Iterator[Row]:
    for name in selection.sources:
        with open_rows(name, selection.text_rules, digest) as (kind, rows):
            if formats is not None:
                formats[name] = kind
            yield from rows


class _RecordReader:
    """Reads rows in order; remembers ids that must not come again."""

    def __init__(self, selection: InputSelection, ids: IdPlan) -> None:
        self._selection, self._ids = selection, ids
        self._shapes = tuple(shape for shape in selection.shapes if shape != BATCH)
        self._reads_batch_lines = BATCH in selection.shapes
        self._counter: OccurrenceCounter = ids.counter()

    def read(self, row: Row, index: int) -> PromptRecord | RecordError:
        """One row as a prompt record or as an error record."""
        key, fault = self._key(row, index)
        if fault is None:
            try:
                return self._read_fields(row, key)
            except RecursionError:
                fault = too_deep()
            except RecordFault as found:
                fault = found
        offset = row.byte_offset if fault.byte_offset is None else fault.byte_offset
        return RecordError(key, fault.code, fault.message, row.raw, offset)

    def _key(self, row: Row, index: int) -> tuple[RecordKey, RecordFault | None]:
        """The key of a row, and what is wrong with the row or its id."""
        id_json, input_json, fault = None, None, row.fault
        if row.fields is not None:
            try:
                id_json = own_id(row.fields, self._selection.mapping.sources.get("id"))
                input_json = to_json(row.fields) if self._selection.keep_fields else None
            except RecursionError:
                fault = too_deep()
            except RecordFault as found:
                fault = found
        has_own_id = id_json is not None
        name = id_json if id_json is not None else generated_id(self._ids.prefix, index)
        key = RecordKey(index, name, row.file, row.line, row.byte_offset, has_own_id=has_own_id, input_json=input_json)
        return self._counter.number(key), fault

    def _read_fields(self, row: Row, key: RecordKey) -> PromptRecord:
        assert row.fields is not None
        selection = self._selection
        fields = selection.mapping.apply(row.fields)
        if self._reads_batch_lines and (not self._shapes or is_batch_line(fields)):
            self._refuse_second(key)
            content = read_batch_line(fields, selection.allow_blank)
            return _record(replace(key, url=str(fields["url"])), row, BATCH, content, content.options or {})
        options = read_options(fields, row.is_text_table)
        shape, content = read_shape(fields, self._shapes, selection.allow_blank)
        return _record(key, row, shape, content, options)

    def _refuse_second(self, key: RecordKey) -> None:
        """A batch line is known by its `custom_id` alone."""
        if key.has_own_id and not self._counter.is_first_batch_line(key):
            raise RecordFault("duplicate_id", f"the custom_id {key.id_json[:80]} was used by an earlier line")


def _record(key: RecordKey, row: Row, shape: str, content: PromptContent, options: Mapping[str, Any]) -> PromptRecord:
    return PromptRecord(
        key=key,
        raw=row.raw,
        text=content.text,
        messages=content.messages,
        options=options,
        turns=content.turns,
        token_ids=content.token_ids,
        is_raw=content.is_raw,
        shape=shape,
    )


def too_deep() -> RecordFault:
    """What is said when Python gives up on the depth of a record."""
    return RecordFault("invalid_json", "not usable JSON: nested too deeply")


def own_id(fields: Mapping[str, Any], path: str | None) -> str | None:
    """The record's own id as JSON text; None when it is missing, null or empty. Raises RecordFault for one that nothing can write."""
    if path is not None:
        value = look_up(fields, path)
    else:
        value = next((fields[name] for name in ID_FIELDS if name in fields and fields[name] not in (None, "")), None)
    if value is None or value is MISSING or value == "":
        return None
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        raise RecordFault("bad_type", "the id is not a finite number")
    text = to_json(value)
    check_unicode(text, "the id")
    return text
