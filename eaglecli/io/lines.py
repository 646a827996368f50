"""Bytes of an input file to physical lines, split on the newline byte alone, with their offsets; gzip is seen by its first bytes.

A file that is no JSON lines at all is refused here with one sentence, so that it does not end as an error per line.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eaglecli.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
OTHER_FORMATS = {
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "encoded in UTF-16",
    b"\xfe\xff": "encoded in UTF-16",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard",
    b"PK\x03\x04": "a zip archive",
    b"ARROW1": "an Arrow file",
}
OTHER_SUFFIXES = {".csv": "a CSV table", ".tsv": "a TSV table", ".txt": "plain text", ".parquet": "a Parquet file"}
MAX_WHOLE_DOCUMENT_BYTES = 1 << 24  # a first line that is no JSON makes us look at the file as one document, if it is this small
CONVERT_HINT = "the input must be JSON lines in UTF-8: one object with `prompt` or `messages` on each line"


@dataclass(frozen=True)
class Line:
    """One physical line without its newline; `number` from 1, `byte_offset` in the (decompressed) file."""

    data: bytes
    number: int
    byte_offset: int


def read_lines(path: Path, digest: "hashlib._Hash | None" = None) -> Iterator[Line]:
    """Yields every line that is not blank. Feeds all bytes read to `digest`.

    Raises UserError for a file that is missing, unreadable, broken, or of another format.
    """
    try:
        with _open(path) as stream:
            yield from _split(stream, digest)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a broken gzip archive: {error}", "unpack what can be saved of it and give that file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def check_format(path: Path) -> None:
    """Raises UserError when the first bytes or the first record show that the file is no JSON lines."""
    kind = OTHER_SUFFIXES.get(path.suffix.lower())
    if kind:
        raise UserError(f"{path} looks like {kind} by its name", CONVERT_HINT)
    try:
        with _open(path) as stream:
            head = stream.read(8)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a broken gzip archive: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "check the path given to --input") from error
    for magic, kind in OTHER_FORMATS.items():
        if head.startswith(magic):
            raise UserError(f"{path} is {kind}", CONVERT_HINT)
    first = next(read_lines(path), None)
    if first is not None:
        _check_first_record(path, first)


def _open(path: Path) -> BinaryIO:
    stream = path.open("rb")
    is_gzip = stream.read(2) == GZIP_MAGIC
    stream.seek(0)
    return gzip.GzipFile(fileobj=stream) if is_gzip else stream  # type: ignore[return-value]


def _split(stream: BinaryIO, digest: "hashlib._Hash | None") -> Iterator[Line]:
    byte_offset = 0
    for number, data in enumerate(stream, start=1):
        if digest is not None:
            digest.update(data)
        start, length = byte_offset, len(data)
        byte_offset += length
        if number == 1 and data.startswith(BYTE_ORDER_MARK):
            data, start = data[3:], 3
        data = data.rstrip(b"\r\n")
        if not _is_blank(data):
            yield Line(data, number, start)


def _is_blank(data: bytes) -> bool:
    """Blank as a person sees it: a line of no-break spaces is blank too."""
    visible = data.strip()
    if not visible:
        return True
    return visible[0] > 0x7F and not visible.decode("utf-8", errors="replace").strip()


def _check_first_record(path: Path, first: Line) -> None:
    if first.data.lstrip().startswith(b"["):
        raise UserError(f"{path} is a JSON array (line {first.number} begins with `[`)", CONVERT_HINT)
    if _is_json(first.data):
        return
    if b"\r" in first.data and _is_json(first.data.split(b"\r")[0]):
        raise UserError(f"{path} has line ends of CR alone (old Mac)", f"convert them to newlines; {CONVERT_HINT}")
    document = _whole_document(path)
    if isinstance(document, dict):
        holders = [name for name, value in document.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
        inside = f" that holds its records under the key `{holders[0]}`" if holders else ""
        raise UserError(f"{path} is one JSON object over several lines{inside}", CONVERT_HINT)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _whole_document(path: Path) -> Any:
    """The file as one JSON value, or None when it is none or too large to look at."""
    try:
        with _open(path) as stream:
            data = stream.read(MAX_WHOLE_DOCUMENT_BYTES + 1)
        return json.loads(data.removeprefix(BYTE_ORDER_MARK)) if len(data) <= MAX_WHOLE_DOCUMENT_BYTES else None
    except (ValueError, RecursionError, EOFError, OSError, zlib.error):
        return None
