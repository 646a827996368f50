"""Runs that read and write in helper processes, as they do on a GPU: the same files as without, and nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from eaglecli.engine.request import Completion
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.helper_process import HelperProcess
from tests.commands.program import ScriptedModels, answered, lines, scripted_run, write_records
from tests.fixtures import write_cycle
from tests.io.test_helper_process import is_there, wait_until_gone

RECORDS = [
    {"id": "a", "prompt": "one"},
    {"messages": [{"role": "user", "content": "two"}], "seed": 3},
    {"turns": ["first", "second", "third"]},
    {"prompt": "three", "stop": ["sw"]},
    {"prompt": "four", "n": 3, "temperature": 1.0},
    {"prompt": ""},
    {"prompt_token_ids": [5, 6, 7], "extra": {"kept": True}},
    {"prompt": "x" * 2000},
    {"id": "a", "prompt": "again"},
    {"prompt": "fails"},
]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def begun(monkeypatch):
    """Process ids of the helpers."""
    ids, begin = [], HelperProcess.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        ids.append(self.process_id)

    monkeypatch.setattr(HelperProcess, "__init__", noted)
    return ids


def respond(request):
    """The answer shows what was asked; the stop string is looked for as the engine does."""
    if request.key.index == 9:
        return Completion(request, np.zeros(0, np.int32), "error", error="not finite")
    text = f"answer {request.sample} to {len(request.prompt_ids)} {request.sampling.seed}".encode()
    completion = answered(request, text)
    hit = request.make_stop_watch().look(completion.output_ids) if request.make_stop_watch else None
    return completion if hit is None else Completion(request, completion.output_ids[: hit[0]], "stop", stop_string=hit[1])


def contents(folder):
    """Of both files, without times."""
    found = [lines(folder / "run" / name) for name in ("generations.jsonl", "errors.jsonl")]
    return [[{name: value for name, value in line.items() if name not in ("timing", "file")} for line in kind] for kind in found]


def test_the_files_are_those_of_a_run_without_helpers(tmp_path, cycle, begun):
    results = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        write_records(folder / "input.jsonl", [*RECORDS, *({"prompt": f"p{number}"} for number in range(100))])
        models = ScriptedModels(cycle.target_dir, respond)
        code = scripted_run(folder, models, device=device, keep_fields=True, too_long="skip").exit_code
        results[device] = code, *contents(folder)
    assert results["cuda"] == results["cpu"]
    code, answers, errors = results["cuda"]
    assert code == ExitCode.PARTIAL
    assert (len(answers), len(errors)) == (109, 3)
    assert len(begun) == 2
    assert not any(map(is_there, begun))


def test_what_is_done_is_not_done_again(tmp_path, cycle, begun):
    def stops_at_40(request):
        if request.key.index == 40:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        return answered(request)

    assert scripted_run(tmp_path, ScriptedModels(cycle.target_dir, stops_at_40), 80, "cuda").exit_code == ExitCode.TERMINATED
    assert len(lines(tmp_path / "run" / "generations.jsonl")) == 40
    asked = []

    def noting(request):
        asked.append(request.key.index)
        return answered(request)

    assert scripted_run(tmp_path, ScriptedModels(cycle.target_dir, noting), device="cuda").exit_code == 0
    assert asked == list(range(40, 80))
    assert [line["index"] for line in lines(tmp_path / "run" / "generations.jsonl")] == list(range(80))
    assert len(begun) == 4
    assert not any(map(is_there, begun))


def test_a_failure_of_the_reader_is_the_run_s(tmp_path, cycle, begun):
    def remove_input():
        (tmp_path / "input.jsonl").rename(tmp_path / "away.jsonl")

    with pytest.raises(UserError, match="input.jsonl"):
        scripted_run(tmp_path, ScriptedModels(cycle.target_dir, answered, remove_input), device="cuda")
    assert not any(map(is_there, begun))


@pytest.mark.parametrize("which", [0, 1], ids=["writing", "reading"])
def test_a_helper_that_dies_ends_the_run_which_can_be_taken_up(tmp_path, cycle, begun, which):
    def respond(request):
        if request.key.index == 5:
            os.kill(begun[which], signal.SIGKILL)
        return answered(request)

    with pytest.raises(UserError, match="helper process of the run has ended") as raised:
        scripted_run(tmp_path, ScriptedModels(cycle.target_dir, respond), 2000, "cuda")
    assert raised.value.exit_code == ExitCode.INTERNAL
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"
    assert scripted_run(tmp_path, ScriptedModels(cycle.target_dir, answered), device="cuda").exit_code == 0
    assert [line["index"] for line in lines(tmp_path / "run" / "generations.jsonl")] == list(range(2000))


PROGRAM = """
import sys, time
sys.path[:] = {path!r}
from pathlib import Path
from tests.commands.program import ScriptedModels, answered, scripted_run
from eaglecli.io.helper_process import HelperProcess

begin = HelperProcess.__init__
def noted(self, *arguments):
    begin(self, *arguments)
    print(self.process_id, flush=True)
HelperProcess.__init__ = noted

def respond(request):
    if request.key.index == 60:
        print("stands", flush=True)
        time.sleep(60)
    return answered(request)

sys.exit(scripted_run(Path({folder!r}), ScriptedModels(Path({target!r}), respond), 80, "cuda").exit_code)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_helpers_end_with_a_process_that_a_signal_ends(tmp_path, cycle, number, code):
    """The signal goes to the whole group, as a terminal sends it, and SIGTERM to the helpers too, as a job's end sends it."""
    program = PROGRAM.format(path=sys.path, folder=str(tmp_path), target=str(cycle.target_dir))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        helpers = [int(process.stdout.readline()) for _ in range(2)]
        assert process.stdout.readline() == "stands\n"
        time.sleep(1)  # what was answered is written meanwhile
        for process_id in helpers if number == signal.SIGTERM else ():
            os.kill(process_id, number)
        os.killpg(process.pid, number)
        started = time.monotonic()
        assert process.wait() == code
        assert time.monotonic() - started < 5
    for process_id in helpers:
        wait_until_gone(process_id)
    kept = lines(tmp_path / "run" / "generations.jsonl")
    assert sorted(line["index"] for line in kept) == list(range(60))
    assert scripted_run(tmp_path, ScriptedModels(cycle.target_dir, answered), device="cuda").exit_code == 0
    assert [line["index"] for line in lines(tmp_path / "run" / "generations.jsonl")] == list(range(80))
