"""What an input is, told from its first bytes, and the reader that belongs to it.

The bytes decide; the name (.csv, .tsv, .txt) counts only for text that is no JSON, and --input-format before both.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eaglecli.errors import UserError
from eaglecli.io.arrow_rows import read_arrow, read_parquet
from eaglecli.io.byte_streams import OpenStream, open_stream, readable_errors, shown_name
from eaglecli.io.csv_rows import guess_delimiter, read_table
from eaglecli.io.dataset_rows import HUB_PREFIX, read_hub_dataset, read_saved_dataset
from eaglecli.io.json_array import begins_array
from eaglecli.io.json_rows import MAX_DOCUMENT_BYTES, is_json, read_json_array, read_json_document, read_json_lines
from eaglecli.io.lines import BYTE_ORDER_MARK, Transcoded, is_wide
from eaglecli.io.rows import Row
from eaglecli.io.text_rows import read_text

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"7z\xbc\xaf": "a 7z archive",
}
WIDE_MARKS = {b"\xff\xfe\x00\x00": "utf-32", b"\x00\x00\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
TABLE_SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".txt": "text"}
COMPRESSION_SUFFIXES = (".gz", ".zst", ".zstd")
NAMES = {
    "json lines": "JSON lines",
    "json array": "a JSON array",
    "json document": "one JSON object",
    "csv": "a CSV table",
    "tsv": "a TSV table",
}


@dataclass(frozen=True)
class TextRules:
    """How bytes become rows. `columns`: names of which a table must have one."""

    input_format: str = "auto"
    encoding: str | None = None
    delimiter: str | None = None
    columns: Sequence[str] = ("prompt", "messages")


@contextlib.contextmanager
def open_rows(name: str, rules: TextRules, digest: Any = None) -> Iterator[tuple[str, Iterator[Row]]]:
    """(what the source is, its rows). Feeds all bytes read to `digest`. Raises UserError, also while rows are taken."""
    if name.startswith(HUB_PREFIX):
        yield "a data set of the hub, streamed", read_hub_dataset(name, digest)
    elif Path(name).is_dir():
        yield "a saved data set", read_saved_dataset(Path(name), digest)
    else:
        with open_stream(name) as opened, readable_errors(name):
            yield _open_file(name, opened, rules, digest)


def _open_file(name: str, opened: OpenStream, rules: TextRules, digest: Any) -> tuple[str, Iterator[Row]]:
    kind = _binary_kind(name, opened, rules)
    if kind is not None:
        if not Path(name).is_file():
            raise UserError(f"{shown_name(name)} is {kind}: it has to be read from a file", "save it to a file and name that")
        return kind, (read_parquet if kind == "a Parquet file" else read_arrow)(Path(name), digest)
    _refuse_archives(name, opened)
    encoding, stream, head = _as_text(name, opened, rules)
    kind = _text_kind(name, head, rules)
    delimiter = rules.delimiter or ("\t" if kind == "tsv" else guess_delimiter(head))
    read: Callable[..., Iterator[Row]] = {
        "json lines": read_json_lines,
        "json array": read_json_array,
        "json document": read_json_document,
        "text": read_text,
    }.get(kind, read_table)
    extra = (delimiter, encoding, rules.columns, digest) if read is read_table else (encoding, digest)
    return _described(kind, opened, encoding, delimiter), _decoding_errors(read(stream, name, *extra), name)  # type: ignore[arg-type]


def _binary_kind(name: str, opened: OpenStream, rules: TextRules) -> str | None:
    if opened.compression is None:
        if opened.head.startswith(PARQUET):
            return "a Parquet file"
        if opened.head.startswith((ARROW_FILE, ARROW_STREAM)):
            return "an Arrow file"
    if rules.input_format == "parquet":
        raise UserError(f"{shown_name(name)} is neither a Parquet nor an Arrow file", "leave --input-format out, or name another file")
    return None


def _refuse_archives(name: str, opened: OpenStream) -> None:
    for magic, kind in ARCHIVES.items():
        if opened.head.startswith(magic):
            raise UserError(f"{shown_name(name)} is {kind}", "unpack it; gzip and Zstandard are read as they are")
    if opened.compression and opened.head.startswith((PARQUET, ARROW_FILE)):
        raise UserError(
            f"{shown_name(name)} is a table inside a {opened.compression} archive", "unpack it: such tables are compressed inside"
        )


def _as_text(name: str, opened: OpenStream, rules: TextRules) -> tuple[str, BinaryIO, bytes]:
    """(encoding of the lines, stream, head). A mark at the beginning names a wide encoding; nothing else is guessed."""
    marked = next((encoding for mark, encoding in WIDE_MARKS.items() if opened.head.startswith(mark)), None)
    encoding = rules.encoding or marked or "utf-8"
    if not is_wide(encoding):
        return encoding, opened.stream, opened.head
    wide = io.BufferedReader(Transcoded(opened.stream, encoding))  # type: ignore[type-var]
    with _wide_errors(name, encoding):
        head = wide.peek(1)
    return "utf-8", wide, head  # type: ignore[return-value]


def _text_kind(name: str, head: bytes, rules: TextRules) -> str:
    if rules.input_format in ("csv", "tsv", "text"):
        return rules.input_format
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if begins_array(text) and not _is_array_a_line(text):
        return "json array"
    first = text.partition(b"\n")[0].strip()
    if first.startswith(b"{"):
        return _object_kind(name, first)
    if first.startswith(b"[") or is_json(first):
        return "json lines"
    suffix = next((part for part in reversed(Path(name).suffixes) if part.lower() not in COMPRESSION_SUFFIXES), "").lower()
    if suffix in TABLE_SUFFIXES:
        return TABLE_SUFFIXES[suffix]
    return _table_kind(first, rules) or "json lines"


def _object_kind(name: str, first: bytes) -> str:
    """JSON lines, unless the first line is no object by itself and the file as a whole is one."""
    if is_json(first):
        return "json lines"
    if b"\r" in first and is_json(first.split(b"\r")[0]):
        raise UserError(f"{shown_name(name)} has line ends of CR alone (old Mac)", "convert them to newlines")
    if not Path(name).is_file():
        return "json document" if first == b"{" else "json lines"
    with open_stream(name) as opened:
        data = opened.stream.read(MAX_DOCUMENT_BYTES + 1)
    is_whole = len(data) <= MAX_DOCUMENT_BYTES and b"\n" in data.strip()
    return "json document" if is_whole and is_json(data.removeprefix(BYTE_ORDER_MARK)) else "json lines"


def _is_array_a_line(text: bytes) -> bool:
    """Two lines or more, the first of which is an array by itself: JSON lines whose records are no objects."""
    first, _, rest = text.partition(b"\n")
    return bool(rest.strip()) and is_json(first)


def _table_kind(header: bytes, rules: TextRules) -> str | None:
    """A first line that names a column we know, among others or alone."""
    delimiter = rules.delimiter or guess_delimiter(header)
    names = [part.strip(b'" \r') for part in header.split(delimiter.encode())]
    known = {column.encode() for column in rules.columns}
    return ("tsv" if delimiter == "\t" else "csv") if known.intersection(names) else None


def _described(kind: str, opened: OpenStream, encoding: str, delimiter: str) -> str:
    details = [opened.compression] if opened.compression else []
    if kind == "csv" and delimiter != ",":
        details.append(f"divided by `{delimiter}`")
    if encoding != "utf-8":
        details.append(encoding)
    elif opened.head.startswith(tuple(WIDE_MARKS)):
        details.append("converted to UTF-8")
    return ", ".join([NAMES.get(kind, "plain text, one prompt a line"), *details])  # type: ignore[list-item]


@contextlib.contextmanager
def _wide_errors(name: str, encoding: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{shown_name(name)} is not {encoding.upper()}: {error.reason}", "say which encoding it has with --encoding"
        ) from error


def _decoding_errors(rows: Iterator[Row], name: str) -> Iterator[Row]:
    with _wide_errors(name, "in the encoding that was found or given"):
        yield from rows
