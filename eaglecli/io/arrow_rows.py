"""Parquet and Arrow files by pyarrow, a batch of rows at a time. Values keep their types; `line` is the number of the row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglecli.errors import UserError
from eaglecli.io.rows import Row, excerpt_of

BATCH_ROWS = 256
HASH_BLOCK_BYTES = 1 << 20


def read_parquet(path: Path, digest: Any = None) -> Iterator[Row]:
    """Every row of a Parquet file. Raises UserError for a broken one."""
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        with ParquetFile(path) as file:
            yield from file.iter_batches(BATCH_ROWS, use_threads=False)

    _feed(path, digest)
    return _rows(batches(), path)


def read_arrow(path: Path, digest: Any = None) -> Iterator[Row]:
    """Every row of an Arrow file, in its random-access form or its stream form. Raises UserError for a broken one."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                file = pa.ipc.open_file(source)
                yield from (file.get_batch(number) for number in range(file.num_record_batches))
            else:
                source.seek(0)
                yield from pa.ipc.open_stream(source)

    _feed(path, digest)
    return _rows(batches(), path)


def rows_of_batches(batches: Iterator[Any], name: str) -> Iterator[Row]:
    """Rows of record batches, small pieces at a time so that a large batch is never a list of objects as a whole."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for fields in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield Row(name, number, None, excerpt_of(fields), fields)


def _rows(batches: Iterator[Any], path: Path) -> Iterator[Row]:
    import pyarrow as pa

    try:
        yield from rows_of_batches(batches, str(path))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path} cannot be read as a table: {' '.join(str(error).split())[:300]}", "write the file anew") from error


def _feed(path: Path, digest: Any) -> None:
    if digest is None:
        return
    with path.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
