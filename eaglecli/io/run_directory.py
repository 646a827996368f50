"""The directory of one run: where it is, whether it may be written, and its small JSON files, replaced atomically."""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from eaglecli.errors import UserError
from eaglecli.io.byte_streams import STANDARD_INPUT
from eaglecli.io.line_file import replace_with

GENERATIONS, ERRORS, STATS, MANIFEST, LOG = "generations.jsonl", "errors.jsonl", "stats.json", "manifest.json", "log.txt"
PARQUET, BATCH_OUTPUT, BATCH_ERRORS = "generations.parquet", "openai_batch_output.jsonl", "openai_batch_errors.jsonl"
BENCH_RESULTS = ("results.jsonl", "bench.json")
BENCH_FILES = (*BENCH_RESULTS, "report.png")
OUR_FILES = (GENERATIONS, ERRORS, STATS, MANIFEST, LOG, PARQUET, BATCH_OUTPUT, BATCH_ERRORS, *BENCH_FILES)
FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".gz")


def default_run_directory(target: str, input_path: Path) -> Path:
    """runs/<target>-<input>, both by their last name."""
    source = "stdin" if str(input_path) == STANDARD_INPUT else input_path.name.split(".")[0]
    name = f"{Path(target).name}-{source}"
    return Path("runs") / "".join(character if character.isalnum() or character in "-_." else "_" for character in name)


def holds_run(path: Path) -> bool:
    """Whether generate or bench left something there."""
    return any((path / name).exists() for name in (MANIFEST, *BENCH_RESULTS))


def check_output(path: Path, input_path: Path, overwrite: bool, takes_up: bool = True) -> None:
    """Refuses an output that cannot or must not be written, before anything is loaded. Changes nothing on disk. Raises UserError.

    `takes_up`: whether the caller goes on with a run of generate that it finds there.
    """
    if path.suffix.lower() in FILE_SUFFIXES:
        raise UserError(f"--output {path} names a file, a run writes a directory", f"use `-o {path.with_suffix('')}`")
    if path.exists() and input_path.exists() and path.samefile(input_path):
        raise UserError(f"--output {path} is the input itself", "name another directory")
    if path.exists() and not path.is_dir():
        raise UserError(f"--output {path} is a file, a run writes a directory", "name another directory")
    if path.is_dir() and input_path.parent.resolve() == path.resolve() and input_path.name in OUR_FILES:
        raise UserError(f"--output {path} would overwrite the input {input_path}", "name another directory")
    goes_on = takes_up and (path / MANIFEST).exists()
    if path.is_dir() and not overwrite and not goes_on and {item.name for item in path.iterdir()} - {LOG}:
        found = "holds an earlier run" if holds_run(path) else "is not empty and holds no run"
        raise UserError(f"--output {path} {found}", "use --overwrite to start anew, or name another directory")
    holder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not os.access(holder, os.W_OK | os.X_OK):
        raise UserError(f"--output {path} cannot be written: no permission in {holder}", "name another directory with -o")


class RunDirectory:
    """An open run directory; one process holds it at a time. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Creates the directory if need be and takes its lock, which a killed process does not keep. Raises UserError."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.log: TextIO = (path / LOG).open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror or error}", "name another directory with -o") from error
        try:
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.log.close()
            raise UserError(f"--output {path} is being written by another run", "wait for it, or name another directory") from None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk: the log is not what matters then
            self.log.close()

    def clear(self) -> None:
        """Removes the files of an earlier run, and no others."""
        self.log.truncate(0)
        for name in OUR_FILES:
            if name != LOG:
                (self.path / name).unlink(missing_ok=True)

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Replaces one file as a whole: a reader sees the old or the new one. Raises OSError."""
        text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False, default=str)
        replace_with(self.path / name, [text.encode("utf-8", errors="backslashreplace"), b"\n"])
