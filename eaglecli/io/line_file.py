"""A JSON-lines file that only grows while a run goes on, and what of it can be kept when the run is taken up again.

A line is written whole: a run that is killed leaves whole lines and at most one torn tail, a disk that is full leaves
whole lines alone. Putting the lines in order, or leaving damaged ones out, is a copy and an atomic rename.
"""

import contextlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

PLACE_FIELDS = 4  # index, sample, start, length
SAMPLE_BITS = 20

_BLOCK = 4096  # places that are Python numbers at a time: those of a million lines would take 150 MB
_MAP_BITS = 16

LineVisitor = Callable[[Mapping[str, Any]], None]


@dataclass
class KeptLines:
    """The good lines of a file: 32 bytes each. `end` is where the file is cut, and appended to."""

    places: "array[int]" = field(default_factory=lambda: array("q"))
    end: int = 0
    num_dropped: int = 0  # lines before `end` that are damaged, or that repeat a key
    has_torn_tail: bool = False

    def __len__(self) -> int:
        return len(self.places) // PLACE_FIELDS

    def table(self) -> np.ndarray:
        """int64 [lines, 4]: index, sample, start, length, in the order of the file."""
        return np.frombuffer(self.places, dtype=np.int64).reshape(-1, PLACE_FIELDS)


def line_key(index: int, sample: int) -> int:
    """(index, sample) as one integer."""
    return index << SAMPLE_BITS | sample


def read_kept_lines(path: Path, visit: LineVisitor) -> KeptLines:
    """Reads a file that a run left behind, shows each good line to `visit`; a file that is not there has no lines.

    Good is a line that ends in a newline, is an object with `index` and `sample` (0 if absent), and is the first of its key.
    """
    kept, seen = KeptLines(), _SeenKeys()
    if not path.exists():
        return kept
    with path.open("rb") as stream:
        for data in stream:
            if not data.endswith(b"\n"):
                kept.has_torn_tail = True
                return kept
            start, kept.end = kept.end, kept.end + len(data)
            line = _parse(data)
            if line is None or not seen.add(line["index"], line.get("sample", 0)):
                kept.num_dropped += 1
                continue
            kept.places.extend((line["index"], line.get("sample", 0), start, len(data)))
            visit(line)
    return kept


def read_in_order(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file in the order of (index, sample), whatever order they were written in. Raises OSError."""
    table = read_kept_lines(path, lambda _: None).table()
    with path.open("rb") as stream:
        for data in _read_places(stream, table[_order(table)]):
            yield json.loads(data)


class _SeenKeys:
    """Pairs of index and sample, one bit each where they lie close together.

    A map of 8 KB holds 65,536 pairs. Samples from 2^w to below 2^(w + 1) share maps, each of 2^(16 - w) indexes, so that many indexes
    with one sample need as little as one index with many samples.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], bytearray] = {}

    def add(self, index: int, sample: int) -> bool:
        """Take note of a pair; False when it was there already."""
        width = max(sample.bit_length() - 1, 0)
        place = index << width | sample & (1 << width) - 1
        key = width, sample >> width, place >> _MAP_BITS
        bits = self._maps.get(key)
        if bits is None:
            bits = self._maps[key] = bytearray(1 << _MAP_BITS - 3)
        low = place & (1 << _MAP_BITS) - 1
        mask = 1 << (low & 7)
        is_new = not bits[low >> 3] & mask
        bits[low >> 3] |= mask
        return is_new


def _read_places(stream: BinaryIO, table: np.ndarray) -> Iterator[bytes]:
    """The lines at the places of `table` int64 [lines, 4], in its order."""
    for first in range(0, len(table), _BLOCK):
        for start, length in table[first : first + _BLOCK, 2:].tolist():
            stream.seek(start)
            yield stream.read(length)


def _order(table: np.ndarray) -> np.ndarray:
    return np.lexsort((table[:, 1], table[:, 0]))


def _parse(data: bytes) -> Mapping[str, Any] | None:
    try:
        line = json.loads(data)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("index"), int) and isinstance(line.get("sample", 0), int) else None


class LineFile:
    """Appends lines and remembers where each record's line lies."""

    def __init__(self, path: Path, kept: KeptLines | None = None) -> None:
        """Goes on after the lines `kept`, cutting off what follows them; None starts an empty file. Raises OSError."""
        self.path = path
        self._lines = KeptLines() if kept is None else kept
        self._stream: BinaryIO = path.open("r+b" if self._lines.end else "wb", buffering=0)  # type: ignore[assignment]
        self._cut_off_tail()

    def append(self, lines: Sequence[tuple[int, int, bytes]]) -> None:
        """Hands lines, (index, sample, line without its newline) each, to the system in one go: a killed run keeps them.

        Raises OSError for the first that does not fit on the disk; those before it are kept.
        """
        try:
            self._append_whole(lines)
        except OSError:
            for line in lines:
                self._append_whole([line])

    def _append_whole(self, lines: Sequence[tuple[int, int, bytes]]) -> None:
        """All lines or none."""
        try:
            self._write_whole(b"".join(data for *_, line in lines for data in (line, b"\n")))
        except OSError:
            with contextlib.suppress(OSError):
                self._cut_off_tail()  # the disk is full: what is left must still be whole lines
            raise
        for index, sample, line in lines:
            self._lines.places.extend((index, sample, self._lines.end, len(line) + 1))
            self._lines.end += len(line) + 1

    def close(self, ordered: bool) -> None:
        """Flushes to disk. With `ordered` the lines are put in the order of (index, sample). A second call does nothing. Raises OSError."""
        if self._stream.closed:
            return
        try:
            os.fsync(self._stream.fileno())
        finally:
            self._stream.close()
        table = self._lines.table()
        order = _order(table) if ordered else np.arange(len(table))
        if self._lines.num_dropped or not np.array_equal(order, np.arange(len(order))):
            replace_with(self.path, self._read(table[order]))

    def _read(self, table: np.ndarray) -> Iterator[bytes]:
        with self.path.open("rb") as source:
            yield from _read_places(source, table)

    def _write_whole(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._stream.write(rest) :]

    def _cut_off_tail(self) -> None:
        if self._stream.seekable():
            self._stream.truncate(self._lines.end)
            self._stream.seek(self._lines.end)


def replace_with(path: Path, parts: Iterable[bytes]) -> None:
    """Writes the parts beside the file, then renames: a reader sees the old or the new file. Leaves nothing behind when it fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
