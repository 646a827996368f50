"""JSON records: one object a line, one array, or one object over several lines; all end as lines that are parsed the same way."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from eaglecli.errors import UserError
from eaglecli.io.json_array import split_array
from eaglecli.io.json_record import parse_record, raw_excerpt
from eaglecli.io.lines import BYTE_ORDER_MARK, Line, split_lines
from eaglecli.io.records import RecordFault
from eaglecli.io.rows import Row

MAX_DOCUMENT_BYTES = 1 << 26
CONVERSATION_KEYS = ("messages", "conversations")  # arrays of objects that belong to one record


def read_json_lines(stream: BinaryIO, name: str, encoding: str, digest: Any = None) -> Iterator[Row]:
    """A row for every line that is not blank."""
    return _rows(split_lines(stream, digest), name, encoding)


def read_json_array(stream: BinaryIO, name: str, encoding: str, digest: Any = None) -> Iterator[Row]:
    """A row for every element."""
    return _rows(split_array(stream, name, digest), name, encoding)


def read_json_document(stream: BinaryIO, name: str, encoding: str, digest: Any = None) -> Iterator[Row]:
    """One object over several lines as one record. Raises UserError when it is no record but wraps an array of them."""
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UserError(f"{name} is one JSON object over several lines and too large to be one record", "give one record a line")
    if digest is not None:
        digest.update(data)
    body = data.removeprefix(BYTE_ORDER_MARK)
    holder = _key_of_records(body)
    if holder is not None:
        raise UserError(
            f"{name} is one JSON object that holds its records under the key `{holder}`", "give that array alone, or one record a line"
        )
    return _rows([Line(body, 1, len(data) - len(body))], name, encoding)


def is_json(data: bytes) -> bool:
    """Whether the bytes are one JSON value."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _key_of_records(body: bytes) -> str | None:
    """The key of an array of objects in an object that is no record itself; a document that is no JSON has none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    arrays = (key for key, value in document.items() if isinstance(value, list) and value and isinstance(value[0], dict))
    return next((key for key in arrays if key not in CONVERSATION_KEYS), None)


def _rows(lines: Iterable[Line], name: str, encoding: str) -> Iterator[Row]:
    for line in lines:
        fields, fault = None, None
        try:
            fields = parse_record(line, encoding)
        except RecordFault as found:
            fault = found
        yield Row(name, line.number, line.byte_offset, raw_excerpt(line), fields, fault)
