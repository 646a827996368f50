"""Bytes to physical lines, split on the newline byte alone, with their offsets, and lines to text."""

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from eaglecli.io.records import RecordFault

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WIDE_ENCODINGS = ("utf-16", "utf-32")  # a newline is not one byte in them


@dataclass(frozen=True)
class Line:
    """One physical line without its line end; `number` from 1, `byte_offset` in the (decompressed) file, None if not known."""

    data: bytes
    number: int
    byte_offset: int | None


def split_lines(stream: BinaryIO, digest: Any = None) -> Iterator[Line]:
    """Every line that is not blank; blank ones are counted in the numbers. Feeds all bytes read to `digest`."""
    byte_offset = 0
    for number, data in enumerate(stream, start=1):
        if digest is not None:
            digest.update(data)
        start, length = byte_offset, len(data)
        byte_offset += length
        if number == 1 and data.startswith(BYTE_ORDER_MARK):
            data, start = data[3:], 3
        data = data.rstrip(b"\r\n")
        if not is_blank_line(data):
            yield Line(data, number, start)


def is_blank_line(data: bytes) -> bool:
    """Blank as a person sees it: a line of no-break spaces is blank too, and so is one of separators that nobody sees."""
    visible = data.strip()
    if not visible:
        return True
    return not 0x20 < visible[0] < 0x7F and not visible.decode("utf-8", errors="replace").strip()


def decode_line(line: Line, encoding: str) -> str:
    """The text of a line. Raises RecordFault "encoding" with the byte that is wrong."""
    try:
        return line.data.decode(encoding)
    except UnicodeDecodeError as error:
        bad = line.data[error.start]
        if line.byte_offset is None:
            raise RecordFault("encoding", f"not {encoding.upper()}: byte 0x{bad:02x}") from None
        at = line.byte_offset + error.start
        raise RecordFault("encoding", f"not {encoding.upper()}: byte 0x{bad:02x} at byte {at} of the file", at) from None


def is_wide(encoding: str) -> bool:
    """Whether text in this encoding must be converted before it can be split into lines."""
    return codecs.lookup(encoding).name.startswith(WIDE_ENCODINGS)


class Transcoded(io.RawIOBase):
    """A stream in a wide encoding, converted to UTF-8 while it is read. Raises UnicodeDecodeError from `read`."""

    def __init__(self, source: BinaryIO, encoding: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer` with UTF-8; 0 at the end."""
        while not self._ready:
            data = self._source.read(len(buffer))
            self._ready = self._decoder.decode(data, final=not data).encode("utf-8", errors="surrogatepass")
            if not data:
                break
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
