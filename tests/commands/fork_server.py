"""Starts whole-program runs in a fraction of a second: a process that has imported everything forks one child per run.

The child is a real process, with signals, exit code and files of its own, so it can be killed at any moment.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class ProgramRun:
    """One child."""

    def __init__(self, server: "ForkServer", pid: int, streams: Path) -> None:
        self.server, self.pid, self._streams = server, pid, streams
        self.started = time.perf_counter()

    def send(self, signal_number: int) -> None:
        try:
            os.kill(self.pid, signal_number)
        except ProcessLookupError:
            return  # it has ended already

    def wait(self) -> int:
        """Exit code, negative for a signal that ended it."""
        return self.server.ask({"wait": self.pid})["code"]

    @property
    def stdout(self) -> str:
        return (self._streams / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._streams / "stderr").read_text()


class ForkServer:
    """Use as a context manager. Runs are waited for one at a time."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(Path(__file__)), "serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)

    def start(self, arguments: Sequence[str], streams: Path, **limits: Any) -> ProgramRun:
        """Starts `eaglecli ARGUMENTS`; its output goes into the folder `streams`.

        Limits: `file_bytes` (no file may grow beyond), `closed` (the number of a stream whose reader has left).
        """
        streams.mkdir(parents=True, exist_ok=True)
        return ProgramRun(self, self.ask({"run": list(arguments), "streams": str(streams), **limits})["pid"], streams)

    def run(self, arguments: Sequence[str], streams: Path, **limits: Any) -> tuple[int, ProgramRun]:
        child = self.start(arguments, streams, **limits)
        return child.wait(), child

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """The server's loop: one question a line, one answer a line."""
    import torch
    import transformers  # noqa: F401  (the children shall find it imported)

    import eaglecli.commands.generate  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])}
        else:
            pid = os.fork()
            if pid == 0:
                _become_the_program(question)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def _become_the_program(question: dict[str, Any]) -> None:
    import resource

    from eaglecli.cli import main

    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{question['streams']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if "closed" in question:
        reading, writing = os.pipe()
        os.dup2(writing, question["closed"])
        os.close(reading)
        os.close(writing)
    if "file_bytes" in question:
        resource.setrlimit(resource.RLIMIT_FSIZE, (question["file_bytes"], question["file_bytes"]))
    sys.argv = ["eaglecli", *question["run"]]
    main()


if __name__ == "__main__":
    serve()
