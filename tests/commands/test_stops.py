"""What stops a run: signals in every phase, a full disk, an output that cannot be written, readers that leave, too many errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from eaglecli.engine.request import Completion
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.line_file import LineFile
from eaglecli.io.run_directory import RunDirectory
from eaglecli.io.signals import Interrupted, interruptible
from tests.commands.program import Program, ScriptedModels, answered, lines, scripted_run, write_records
from tests.fixtures import write_cycle

SIGNALS = [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


def send(number: int) -> None:
    """To this process; the signal is handled while it sleeps, or else the run goes on and ends with another code."""
    os.kill(os.getpid(), number)
    time.sleep(1)


def status(folder: Path) -> str:
    return json.loads((folder / "run" / "manifest.json").read_text())["status"]


def finished(folder: Path) -> list[int]:
    path = folder / "run" / "generations.jsonl"
    return sorted(line["index"] for line in lines(path)) if path.exists() else []


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("phase", ["load", "decode", "final write", "reports"])
def test_a_signal_in_any_phase_stops_the_run_which_can_be_taken_up(tmp_path, pair, monkeypatch, phase, number, code):
    """B71: the code says which signal, finished lines are there, the same command finishes the rest."""
    before = signal.getsignal(number)

    def respond(request):
        if phase == "decode" and request.key.index == 2:
            send(number)
        return answered(request, f"answer {request.key.index}".encode())

    def interrupted_close(self, ordered):
        if ordered:
            send(number)

    def interrupted_json(self, name, document):
        if document.get("status") == "complete":
            send(number)
        write_json(self, name, document)

    write_json = RunDirectory.write_json
    models = ScriptedModels(pair.target_dir, respond, lambda: send(number) if phase == "load" else None)
    with monkeypatch.context() as patch:
        if phase == "final write":
            patch.setattr(LineFile, "close", interrupted_close)
        if phase == "reports":
            patch.setattr(RunDirectory, "write_json", interrupted_json)
        result = scripted_run(tmp_path, models, num_records=5)
    assert result.exit_code == code
    assert finished(tmp_path) == {"load": [], "decode": [0, 1]}.get(phase, [0, 1, 2, 3, 4])
    assert status(tmp_path) == ("running" if phase == "reports" else "interrupted")
    assert signal.getsignal(number) is before
    assert scripted_run(tmp_path, ScriptedModels(pair.target_dir, answered)).exit_code == 0
    assert finished(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_process_ends_with_its_code_and_the_same_command_goes_on(server, pair, tmp_path, number, code):
    """B71, with a real process that is prefilling long prompts in small pieces."""
    records = [{"id": n, "prompt": "long " * 30} for n in range(16)]
    program = Program(pair, write_records(tmp_path / "input.jsonl", records), tmp_path / "run")
    child = server.start(program.arguments("--chunked-prefill-size", "16", "--max-running-requests", "2"), tmp_path / "streams")
    while not (program.output / "generations.jsonl").exists() or not program.lines():
        time.sleep(0.02)
    child.send(number)
    assert child.wait() == code
    assert "Traceback" not in child.stderr
    num_finished = len(program.lines())
    assert num_finished < 16
    assert program.run().exit_code == 0
    assert [line["index"] for line in program.lines()] == list(range(16))


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_before_anything_was_read_has_its_code_too(pair, tmp_path, number, code):
    """B71, while the program imports what it needs: sent when the module of the command is asked for."""
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), tmp_path / "run")
    start = (
        "import builtins, os, sys, time\nfrom eaglecli.cli import main\nimport_module = builtins.__import__\n"
        "def interrupted(name, *more, **named):\n"
        f"    if name == 'eaglecli.commands.generate':\n        os.kill(os.getpid(), {int(number)}); time.sleep(5)\n"
        "    return import_module(name, *more, **named)\n"
        f"builtins.__import__ = interrupted\nsys.argv = ['eaglecli', *{program.arguments()!r}]\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", start], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert not program.output.exists()


def test_the_second_signal_ends_the_process_at_once(tmp_path):
    code = (
        "import os, signal, time\nfrom eaglecli.io.signals import Interrupted, interruptible\n"
        "try:\n    with interruptible():\n        os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "except Interrupted:\n    pass\n"
    )
    inside = code.replace("time.sleep(9)\n", "time.sleep(9)\n", 1).replace(
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n",
        "        try:\n            os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "        finally:\n            os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n",
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=20).returncode == 0
    assert subprocess.run([sys.executable, "-c", inside], check=False, timeout=20).returncode == -signal.SIGINT


SWALLOWED = "try:\n            os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n        except BaseException:\n            "


@pytest.mark.parametrize("after", ["pass", "raise ValueError('another')", "raise", "return"])
def test_a_signal_that_is_swallowed_on_the_way_is_raised_at_the_end(after):
    code = (
        "import os, signal, time\nfrom eaglecli.io.signals import Interrupted, interruptible\n"
        f"def run():\n    with interruptible():\n        {SWALLOWED}{after}\n"
        "try:\n    run()\nexcept Interrupted as interrupted:\n    raise SystemExit(int(interrupted.exit_code))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=20).returncode == ExitCode.INTERRUPTED


@pytest.mark.parametrize("becomes", [None, ImportError])
@pytest.mark.parametrize("phase", ["load", "decode"])
def test_a_run_in_which_it_was_swallowed_stops_before_the_next_answer(tmp_path, pair, phase, becomes):
    def swallow() -> None:
        try:
            send(signal.SIGINT)
        except BaseException:
            if becomes is not None:
                raise becomes from None

    def respond(request):
        if phase == "decode" and request.key.index == 1:
            swallow()
        return answered(request)

    models = ScriptedModels(pair.target_dir, respond, swallow if phase == "load" else lambda: None)
    assert scripted_run(tmp_path, models, num_records=9).exit_code == ExitCode.INTERRUPTED
    assert (status(tmp_path), len(finished(tmp_path))) == ("interrupted", 1 if phase == "decode" else 0)
    assert scripted_run(tmp_path, ScriptedModels(pair.target_dir, answered), num_records=9).exit_code == ExitCode.OK


def test_a_signal_that_was_taken_is_not_raised_again():
    with interruptible():
        try:
            send(signal.SIGTERM)
        except Interrupted as interrupted:
            assert interrupted.take() == ExitCode.TERMINATED
    with pytest.raises(KeyError), interruptible():
        try:
            send(signal.SIGINT)
        except Interrupted as interrupted:
            interrupted.take()
            raise KeyError from None


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_where_there_is_nothing_to_keep_no_code_can_swallow_a_signal(number, code):
    start = (
        "import os, time\nfrom eaglecli.cli import _console, _exit\n"
        "def command():\n    try:\n"
        f"        print('said before'); os.kill(os.getpid(), {int(number)}); time.sleep(9)\n"
        "    except BaseException:\n        pass\n    return 0\n"
        "_exit(_console(), command)\n"
    )
    done = subprocess.run([sys.executable, "-c", start], check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == code
    assert done.stderr == f"error: {number.name}: stopped at once; whatever was written is kept\n"
    assert done.stdout == "said before\n"


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_whole_lines(server, pair, tmp_path):
    """No file may grow beyond 16 KB: what a full disk does, without one. With room again the same command goes on."""
    records = [{"id": n, "prompt": f"{n}"} for n in range(90)]
    program = Program(pair, write_records(tmp_path / "input.jsonl", records), tmp_path / "run")
    code, child = server.run(program.arguments(), tmp_path / "streams", file_bytes=16384)
    assert code == ExitCode.INTERNAL
    assert child.stderr.count("error: ") == 1
    assert "cannot be written" in child.stderr
    assert "free some space" in child.stderr
    assert "Traceback" not in child.stderr
    data = (program.output / "generations.jsonl").read_bytes()
    assert data.endswith(b"\n")
    assert 0 < len(data) <= 16384
    kept = data.splitlines()
    assert all(json.loads(line)["text"] for line in kept)
    assert program.run().exit_code == 0
    assert set(kept) <= set((program.output / "generations.jsonl").read_bytes().splitlines())
    assert [line["index"] for line in program.lines()] == list(range(90))


@pytest.mark.parametrize("place", ["/proc/nobody/run", "/dev/null/run"])
def test_an_output_that_cannot_be_written_fails_before_weights_are_read(pair, tmp_path, place):
    """B68."""
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), Path(place))
    done = program.run()
    assert done.exit_code == ExitCode.USAGE
    assert done.stderr.count("error: ") == 1
    assert "target" not in done.stderr.split("error: ")[0].replace(str(pair.target_dir), ""), "a model was loaded first"


def test_the_input_is_never_the_output(pair, tmp_path):
    """B68: equal paths are refused before anything is cut off."""
    source = tmp_path / "run" / "generations.jsonl"
    source.parent.mkdir()
    text = write_records(source, [{"prompt": "a"}]).read_text()
    for output in (source, source.parent):
        assert Program(pair, source, output).run("--overwrite").exit_code == ExitCode.USAGE
    assert source.read_text() == text


def test_half_of_the_results_are_on_disk_when_half_is_done(tmp_path, pair):
    """B68: lines are whole and there while the run goes on."""
    seen = []

    def respond(request):
        time.sleep(0.01)
        seen.append(finished(tmp_path))
        return answered(request)

    assert scripted_run(tmp_path, ScriptedModels(pair.target_dir, respond), num_records=20).exit_code == 0
    assert len(seen[-1]) >= 15


@pytest.mark.parametrize("stream", [1, 2], ids=["stdout", "stderr"])
def test_a_reader_that_leaves_does_not_end_the_run(server, pair, tmp_path, stream):
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}, {"prompt": ""}]), tmp_path / "run")
    code, child = server.run(program.arguments("--json"), tmp_path / "streams", closed=stream)
    assert code == ExitCode.PARTIAL
    assert len(program.lines()) == 1
    said = child.stdout + child.stderr
    assert "Traceback" not in said
    assert "Broken" not in said


def failing_at(*indexes: int):
    def respond(request):
        if request.key.index in indexes:
            return Completion(request, np.zeros(0, np.int32), "error", error="not finite")
        return answered(request)

    return respond


def test_more_errors_than_allowed_stop_the_run_with_code_3(tmp_path, pair):
    models = ScriptedModels(pair.target_dir, failing_at(1, 3, 5))
    assert scripted_run(tmp_path, models, num_records=9, max_errors=2).exit_code == ExitCode.PARTIAL
    assert status(tmp_path) == "stopped"
    assert finished(tmp_path) == [0, 2, 4]
    assert scripted_run(tmp_path, models, max_errors=3).exit_code == ExitCode.PARTIAL
    assert status(tmp_path) == "complete"
    assert finished(tmp_path) == [0, 2, 4, 6, 7, 8]


@pytest.mark.parametrize(("rate", "ended"), [(0.2, "stopped"), (0.34, "complete")])
def test_the_error_rate_is_of_all_records(tmp_path, pair, rate, ended):
    models = ScriptedModels(pair.target_dir, failing_at(0, 1, 2))
    assert scripted_run(tmp_path, models, num_records=9, max_error_rate=rate).exit_code == ExitCode.PARTIAL
    assert status(tmp_path) == ended


def test_bad_lines_beyond_the_limit_stop_the_run_before_weights_are_read(tmp_path, pair):
    def forbid():
        raise AssertionError("weights were read")

    write_records(tmp_path / "input.jsonl", [{"prompt": "a"}, {}, {}, {"prompt": "b"}])
    result = scripted_run(tmp_path, ScriptedModels(pair.target_dir, answered, forbid), max_errors=1)
    assert result.exit_code == ExitCode.PARTIAL
    assert [line["index"] for line in lines(tmp_path / "run" / "errors.jsonl")] == [1, 2]
    assert scripted_run(tmp_path, ScriptedModels(pair.target_dir, answered)).exit_code == ExitCode.PARTIAL
    assert finished(tmp_path) == [0, 3]


def test_reports_that_cannot_be_written_are_one_sentence(tmp_path, pair, monkeypatch):
    write_json = RunDirectory.write_json

    def full(self, name, document):
        if name == "stats.json":
            raise OSError(28, "No space left on device")
        write_json(self, name, document)

    monkeypatch.setattr(RunDirectory, "write_json", full)
    with pytest.raises(UserError, match="No space left") as raised:
        scripted_run(tmp_path, ScriptedModels(pair.target_dir, answered))
    assert raised.value.exit_code == ExitCode.INTERNAL
    assert finished(tmp_path) == [0, 1, 2]
