"""One record as a reader of some format delivers it: its fields, or what is wrong with it, and where it stands."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglecli.io.records import MAX_RAW_CHARACTERS, RecordFault


@dataclass(frozen=True, eq=False)
class Row:
    """Exactly one of `fields` and `fault` is given. `line`: physical line of a text file, number of the row elsewhere, from 1."""

    file: str
    line: int
    byte_offset: int | None
    raw: str  # first characters, for an error report
    fields: Mapping[str, Any] | None = None
    fault: RecordFault | None = None
    is_text_table: bool = False  # every value came as text (CSV, TSV): numbers have to be read from it


def excerpt_of(fields: Mapping[str, Any]) -> str:
    """The start of a record that has no line of its own to quote."""
    return to_json(fields)[:MAX_RAW_CHARACTERS]


def to_json(value: Any) -> str:
    """JSON for any value that a reader delivers: numbers that JSON cannot write, dates and bytes become strings."""
    try:
        return ENCODER.encode(value)
    except ValueError:
        return ENCODER.encode(_finite(value))


def _spelled(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", errors="backslashreplace")
    return str(value)


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_spelled)  # making one costs more than using it


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
