"""Tables in text: CSV and TSV by Python's csv, every value as the text it is, rows numbered by the physical line they begin on.

CSV: fields may be quoted with `"` (doubled inside), and hold delimiters and line ends. TSV: quotes are text like any other.
The first row names the columns. A row with fewer fields lacks the last ones; one with more is bad.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from eaglecli.errors import UserError
from eaglecli.io.lines import BYTE_ORDER_MARK
from eaglecli.io.records import MAX_RAW_CHARACTERS, RecordFault
from eaglecli.io.rows import Row

DELIMITERS = (",", ";", "\t", "|")
FIELD_LIMIT = min(sys.maxsize, 2**31 - 1)


class _Lines:
    """Text lines for the csv reader; remembers the bytes of the row that is being read, so that it can be quoted and its place named.

    Bytes that are no text come through as lone surrogates: they spoil their own row alone.
    """

    def __init__(self, stream: BinaryIO, encoding: str, digest: Any) -> None:
        self._stream, self._encoding, self._digest = stream, encoding, digest
        self.number = 0  # of the line read last
        self.offset = 0  # behind it
        self.row_line, self.row_offset, self.row_data = 1, 0, b""

    def begin_row(self) -> None:
        """What is read from here on belongs to the next row."""
        self.row_line, self.row_offset, self.row_data = self.number + 1, self.offset, b""

    def __iter__(self) -> Iterator[str]:
        for data in self._stream:
            if self._digest is not None:
                self._digest.update(data)
            self.number += 1
            self.offset += len(data)
            if self.number == 1 and data.startswith(BYTE_ORDER_MARK):
                data = data[3:]
                self.row_offset = 3
            self.row_data += data[: 4 * MAX_RAW_CHARACTERS]
            yield data.decode(self._encoding, errors="surrogateescape")


def read_table(stream: BinaryIO, name: str, delimiter: str, encoding: str, wanted: Sequence[str], digest: Any = None) -> Iterator[Row]:
    """The rows below the header. Raises UserError when none of the `wanted` columns is there (the columns found are named)."""
    csv.field_size_limit(FIELD_LIMIT)  # csv keeps it for the process; its default would refuse a long prompt
    lines = _Lines(stream, encoding, digest)
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(iter(lines), delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    while True:
        lines.begin_row()
        try:
            values = next(reader, None)
        except csv.Error as error:
            values, fault = [], RecordFault("invalid_json", f"not a row of a table: {_explained(error, lines)}")
        else:
            fault = _bad_bytes(values or [], encoding, lines.row_offset)
        if values is None:
            return
        if header is None and (fault or any(values)):
            if fault is not None:
                raise UserError(
                    f"{name}, line {lines.row_line}: the header is unreadable: {fault.message}", "the first row names the columns"
                )
            header = _check_header(values, name, wanted)
        elif fault is not None:
            yield _row(name, lines, fault=fault)
        elif any(values) or len(values) > 1:
            yield _filled_row(name, lines, header or [], values)


def guess_delimiter(head: bytes) -> str:
    """The delimiter that the header line uses most; a comma if none."""
    first = next((line for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()), b"")
    return max(DELIMITERS, key=lambda mark: first.count(mark.encode()))


def _check_header(names: list[str], name: str, wanted: Sequence[str]) -> list[str]:
    shown = ", ".join(f"`{column[:40]}`" for column in names[:12])
    if len(set(names)) < len(names):
        raise UserError(f"{name}: two columns bear the same name; the columns are {shown}", "rename one of them")
    if not any(column in names for column in wanted):
        hint = "the first row must name the columns; --prompt-field says which one holds the prompt, --delimiter what divides them"
        raise UserError(f"{name}: no column is called {' or '.join(f'`{column}`' for column in wanted[:3])}; the columns are {shown}", hint)
    return names


def _filled_row(name: str, lines: _Lines, header: list[str], values: list[str]) -> Row:
    if len(values) > len(header):
        return _row(name, lines, fault=RecordFault("bad_type", f"the row has {len(values)} fields, the header names {len(header)} columns"))
    return _row(name, lines, fields=dict(zip(header, values, strict=False)))


def _row(name: str, lines: _Lines, fields: dict[str, str] | None = None, fault: RecordFault | None = None) -> Row:
    raw = lines.row_data.decode("utf-8", errors="backslashreplace").rstrip("\r\n")[:MAX_RAW_CHARACTERS]
    return Row(name, lines.row_line, lines.row_offset, raw, fields, fault, is_text_table=True)


def _explained(error: csv.Error, lines: _Lines) -> str:
    if "unexpected end of data" in str(error):
        return f"a quote that opens in it (line {lines.row_line} on) is never closed"
    return str(error)


def _bad_bytes(values: list[str], encoding: str, offset: int) -> RecordFault | None:
    bad = next((character for value in values for character in value if "\udc80" <= character <= "\udcff"), None)
    if bad is None:
        return None
    return RecordFault(
        "encoding", f"not {encoding.upper()}: byte 0x{ord(bad) - 0xDC00:02x} in the row at byte {offset} of the file", offset
    )
