"""What `--input` names: paths, globs, `-` for standard input, folders of saved data sets, hub names. Checked before anything is read."""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path

from eaglecli.errors import UserError
from eaglecli.io.byte_streams import STANDARD_INPUT
from eaglecli.io.dataset_rows import HUB_PREFIX, is_saved_dataset

USE_INPUT = "use -i FILE, with one JSON object holding `prompt` or `messages` on each line, or another format that --help names"


def expand_inputs(values: Sequence[str], option: str = "--input") -> tuple[str, ...]:
    """The sources in the order in which they are read: as given to `option`, the files of a glob sorted. Raises UserError."""
    if not values:
        raise UserError("no input is named", USE_INPUT)
    names = tuple(name for value in values for name in _expand(value, option))
    if names.count(STANDARD_INPUT) > 1:
        raise UserError("standard input is named twice", "it can be read once")
    return names


def can_be_read_again(name: str) -> bool:
    """Whether a first pass over the source is possible: pipes and hub streams are read once."""
    return name != STANDARD_INPUT and not name.startswith(HUB_PREFIX) and (Path(name).is_file() or Path(name).is_dir())


def _expand(value: str, option: str) -> list[str]:
    if value == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("standard input is a terminal: there is nothing to read", "pipe a file into it, or name one: -i FILE")
        return [value]
    if value.startswith(HUB_PREFIX):
        if not value.removeprefix(HUB_PREFIX).partition(":")[0].strip("/"):
            raise UserError(f"{option} {value} names no data set", "write hf://owner/name or hf://owner/name:split")
        return [value]
    path = Path(value)
    if path.is_dir():
        if not is_saved_dataset(path):
            raise UserError(f"{option} {value} is a directory", f"name files, or a pattern in quotes: {option} '{path / '*.jsonl'}'")
        return [value]
    if path.exists():
        return [value]
    if glob.has_magic(value):
        found = sorted(name for name in glob.glob(value, recursive=True) if Path(name).is_file())
        if not found:
            raise UserError(f"{option} {value} matches no file", "check the pattern")
        return found
    raise UserError(f"{option} {value} does not exist", "check the path")
