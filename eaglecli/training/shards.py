"""JSON lines in numbered, compressed shards: each is written whole and renamed into place, so a killed run leaves good ones."""

import gzip
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eaglecli.errors import UserError

_RECORDS_PER_SHARD = 4096
_SECONDS_PER_SHARD = 60.0  # a slow machine must not lose an hour's work either
_SUFFIX = ".jsonl.gz"


class ShardStore:
    """Records of one kind in one folder; `add` them, `flush` at the end, `read` them back in the order of writing."""

    def __init__(self, folder: Path, name: str) -> None:
        """Shards are called <name>-00000.jsonl.gz and so on; the folder is made if need be."""
        self._folder, self._name = folder, name
        self._waiting: list[Mapping[str, Any]] = []
        self._flushed_s = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._next = 1 + max((int(path.name.removesuffix(_SUFFIX).rsplit("-", 1)[1]) for path in self.paths), default=-1)

    @property
    def paths(self) -> list[Path]:
        """The shards that are there, in order."""
        return sorted(self._folder.glob(f"{self._name}-[0-9][0-9][0-9][0-9][0-9]{_SUFFIX}"))

    def read(self) -> Iterator[dict[str, Any]]:
        """All records that were written. Raises UserError for a shard that cannot be read."""
        for path in self.paths:
            try:
                with gzip.open(path, "rt", encoding="utf-8") as lines:
                    for line in lines:
                        yield json.loads(line)
            except (OSError, EOFError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {error}", "delete this shard; what it held is made again") from error

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a record; it is on disk after the next flush, which comes by itself now and then."""
        self._waiting.append(record)
        if len(self._waiting) >= _RECORDS_PER_SHARD or time.monotonic() - self._flushed_s >= _SECONDS_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one shard."""
        self._flushed_s = time.monotonic()
        if not self._waiting:
            return
        path = self._folder / f"{self._name}-{self._next:05d}{_SUFFIX}"
        unfinished = path.with_name(path.name + ".part")
        with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=4) as lines:
            lines.writelines(json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n" for record in self._waiting)
        os.replace(unfinished, path)
        self._next += 1
        self._waiting = []
