"""From a path or standard input to a stream of plain bytes: compression is seen by the first bytes, and the head can be looked at.

gzip is read by the standard library (all members), Zstandard by pyarrow (all frames): Python 3.11 has no reader of its own.
"""

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eaglecli.errors import UserError

STANDARD_INPUT = "-"
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 18


class PeekedStream(io.RawIOBase):
    """A stream whose first bytes (`head`) were read to see what it is; reading gives them first.

    `head` ends with the first line that is not blank, or where the stream pauses to give more than HEAD_BYTES: a slow
    producer is not waited for longer than that.
    """

    def __init__(self, source: Any) -> None:
        self._read_some = getattr(source, "read1", source.read)  # what is there now; an unbuffered stream has `read` alone for that
        self.head = self._read_head()
        self._unread = memoryview(self.head)

    def _read_head(self) -> bytes:
        head = b""
        while len(head) < HEAD_BYTES and b"\n" not in head.lstrip():
            chunk = self._read_some(HEAD_BYTES)
            if not chunk:
                break
            head += chunk
        return head

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer` as far as one read of the source goes."""
        if self._unread:
            count = min(len(buffer), len(self._unread))
            buffer[:count] = self._unread[:count]
            self._unread = self._unread[count:]
            return count
        data = self._read_some(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@dataclass(frozen=True, eq=False)
class OpenStream:
    """Decompressed bytes: `head` without moving on, `stream` from the start."""

    head: bytes
    stream: BinaryIO
    compression: str | None  # "gzip" or "zstd"


@contextmanager
def open_stream(name: str) -> Iterator[OpenStream]:
    """Opens a file, a pipe, or standard input (`-`). Raises UserError for what is missing, unreadable or a broken archive."""
    with readable_errors(name), _open_raw(name) as raw:
        packed = PeekedStream(raw)
        plain, compression = _decompressed(packed)
        peeked = packed if plain is None else PeekedStream(plain)
        yield OpenStream(peeked.head, io.BufferedReader(peeked, BLOCK_BYTES), compression)  # type: ignore[arg-type]


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Inside, failures of reading `name` become one sentence."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{shown_name(name)} is a broken gzip archive: {error}", "unpack what can be saved of it and give that") from error
    except OSError as error:
        if error.strerror is None and error.errno is None:  # pyarrow's: a sentence and no number
            raise UserError(f"{shown_name(name)} is broken: {error}", "save what can be saved of it and give that") from error
        raise UserError(f"{shown_name(name)} cannot be read: {error.strerror or error}", "check the path given to --input") from error


def shown_name(name: str) -> str:
    """How a source is called in messages."""
    return "standard input" if name == STANDARD_INPUT else name


@contextmanager
def _open_raw(name: str) -> Iterator[Any]:
    if name == STANDARD_INPUT:
        # Left open: it is not ours. Unbuffered where that can be had: a thread that waits inside the buffer of standard
        # input holds its lock, and the interpreter aborts when it ends meanwhile.
        yield getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
    else:
        with Path(name).open("rb") as stream:
            yield stream


def _decompressed(packed: PeekedStream) -> tuple[Any, str | None]:
    if packed.head.startswith(GZIP_MAGIC):
        return gzip.GzipFile(fileobj=io.BufferedReader(packed, BLOCK_BYTES)), "gzip"
    if packed.head.startswith(ZSTD_MAGIC):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), "zstd"), BLOCK_BYTES), "zstd"
    return None, None
