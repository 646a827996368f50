"""What an earlier run left in its directory, read so that it can be taken up again."""

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglecli.errors import UserError
from eaglecli.io.line_file import SAMPLE_BITS, KeptLines, LineVisitor, line_key, read_kept_lines
from eaglecli.io.run_directory import ERRORS, GENERATIONS, MANIFEST, STATS
from eaglecli.io.run_identity import START_ANEW, RunIdentity, identity_from_json


@dataclass(frozen=True, eq=False)
class EarlierRun:
    """A manifest that names a run."""

    path: Path
    manifest: Mapping[str, Any]
    identity: RunIdentity

    @property
    def has_results(self) -> bool:
        """Whether anything would be lost by starting anew."""
        files = [self.path / name for name in (GENERATIONS, ERRORS)]
        return any(file.exists() and file.stat().st_size > 0 for file in files)

    @property
    def exit_code(self) -> int | None:
        """The code that it ended with, if it came to its end."""
        return self.manifest["exit_code"] if self.manifest["status"] == "complete" else None

    def read_stats(self) -> dict[str, Any]:
        """Its stats.json, or an empty object."""
        try:
            return json.loads((self.path / STATS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def find_earlier_run(path: Path) -> EarlierRun | None:
    """The run that a directory holds, or None. Raises UserError when its manifest cannot be used."""
    file = path / MANIFEST
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        identity = identity_from_json(manifest["identity"])
        manifest["status"], manifest["exit_code"]  # noqa: B018  (both are needed later)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read as the manifest of a run: {error!r}"[:300], START_ANEW) from error
    return EarlierRun(path, manifest, identity)


@dataclass(frozen=True, eq=False)
class DoneRecords:
    """Which results are there already. Memory: 8 bytes a line."""

    keys: "array[int]"  # ascending, of answers and of samples that failed
    failed_indexes: frozenset[int]  # of records that failed as a whole

    def has(self, index: int, sample: int = 0) -> bool:
        """Whether this sample was generated, or it or its record has failed."""
        if index in self.failed_indexes:
            return True
        place = bisect_left(self.keys, line_key(index, sample))
        return place < len(self.keys) and self.keys[place] == line_key(index, sample)


@dataclass(frozen=True, eq=False)
class KeptResults:
    """The lines of an earlier run that stay."""

    answers: KeptLines
    errors: KeptLines
    done: DoneRecords

    @property
    def num_answers(self) -> int:
        """Answers that stay."""
        return len(self.answers)

    @property
    def num_errors(self) -> int:
        """Error records that stay."""
        return len(self.errors)


def no_results() -> KeptResults:
    """Of a run that begins."""
    return KeptResults(KeptLines(), KeptLines(), DoneRecords(array("q"), frozenset()))


def read_results(path: Path, retry_failed: bool, visit_answer: LineVisitor, visit_error: LineVisitor) -> KeptResults:
    """Reads the result files of an earlier run. With `retry_failed` its error records count as not done. Raises UserError."""
    failed_indexes = set()

    def visit(line: Mapping[str, Any]) -> None:
        visit_error(line)
        if "sample" not in line:
            failed_indexes.add(line["index"])

    try:
        answers = read_kept_lines(path / GENERATIONS, visit_answer)
        errors = KeptLines() if retry_failed else read_kept_lines(path / ERRORS, visit)
    except OSError as error:
        raise UserError(f"the results in {path} cannot be read: {error.strerror or error}", START_ANEW) from error
    table = np.concatenate([answers.table(), errors.table()])
    keys = array("q", np.sort(table[:, 0] << SAMPLE_BITS | table[:, 1]).tobytes())
    return KeptResults(answers, errors, DoneRecords(keys, frozenset(failed_indexes)))
