"""Other forms of the results, made from generations.jsonl and errors.jsonl when a run has come to its end."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from eaglecli.errors import ExitCode, UserError
from eaglecli.io.openai_batch_output import write_openai_batch
from eaglecli.io.parquet_output import write_parquet

WRITERS: Mapping[str, Callable[[Path, str], None]] = {"openai-batch": write_openai_batch, "parquet": write_parquet}


def check_output_format(output_format: str) -> None:
    """Raises UserError when a package that the format needs is not there: before the run, not at its end."""
    if output_format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("--output-format parquet needs the package pyarrow, which is not installed", "pip install pyarrow")


def write_output_format(output_format: str, folder: Path, model: str) -> None:
    """Makes the files of one format; `jsonl` is there already. `model` is the target's name. Raises UserError."""
    write = WRITERS.get(output_format)
    if write is None:
        return
    try:
        write(folder, model)
    except OSError as error:
        hint = f"all results are in {folder / 'generations.jsonl'}; the same command tries again"
        raise UserError(f"the {output_format} output cannot be written: {error.strerror or error}", hint, ExitCode.INTERNAL) from error
