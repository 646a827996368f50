"""`eaglecli train` as a whole, in process, on small targets: files in; a draft, statistics and messages out."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.engine.request import Completion
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import load_target
from eaglecli.training.shards import ShardStore
from tests.commands.program import ScriptedEngine, write_records
from tests.fixtures import END_OF_TURN_ID, write_e3

PROMPTS = [{"prompt": f"{number} and {number % 7}"} for number in range(12)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_e3(tmp_path_factory.mktemp("e3"))


@pytest.fixture
def invoke(pair, tmp_path):
    source = write_records(tmp_path / "prompts.jsonl", PROMPTS)

    def call(*arguments, prompts=True):
        sizes = ["--sequence-length", "128", "--max-new-tokens", "16", "--draft-vocab-size", "64", "--held-out-new-tokens", "8"]
        amounts = ["--batch-size", "2", "--num-steps", "2", "--num-unroll-steps", "2", "--max-running-requests", "8", "--progress", "none"]
        files = ["--prompts", str(source)] if prompts else []
        fixed = ["train", "--target", str(pair.target_dir), "-o", str(tmp_path / "out"), "--device", "cpu", *files, *sizes, *amounts]
        return CliRunner().invoke(app, [*fixed, *arguments])

    return call


def test_prompts_become_answers_and_a_draft_that_loads(invoke, pair, tmp_path):
    done = invoke("--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["status"] == "complete"
    assert document["prompts"]["total"] == 12
    assert document["answers"]["num_answers"] == 22, "two held-out prompts are answered once, the others twice"
    assert document["training"]["step"] == 2
    assert document["held_out"]["accept"]["accept_length"] >= 1.0
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["status"] == "complete"
    target = load_target(pair.target_dir, torch.float32, "cpu", 128)
    assert load_draft(tmp_path / "out" / "draft", target, torch.float32, "cpu", 128).fit.config.algorithm == "EAGLE3"
    records = list(ShardStore(tmp_path / "out" / "answers", "answers").read())
    assert {record["temperature"] for record in records if record["sample"] == 0} == {0.0}
    assert min(record["temperature"] for record in records if record["sample"] == 1) >= 0.7


def test_the_same_command_goes_on_where_time_ran_out(invoke, tmp_path):
    first = invoke("--stop-after", "0.001")
    assert first.exit_code == 0, first.output
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["status"] == "answers unfinished"
    assert "the same command goes on from here" in first.stderr
    assert json.loads(invoke("--json").stdout)["status"] == "complete"
    again = json.loads(invoke("--json").stdout)
    assert (again["training"]["step"], again["status"]) == (2, "complete")


def test_answers_of_other_prompts_or_settings_are_refused(invoke, tmp_path):
    assert invoke("--stop-after", "0.001").exit_code == 0
    refused = invoke("--max-new-tokens", "17")
    assert refused.exit_code == 2
    assert "another max new tokens" in refused.stderr
    assert invoke("--max-new-tokens", "17", "--overwrite", "--stop-after", "0.001").exit_code == 0


def test_a_training_can_begin_anew_on_the_same_answers(invoke, tmp_path):
    assert invoke().exit_code == 0
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "answers").iterdir()}
    assert invoke("--num-unroll-steps", "3").exit_code == 2
    done = invoke("--num-unroll-steps", "3", "--retrain", "--json")
    assert json.loads(done.stdout)["training"]["step"] == 2
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "answers").iterdir()} == shards


def test_the_target_can_write_the_prompts(invoke, tmp_path, monkeypatch):
    """With a scripted engine: the fixture's target writes noise."""

    def respond(request):
        ids = [*f"words {request.sampling.seed % 100_000}".encode(), END_OF_TURN_ID]
        return Completion(request, np.array(ids, np.int32), "stop")

    monkeypatch.setattr("eaglecli.commands.train.open_answer_engine", lambda *_: ScriptedEngine(respond))
    done = invoke("--self-prompts", "5", "--json", prompts=False)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["prompts"]["self_written"], document["prompts"]["total"], document["training"]["step"]) == (5, 5, 2)
    own = {record["text"] for record in ShardStore(tmp_path / "out" / "answers", "self-prompts").read()}
    answers = ShardStore(tmp_path / "out" / "answers", "answers").read()
    asked = {bytes(token for token in record["prompt_ids"] if token < 256).decode() for record in answers}
    assert asked == {f"user\n{text}\nassistant\n" for text in own}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rate", "0"], "--learning-rate 0.0 must be above 0"),
        (["--batch-size", "3", "--micro-batch-size", "2"], "--batch-size 3 must be a multiple of --micro-batch-size 2"),
        (["--tap-boundaries", "2,x"], "--tap-boundaries 2,x must be whole numbers"),
        (["--tap-boundaries", "2,4,99"], "--tap-boundaries 2,4,99 must lie between 1 and the target's 8 layers"),
        (["--sequence-length", "100000"], "--sequence-length 100000 is more than the target's 2048"),
        (["--prompts", "missing.jsonl"], "--prompts missing.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(invoke, arguments, message):
    refused = invoke(*arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_training_does_not_mix_with_a_run(invoke, tmp_path):
    """It goes on in a directory of its own, whatever else lies there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    refused = invoke("--stop-after", "0.001", "--overwrite")
    assert refused.exit_code == 2
    assert "holds a run of generate or bench, no training" in refused.stderr
    (tmp_path / "out" / "manifest.json").unlink()
    assert invoke("--stop-after", "0.001").exit_code == 0
    (tmp_path / "out" / "bench.json").write_text("{}")
    assert invoke("--stop-after", "0.001").exit_code == 0


def test_without_prompts_there_is_nothing_to_do(invoke):
    refused = invoke(prompts=False)
    assert refused.exit_code == 2
    assert "nothing to answer" in refused.stderr
