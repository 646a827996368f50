"""Memory and time of the whole command by number of records: does what it holds grow with the input?

    python -m benchmarks.million_records                       1,000 and 1,000,000 short records through a tiny model
    python -m benchmarks.million_records --records 1000 50000

Each run is a process of its own; `peak` is its largest resident set, growth is against the first. The bar: less than 200 MB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tests.fixtures import write_cycle

GROWTH_LIMIT_MB = 200


@dataclass(frozen=True)
class CommandRun:
    """One process of `eaglecli generate`."""

    peak_mb: float
    seconds: float
    cpu_seconds: float
    stats: dict


def write_records(path: Path, count: int) -> None:
    """Short prompts with ids of their own."""
    with path.open("w") as stream:
        stream.writelines(json.dumps({"id": f"mine-{number}", "prompt": f"Prompt {number}"}) + "\n" for number in range(count))


def run_command(folder: Path, target: Path, count: int, device: str, more: Sequence[str] = ()) -> CommandRun:
    """Generate two tokens for each of `count` records."""
    source, output = folder / f"{count}.jsonl", folder / f"run-{count}"
    write_records(source, count)
    options = ["--device", device, "--context-length", "128", "--max-new-tokens", "2", "--max-running-requests", "256"]
    quiet = ["--no-apply-chat-template", "--chunked-prefill-size", "4096", "--progress", "none", "-q"]
    command = [
        sys.executable,
        "-m",
        "eaglecli",
        "generate",
        "--target",
        str(target),
        "--draft",
        "none",
        "-i",
        str(source),
        "-o",
        str(output),
    ]
    started = perf_counter()
    process = subprocess.Popen([*command, *options, *quiet, *more])
    _, status, usage = os.wait4(process.pid, 0)
    seconds = perf_counter() - started
    if status:
        raise SystemExit(f"the command ended with status {os.waitstatus_to_exitcode(status)}")
    stats = json.loads((output / "stats.json").read_text())
    assert stats["counts"]["successful_requests"] == count, "a record is missing"
    return CommandRun(usage.ru_maxrss / 1024, seconds, usage.ru_utime + usage.ru_stime, stats)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)
    first: CommandRun | None = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_cycle(folder / "models").target_dir
        for count in options.records:
            run = run_command(folder, target, count, options.device)
            first = first or run
            growth = run.peak_mb - first.peak_mb
            print(
                f"{count:>9} records: peak {run.peak_mb:7.0f} MB, growth {growth:+6.0f} MB, {run.seconds:7.1f} s,"
                f" {run.cpu_seconds / count * 1e6:7.0f} us of CPU time a record",
                flush=True,
            )
            if growth > GROWTH_LIMIT_MB:
                raise SystemExit(f"growth above {GROWTH_LIMIT_MB} MB")


if __name__ == "__main__":
    main()
