"""From settings to the input of a run: what is read, the first pass over it, and what is said about it."""

from typing import Any

from eaglecli.commands._chat_template import read_chat_template
from eaglecli.commands._run import stop_at
from eaglecli.config import GenerateSettings
from eaglecli.errors import UserError
from eaglecli.io.console import Console
from eaglecli.io.field_mapping import FieldMapping, check_template, parse_mapping
from eaglecli.io.input_sources import expand_inputs
from eaglecli.io.prompts import InputSelection
from eaglecli.io.record_choice import RecordChoice, parse_samples, parse_shard
from eaglecli.io.scan import InputReader, InputScan


def select_input(settings: GenerateSettings, option: str = "--input") -> InputSelection:
    """What `option` and its companions mean. Raises UserError for what is not there or makes no sense."""
    read_chat_template(settings)
    sources = expand_inputs(settings.input or (), option)
    mapping = FieldMapping(parse_mapping(settings.map, settings.prompt_field, settings.id_field), settings.prompt_template)
    if settings.prompt_template is not None:
        _checked("--prompt-template", check_template, settings.prompt_template)
        if "prompt" in mapping.sources:
            raise UserError("--prompt-template and --prompt-field both say what the prompt is", "use one: {field} in the template")
    return InputSelection(
        sources=sources,
        input_format=settings.input_format,
        encoding=settings.encoding,
        delimiter=settings.delimiter,
        allow_blank=settings.allow_blank,
        keep_fields=settings.keep_fields,
        mapping=mapping,
        choice=RecordChoice(
            offset=settings.offset,
            limit=settings.limit,
            shard=None if settings.shard is None else _checked("--shard", parse_shard, settings.shard),
            samples=parse_samples(settings.samples),
            shuffle_seed=settings.shuffle_seed,
        ),
    )


def read_input(selection: InputSelection, settings: GenerateSettings, console: Console) -> InputReader:
    """The first pass. With --on-error stop, raises UserError for the first bad record and for ids that come twice."""
    reader = InputReader(selection)
    scan = reader.scan
    for line in _described(selection, scan):
        console.note(line)
    lines = ", ".join(map(str, scan.repeated_lines))
    if settings.on_error == "stop":
        if scan.first_error is not None:
            raise stop_at(scan.first_error)
        if lines:
            raise UserError(f"{selection.name}: records share an id (lines {lines})", "give each its own, or use --on-error record")
    elif lines:
        console.warning(f"{selection.name}: records share an id (lines {lines}); all are generated, told apart by `index`")
    return reader


def _described(selection: InputSelection, scan: InputScan) -> list[str]:
    formats = set(scan.formats.values())
    kind = next(iter(formats)) if len(formats) == 1 else f"{len(scan.formats)} files: " + ", ".join(sorted(formats))
    if not scan.is_complete:
        return [f"{selection.name}: {kind}; read once, so records are checked as they come"]
    shapes = ", ".join(f"{count} {name}" for name, count in scan.kinds.items())
    bad = f", {scan.num_bad} bad" if scan.num_bad else ""
    return [f"{selection.name}: {kind}, {scan.num_records} records" + (f" ({shapes})" if shapes else "") + bad]


def _checked(flag: str, check: Any, value: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UserError(f"{flag} {error}") from None
