"""Stops a run of `eaglecli generate` in the middle three times - kill -9, SIGINT, SIGTERM - and takes it up again each time.

    python -m benchmarks.kill_and_resume mt_bench.jsonl --config smollm2-135m --max-running-requests 4 --max-new-tokens 256

Every option behind the input file goes to `generate`. Printed: seconds from each signal to the end and the exit codes, and in how many
answers the resumed run differs from one that was left alone. Ids must be the same (exit code 7 if not), texts in float32 too; in bfloat16
another batch may round a near-tie otherwise, and their number is what is to be known.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from eaglecli.errors import ExitCode

STOPS = ((signal.SIGKILL, 0.25), (signal.SIGINT, 0.5), (signal.SIGTERM, 0.75))  # at which share of the answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for every stop and one for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    options, passed_on = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        whole, stopped = Path(folder, "whole"), Path(folder, "stopped")
        command = [sys.executable, "-m", "eaglecli", "generate", "-i", str(options.input), *passed_on]
        subprocess.run([*command, "-o", str(whole)], check=True)
        expected = read_texts(whole)
        for number, share in STOPS:
            stop_at([*command, "-o", str(stopped)], stopped, number, int(share * len(expected)))
        subprocess.run([*command, "-o", str(stopped)], check=True)
        found = read_texts(stopped)
    differing = sum(found.get(key) != text for key, text in expected.items())
    print(f"{len(expected)} answers, the same ids: {found.keys() == expected.keys()}, {differing} differ in text", flush=True)
    return ExitCode.OK if found.keys() == expected.keys() else ExitCode.CHECK_FAILED


def stop_at(command: Sequence[str], run: Path, number: signal.Signals, num_answers: int) -> None:
    """Start the command, send it the signal once the run's file holds so many answers, and wait for its end."""
    process = subprocess.Popen(command)
    while process.poll() is None and count_lines(run) < num_answers:
        time.sleep(0.002)
    held = count_lines(run)
    sent = time.perf_counter()
    process.send_signal(number)
    code = process.wait()
    print(f"{number.name} with {held} answers written: ended {time.perf_counter() - sent:.2f} s later with code {code}", flush=True)


def count_lines(run: Path) -> int:
    """Lines of its answers, whole ones."""
    path = run / "generations.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_texts(run: Path) -> dict[tuple[str, int], str]:
    """Text by (id, sample)."""
    lines = map(json.loads, (run / "generations.jsonl").read_text(encoding="utf-8").splitlines())
    return {(str(line["id"]), line["sample"]): line["text"] for line in lines}


if __name__ == "__main__":
    raise SystemExit(main())
