"""Several answers to one record: each a line of its own, with its own noise, done and failed and taken up on its own."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from eaglecli.commands._request_maker import RequestMaker
from eaglecli.engine.request import Completion
from eaglecli.errors import ExitCode
from eaglecli.io.progress import Progress
from eaglecli.io.tokenizer import PromptTokenizer
from tests.commands.program import Program, ScriptedEngine, ScriptedModels, answered, lines, scripted_run, write_records
from tests.fixtures import write_cycle, write_rand

NUM_SAMPLES = 3
RECORDS = [
    {"id": "run", "prompt": "first"},
    {"id": "own", "prompt": "second", "n": 2, "seed": 9},
    {"id": "bad", "prompt": ""},
    {"id": "turns", "turns": ["third", "fourth"]},
    {"id": "one", "prompt": "fifth", "num_samples": 1},
]
EXPECTED = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (4, 0)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_rand(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture(scope="module")
def program(pair, tmp_path_factory):
    """A run of three samples a record that has ended."""
    folder = tmp_path_factory.mktemp("whole")
    program = Program(pair, write_records(folder / "input.jsonl", RECORDS), folder / "run")
    done = program.run(*OPTIONS)
    assert done.exit_code == ExitCode.PARTIAL, done.output
    assert f"{NUM_SAMPLES} answers to each record" in done.stderr
    return program


OPTIONS = ("-n", str(NUM_SAMPLES), "--temperature", "3", "--max-running-requests", "3")


def places(found: list[dict]) -> list[tuple[int, int]]:
    return [(line["index"], line["sample"]) for line in found]


def told(found: list[dict]) -> list[tuple]:
    return [(line["index"], line["sample"], line["id"], line["text"], line["seed"], line["token_ids"]) for line in found]


def test_each_sample_is_a_line_in_order_and_records_choose_their_own_number(program):
    found = program.lines()
    assert places(found) == EXPECTED
    assert {line["id"]: line["seed"] for line in found}["own"] == 9
    assert all(len(line["turns"]) == 2 for line in found if line["id"] == "turns")
    assert program.document("stats.json")["counts"]["successful_requests"] == len(EXPECTED)
    settings = program.document("manifest.json")["settings"]
    assert settings["num_samples"] == {"value": NUM_SAMPLES, "origin": "command line"}


def test_samples_share_a_seed_and_differ_by_their_number_alone(program, tmp_path):
    """The first is what the record gets without samples; the prompt is the same for all."""
    found = program.lines()
    texts = {line["text"] for line in found if line["id"] == "run"}
    assert len(texts) == NUM_SAMPLES
    assert len({line["seed"] for line in found if line["id"] == "run"}) == 1
    alone = Program(program.pair, write_records(tmp_path / "input.jsonl", RECORDS[:1]), tmp_path / "run")
    assert alone.run("--temperature", "3").exit_code == 0
    assert told(alone.lines()) == told(found[:1])


def test_a_prompt_is_encoded_once_for_all_its_samples(cycle, tmp_path, monkeypatch):
    encoded = []
    encode = PromptTokenizer.encode_messages
    monkeypatch.setattr(PromptTokenizer, "encode_messages", lambda self, messages: encoded.append(1) or encode(self, messages))
    models = ScriptedModels(cycle.target_dir, answered)
    assert scripted_run(tmp_path, models, num_records=2, num_samples=50, max_new_tokens=4).exit_code == 0
    assert len(lines(tmp_path / "run" / "generations.jsonl")) == 100
    assert len(encoded) <= 2 + 1  # and one to try the template


@pytest.mark.parametrize("kept", [[0], [4, 1], [2, 3, 5, 8], [7, 6, 0, 1]])
def test_after_a_cut_only_the_samples_that_are_missing_are_made(program, tmp_path, kept):
    """B69: samples of one record on both sides of the cut; a conversation of several turns too."""
    whole = (program.output / "generations.jsonl").read_bytes().splitlines(keepends=True)
    again = Program(program.pair, program.source, tmp_path / "run")
    again.output.mkdir()
    manifest = program.document("manifest.json")
    (again.output / "manifest.json").write_text(json.dumps({**manifest, "status": "running", "exit_code": None}))
    (again.output / "generations.jsonl").write_bytes(b"".join(whole[place] for place in kept))
    done = again.run(*OPTIONS)
    assert done.exit_code == ExitCode.PARTIAL, done.output
    assert told(again.lines()) == told(program.lines())
    assert {whole[place] for place in kept} <= set((again.output / "generations.jsonl").read_bytes().splitlines(keepends=True))
    assert again.document("manifest.json")["sessions"][-1]["answers"] == len(EXPECTED) - len(kept)


def test_another_number_of_samples_is_another_run(program):
    done = program.run("-n", "4", "--temperature", "3")
    assert done.exit_code == ExitCode.USAGE
    assert "num_samples: 3 -> 4" in done.stderr


def test_a_run_killed_at_any_moment_gives_the_same_samples(server, program, tmp_path):
    """B69, B34 with samples: kill -9, then resume; no line that was there is written anew."""
    again = Program(program.pair, program.source, tmp_path / "run")
    command = again.arguments(*OPTIONS, "--max-new-tokens", "60")
    reference = Program(program.pair, program.source, tmp_path / "whole")
    code, child = server.run([*reference.arguments(*OPTIONS), "--max-new-tokens", "60"], tmp_path)
    assert code == ExitCode.PARTIAL, child.stderr
    child = server.start(command, tmp_path / "streams")
    file = again.output / "generations.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < 2:
        time.sleep(0.001)
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    there = file.read_bytes().splitlines(keepends=True)
    assert 2 <= len(there) < len(EXPECTED)
    code, child = server.run(command, tmp_path / "streams")
    assert code == ExitCode.PARTIAL, child.stderr
    assert told(again.lines()) == told(reference.lines())
    assert {line for line in there if line.endswith(b"\n")} <= set(file.read_bytes().splitlines(keepends=True))


def failing_once(*failed: tuple[int, int]):
    def respond(request):
        if (request.key.index, request.sample) in failed:
            return Completion(request, np.zeros(0, np.int32), "error", error="not finite")
        return answered(request, f"{request.key.index}.{request.sample}".encode())

    return respond


def test_a_sample_that_fails_is_an_error_of_its_own_and_can_be_retried(cycle, tmp_path):
    options = {"num_samples": 3, "max_new_tokens": 4}
    bad = ScriptedModels(cycle.target_dir, failing_once((0, 1), (1, 0), (1, 2)))
    assert scripted_run(tmp_path, bad, num_records=3, **options).exit_code == ExitCode.PARTIAL
    run = tmp_path / "run"
    assert [(line["index"], line["sample"], line["code"]) for line in lines(run / "errors.jsonl")] == [
        (0, 1, "numeric"),
        (1, 0, "numeric"),
        (1, 2, "numeric"),
    ]
    assert places(lines(run / "generations.jsonl")) == [(0, 0), (0, 2), (1, 1), (2, 0), (2, 1), (2, 2)]
    good = ScriptedModels(cycle.target_dir, failing_once())
    assert scripted_run(tmp_path, good, **options).exit_code == ExitCode.PARTIAL
    assert len(lines(run / "errors.jsonl")) == 3, "a run that is complete does nothing"
    before = set((run / "generations.jsonl").read_bytes().splitlines())
    asked = []

    def respond(request):
        asked.append((request.key.index, request.sample))
        return failing_once()(request)

    assert scripted_run(tmp_path, ScriptedModels(cycle.target_dir, respond), retry_failed=True, **options).exit_code == 0
    assert asked == [(0, 1), (1, 0), (1, 2)]
    assert lines(run / "errors.jsonl") == []
    assert before <= set((run / "generations.jsonl").read_bytes().splitlines())
    assert [line["text"] for line in lines(run / "generations.jsonl")] == [f"{n}.{s}" for n in range(3) for s in range(3)]


def test_a_sample_that_failed_says_nothing_of_the_others_when_a_run_is_taken_up(cycle, tmp_path):
    """B69: the first sample has failed, the process died before the third was there."""
    options = {"num_samples": 3, "max_new_tokens": 4}
    models = ScriptedModels(cycle.target_dir, failing_once((0, 0)))
    assert scripted_run(tmp_path, models, num_records=1, **options).exit_code == ExitCode.PARTIAL
    file, manifest = tmp_path / "run" / "generations.jsonl", tmp_path / "run" / "manifest.json"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "status": "running", "exit_code": None}))
    asked = []

    def respond(request):
        asked.append(request.sample)
        return answered(request)

    assert scripted_run(tmp_path, ScriptedModels(cycle.target_dir, respond), **options).exit_code == ExitCode.PARTIAL
    assert asked == [2]
    assert places(lines(file)) == [(0, 1), (0, 2)]


def test_the_error_limit_counts_records_not_samples(cycle, tmp_path):
    models = ScriptedModels(cycle.target_dir, failing_once((0, 0), (0, 1), (0, 2)))
    options = {"num_samples": 3, "max_new_tokens": 4, "max_errors": 1, "max_error_rate": 0.5}
    assert scripted_run(tmp_path, models, num_records=2, **options).exit_code == ExitCode.PARTIAL
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "complete"


def test_samples_are_the_choices_of_one_openai_line_and_rows_of_the_table(program):
    """A request of which a sample failed is in the file of errors alone."""
    done = program.run(*OPTIONS, "--output-format", "openai-batch")
    assert done.exit_code == ExitCode.PARTIAL
    answers = program.lines("openai_batch_output.jsonl")
    assert [answer["custom_id"] for answer in answers] == ["run", "own", "turns", "one"]
    first, found = answers[0]["response"]["body"], program.lines()
    assert [(choice["index"], choice["message"]["content"]) for choice in first["choices"]] == [
        (line["sample"], line["text"]) for line in found[:3]
    ]
    prompt_tokens = found[0]["usage"]["prompt_tokens"]
    assert first["usage"] == {"prompt_tokens": prompt_tokens, "completion_tokens": 12, "total_tokens": prompt_tokens + 12}
    program.run(*OPTIONS, "--output-format", "parquet")
    table = pyarrow.parquet.read_table(program.output / "generations.parquet").to_pylist()
    for row, line in zip(table, found, strict=True):
        assert (row["index"], row["sample"], row["text"]) == (line["index"], line["sample"], line["text"])


def test_an_openai_request_of_which_a_sample_failed_has_failed(cycle, tmp_path):
    models = ScriptedModels(cycle.target_dir, failing_once((1, 0), (1, 2)))
    scripted_run(tmp_path, models, num_records=3, num_samples=3, max_new_tokens=4, output_format="openai-batch")
    answers, failures = (lines(tmp_path / "run" / f"openai_batch_{name}.jsonl") for name in ("output", "errors"))
    assert [answer["custom_id"] for answer in answers] == ["record-0", "record-2"]
    assert [failure["custom_id"] for failure in failures] == ["record-1"]


def test_samples_at_temperature_0_are_alike_and_the_run_says_so(cycle, tmp_path):
    program = Program(cycle, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), tmp_path / "run")
    done = program.run("--num-samples", "2")
    assert "all alike at temperature 0" in done.stderr
    assert [line["text"] for line in program.lines()][0] == [line["text"] for line in program.lines()][1]
    assert len(program.lines()) == 2


def test_progress_and_time_left_are_of_answers(cycle, tmp_path, monkeypatch):
    """Two of the first record, four of the second (the run's number), one line for the bad one; what is read and kept is not left."""
    totals, unread = [], []

    class Watched(Progress):
        def __init__(self, console, mode, total, *more, look, **named):
            totals.append((total, named["counted"]))
            self.look = look
            super().__init__(console, "none", total, *more, look=look, **named)

        def record_done(self, *more):
            self.look()

    monkeypatch.setattr("eaglecli.commands._run.Progress", Watched)
    monkeypatch.setattr("eaglecli.commands._run.workload_of", lambda outlook, num_unread: unread.append(num_unread))
    monkeypatch.setattr(ScriptedEngine, "outlook", None, raising=False)
    write_records(tmp_path / "input.jsonl", [{"prompt": "a", "n": 2}, {"prompt": "b"}, {"prompt": ""}])
    scripted_run(tmp_path, ScriptedModels(cycle.target_dir, answered), num_samples=4, max_new_tokens=4)
    assert totals == [(7, "answer")]
    assert len(unread) == 7 and unread[0] in (5, 6) and unread[-1] == 0  # the reader's thread counts the bad line when it comes to it
    assert unread == sorted(unread, reverse=True)


def test_a_dry_run_counts_a_prompt_once(cycle, tmp_path, monkeypatch):
    program = Program(cycle, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), tmp_path / "run")
    monkeypatch.setattr(RequestMaker, "prepare_samples", None)
    done = program.run("--dry-run", "-n", "5", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["prompt_tokens"]["num_counted"] == 1


@pytest.mark.parametrize("value", ["0", "-1", "1000001"])
def test_a_number_of_samples_out_of_range_is_refused(cycle, tmp_path, value):
    program = Program(cycle, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), tmp_path / "run")
    done = program.run("-n", value)
    assert done.exit_code == ExitCode.USAGE
    assert "--num-samples must be an integer from 1 to 1000000" in done.stderr
    assert not Path(program.output).exists()
