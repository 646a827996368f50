"""Plain text: one prompt a line, the line as it is, without its line end."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from eaglecli.io.json_record import raw_excerpt
from eaglecli.io.lines import decode_line, split_lines
from eaglecli.io.records import RecordFault
from eaglecli.io.rows import Row


def read_text(stream: BinaryIO, name: str, encoding: str, digest: Any = None) -> Iterator[Row]:
    """A row with the field `prompt` for every line that is not blank."""
    for line in split_lines(stream, digest):
        try:
            fields, fault = {"prompt": decode_line(line, encoding)}, None
        except RecordFault as found:
            fields, fault = None, found
        yield Row(name, line.number, line.byte_offset, raw_excerpt(line), fields, fault)
