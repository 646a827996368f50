"""generations.parquet: the lines of generations.jsonl as a table, one row an answer.

Ids and other values that may be of any type are kept as JSON text. The draft's statistics keep their counts alone.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eaglecli.io.run_directory import GENERATIONS, PARQUET

ROWS_PER_GROUP = 1000
JSON_COLUMNS = ("id", "stop_reason", "turns", "logprobs", "input")
SPEC_COUNTS = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_num_cut_tokens")


def write_parquet(folder: Path, model: str) -> None:  # noqa: ARG001  (one signature for all formats)
    """Writes the table in groups of rows, so that memory stays bounded. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(pa)
    path = folder / PARQUET
    temporary = folder / f".{PARQUET}.tmp"
    try:
        with pq.ParquetWriter(temporary, schema) as writer:
            for rows in _groups(folder / GENERATIONS):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _schema(pa: Any) -> Any:
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    return pa.schema(
        {
            "id": text,
            "index": whole,
            "file": text,
            "line": whole,
            "sample": whole,
            "text": text,
            "turns": text,
            "token_ids": pa.list_(pa.int32()),
            "finish_reason": text,
            "stop_reason": text,
            "logprobs": text,
            "prompt_tokens": whole,
            "completion_tokens": whole,
            "spec": pa.struct({**dict.fromkeys(SPEC_COUNTS, whole), "accept_length": real}),
            "seed": whole,
            "queue_s": real,
            "ttft_s": real,
            "e2e_s": real,
            "input": text,
        }
    )


def _groups(path: Path) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for line in lines:
            rows.append(_row(json.loads(line)))
            if len(rows) == ROWS_PER_GROUP:
                yield rows
                rows = []
    yield rows


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    as_json = {name: json.dumps(line[name], ensure_ascii=False) if line.get(name) is not None else None for name in JSON_COLUMNS}
    return {**line, **line["usage"], **line["timing"], **as_json}
