"""A JSON array of records, read element by element: memory holds one element, and a bad one spoils nothing but itself.

Elements are cut apart by looking at brackets, commas and strings alone; each is then parsed as a line of a JSONL file is.
"""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from eaglecli.errors import UserError
from eaglecli.io.lines import BYTE_ORDER_MARK, Line

CHUNK_BYTES = 1 << 18
STRUCTURE = re.compile(rb'["\[\]{},]')
IN_STRING = re.compile(rb'["\\]')
OPENING, CLOSING = b"[{", b"]}"


class _Cutter:
    """Finds where elements begin and end in bytes that come in chunks."""

    def __init__(self) -> None:
        self.data = bytearray()  # bytes of the element that is being read
        self.scanned = 0  # how far into `data`
        self.depth = 0  # brackets open, that of the array itself not counted
        self.in_string = False
        self.closed = False
        self.offset = 0  # of data[0] in the file
        self.line = 1  # physical line of data[0]

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Takes bytes behind the array's opening bracket; yields elements as they are complete."""
        self.data += chunk
        while not self.closed and (found := (IN_STRING if self.in_string else STRUCTURE).search(self.data, self.scanned)):
            mark, at = found[0], found.start()
            self.scanned = at + 1
            if self.in_string:
                if mark == b'"':
                    self.in_string = False
                elif at + 1 < len(self.data):
                    self.scanned = at + 2  # the character behind a backslash
                else:
                    self.scanned = at  # looked at again with the next chunk
                    return
            elif mark == b'"':
                self.in_string = True
            elif mark in OPENING:
                self.depth += 1
            elif mark in CLOSING and self.depth:
                self.depth -= 1
            elif self.depth == 0:
                self.closed = mark == b"]"
                yield from self._cut(at, is_last=self.closed)
        self.scanned = max(self.scanned, len(self.data)) if not self.closed else self.scanned

    def _cut(self, end: int, is_last: bool) -> Iterator[Line]:
        text = bytes(self.data[:end])
        lead = len(text) - len(text.lstrip())
        if text.strip() or not is_last:  # nothing stands before the bracket of an empty array
            yield Line(text.strip(), self.line + text.count(b"\n", 0, lead), self.offset + lead)
        self.line += self.data.count(b"\n", 0, end + 1)
        self.offset += end + 1
        del self.data[: end + 1]
        self.scanned = 0


def split_array(stream: BinaryIO, name: str, digest: Any = None) -> Iterator[Line]:
    """Elements of the array that the stream holds, as if each were one line.

    Raises UserError when the array breaks off, or when something follows it.
    """
    cutter = _Cutter()
    opened = False
    while chunk := stream.read(CHUNK_BYTES):
        if digest is not None:
            digest.update(chunk)
        if not opened:
            start = chunk.index(b"[") + 1
            opened = True
            cutter.offset, cutter.line = start, 1 + chunk.count(b"\n", 0, start)
            chunk = chunk[start:]
        if cutter.closed:
            cutter.data += chunk
        else:
            yield from cutter.feed(chunk)
        if cutter.closed and cutter.data.strip():
            raise UserError(f"{name}, line {cutter.line}: text follows the end of the JSON array", "one file holds one array")
    if not cutter.closed:
        raise UserError(
            f"{name}, line {cutter.line}: the JSON array breaks off inside its last record", "mend the end of the file: `]` is missing"
        )


def begins_array(head: bytes) -> bool:
    """Whether a file whose first bytes these are holds one array (and not one array a line)."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
