"""`--dry-run`: what it says, and that it reads no weights and writes nothing."""

import json

import pytest

from eaglecli.commands._open_engine import FoundModels
from eaglecli.errors import ExitCode
from tests.commands.program import Program, write_records
from tests.fixtures import change_checkpoint, read_checkpoint, write_cycle


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def program(pair, tmp_path, monkeypatch):
    def open_engine(self, settings, needs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(FoundModels, "open_engine", open_engine)
    return Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "ab"}, {"prompt": "abcd"}]), tmp_path / "run")


def test_it_shows_prompt_counts_memory_and_settings_with_origins_and_writes_nothing(program):
    done = program.run("--dry-run", "--temperature", "0.5")
    assert done.exit_code == 0, done.output
    assert "temperature: 0.5  # command line" in done.stdout
    assert "    <|im_start|>user\n    ab<|im_end|>" in done.stdout
    assert "prompt tokens: 44 in the first 2, mean 22.0, longest 23; about 44 in all" in done.stdout
    assert "the draft fits the target" in done.stdout
    assert "memory: weights" in done.stdout
    assert not program.output.exists()


def test_the_json_form_is_one_object(program):
    document = json.loads(program.run("--dry-run", "--json").stdout)
    assert document["prompt_tokens"] == {"num_counted": 2, "num_refused": 0, "num_tokens": 44, "longest": 23, "num_expected": 44}
    assert document["first_prompt"].startswith("<|im_start|>user\nab")
    assert document["settings"]["max_new_tokens"] == {"value": 4, "origin": "command line"}
    assert (document["exit_code"], document["counts"]["good"]) == (0, 2)


def test_the_memory_of_weights_is_what_the_file_holds(program, pair):
    memory = json.loads(program.run("--dry-run", "--json").stdout)["memory_bytes"]
    _, tensors = read_checkpoint(pair.target_dir)
    assert memory["weights"] == sum(4 * tensor.numel() for tensor in tensors.values())
    half = json.loads(program.run("--dry-run", "--json", "--dtype", "bfloat16").stdout)["memory_bytes"]
    assert (2 * half["weights"], 2 * half["cache"]) == (memory["weights"], memory["cache"])


def test_tokens_of_a_long_input_are_extrapolated_from_the_first_thousand(program):
    write_records(program.source, [{"prompt": "abcd"}] * 1500 + [{"prompt": ""}])
    done = program.run("--dry-run", "--json")
    counts = json.loads(done.stdout)["prompt_tokens"]
    assert (counts["num_counted"], counts["num_tokens"], counts["num_expected"]) == (1000, 23_000, 34_500)
    assert done.exit_code == ExitCode.PARTIAL


def test_prompts_that_do_not_fit_are_counted_as_refused(program):
    write_records(program.source, [{"prompt": "ab"}, {"prompt": "x" * 600}])
    done = program.run("--dry-run")
    assert done.exit_code == ExitCode.PARTIAL
    assert "1 of these records are refused" in done.stdout


def test_a_device_that_is_not_there_is_no_obstacle(program):
    done = program.run("--dry-run", "--device", "cuda", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["settings"]["device"]["value"] == "cuda"


def test_a_draft_that_does_not_fit_is_refused_from_its_header(program, pair, tmp_path):
    wrong = change_checkpoint(pair.draft_dir, tmp_path / "wrong", tensors={"fc.weight": None})
    done = program.run("--dry-run", "--draft", str(wrong))
    assert (done.exit_code, "fc" in done.stderr) == (ExitCode.MODEL, True)


def test_a_target_that_lacks_a_tensor_is_refused_from_its_header(program, pair, tmp_path):
    change_checkpoint(pair.target_dir, tmp_path / "lacking", tensors={"model.norm.weight": None})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "lacking" / name).write_bytes((pair.target_dir / name).read_bytes())
    done = program.run("--dry-run", "--target", str(tmp_path / "lacking"))
    assert (done.exit_code, "model.norm.weight" in done.stderr) == (ExitCode.MODEL, True)


def test_it_says_what_is_there_already_and_refuses_what_the_run_would_refuse(pair, tmp_path):
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "ab"}, {"prompt": "abcd"}]), tmp_path / "run")
    assert program.run().exit_code == 0
    before = {path: path.read_bytes() for path in program.output.iterdir()}
    assert "holds 2 answers" in program.run("--dry-run").stdout
    refused = program.run("--dry-run", "--temperature", "1")
    assert (refused.exit_code, "temperature: 0.0 -> 1.0" in refused.stderr) == (ExitCode.USAGE, True)
    assert {path: path.read_bytes() for path in program.output.iterdir()} == before


def test_without_a_usable_record_it_says_so_and_needs_no_model(program):
    write_records(program.source, [{"prompt": ""}])
    done = program.run("--dry-run", "--target", "no-such-model")
    assert done.exit_code == ExitCode.NOTHING_DONE
