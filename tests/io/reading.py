"""Reads inputs as `generate` does, up to the records."""

import json
from pathlib import Path
from typing import Any

from eaglecli.io.prompts import InputSelection
from eaglecli.io.record_choice import RecordChoice
from eaglecli.io.records import PromptRecord, RecordError
from eaglecli.io.scan import InputReader

MESSY = Path(__file__).parent.parent / "data" / "messy"

Record = PromptRecord | RecordError


def select(*sources: Path | str, choice: dict[str, Any] | None = None, **selection: Any) -> InputSelection:
    return InputSelection(tuple(map(str, sources)), choice=RecordChoice(**(choice or {})), **selection)


def read(*sources: Path | str, choice: dict[str, Any] | None = None, **selection: Any) -> list[Record]:
    return list(InputReader(select(*sources, choice=choice, **selection)).records())


def read_objects(folder: Path, *objects: Any, **selection: Any) -> list[Record]:
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return read(path, **selection)


def good(records: list[Record]) -> list[PromptRecord]:
    return [record for record in records if isinstance(record, PromptRecord)]


def codes(records: list[Record]) -> dict[int, str]:
    return {record.key.line: record.code for record in records if isinstance(record, RecordError)}
