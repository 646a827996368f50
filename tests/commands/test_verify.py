"""`eaglecli verify` as a whole, in process: prompts in; a report, JSON and exit codes out."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.engine import backlog, engine
from eaglecli.engine.draft import EagleDrafter
from eaglecli.engine.scheduler import Scheduler
from eaglecli.errors import ExitCode
from tests.fixtures import write_twin


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_twin(tmp_path_factory.mktemp("twin"))


@pytest.fixture
def invoke(pair):
    def call(*arguments: str, draft: bool = True):
        models = ["--target", str(pair.target_dir), *(["--draft", str(pair.draft_dir)] if draft else [])]
        small = ["--device", "cpu", "--context-length", "128", "--limit", "3", "--max-new-tokens", "12", "--num-speculative-tokens", "3"]
        return CliRunner().invoke(app, ["verify", *models, *small, *arguments])

    return call


def test_built_in_prompts_are_verified_greedy_and_sampled(invoke):
    done = invoke("--json")
    assert done.exit_code == ExitCode.OK, done.output
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["exit_code"], document["num_prompts"]) == (1, 0, 3)
    greedy, seeded = document["modes"]
    assert (greedy["name"], seeded["name"]) == ("greedy", "seeded, temperature 1")
    for mode in (greedy, seeded):
        assert mode["num_equal"] == mode["num_texts"] == 3
        assert mode["num_tokens"] == 36
        assert mode["found_by_depth"] == mode["expected_by_depth"] and mode["found_by_depth"][0] > 0
        assert mode["differences"] == []
        assert mode["accept_length"] > 1
    assert "3 of 3 texts equal" in done.stderr and "verified: no difference at all" in done.stderr


def test_a_fault_ends_with_code_7_and_a_line_for_every_difference(invoke, monkeypatch):
    monkeypatch.setattr(EagleDrafter, "extend", lambda *_: None)
    done = invoke("--json", "--temperature", "0")
    assert done.exit_code == ExitCode.CHECK_FAILED
    document = json.loads(done.stdout)
    (greedy,) = document["modes"]
    bugs = greedy["counts"]["acceptance"]["bug"]
    assert bugs > 0 and greedy["num_equal"] == 3
    first = greedy["differences"][0]
    assert (first["check"], first["kind"], first["key"]) == ("acceptance", "bug", "built-in prompts 1 (greedy)")
    assert first["gap"] >= first["limit"]
    assert done.stderr.count("bug: built-in prompts") == min(bugs, 20)
    assert "verify found" in done.stderr


def test_own_prompts_are_read_and_bad_records_left_out(invoke, tmp_path):
    source = tmp_path / "input.jsonl"
    source.write_text(f'{{"prompt": "one"}}\n[1]\n{json.dumps({"prompt": "x" * 200})}\n')
    done = invoke("-i", str(source), "--json")
    assert done.exit_code == ExitCode.OK, done.output
    assert json.loads(done.stdout)["num_prompts"] == 1
    assert "2 records cannot be used and are left out" in done.stderr and "line 2" in done.stderr


def test_no_usable_record_is_code_4(invoke, tmp_path):
    source = tmp_path / "input.jsonl"
    source.write_text("[1]\n")
    assert invoke("-i", str(source)).exit_code == ExitCode.NOTHING_DONE


def test_without_a_draft_there_is_nothing_to_verify(invoke):
    done = invoke(draft=False)
    assert done.exit_code == ExitCode.USAGE
    assert "no draft is named" in done.stderr


def test_deterministic_bfloat16_excuses_nothing_and_finds_nothing(invoke):
    done = invoke("--dtype", "bfloat16", "--enable-deterministic-inference", "--json")
    assert done.exit_code == ExitCode.OK, done.output
    document = json.loads(done.stdout)
    assert document["is_deterministic"] is True
    assert [mode["differences"] for mode in document["modes"]] == [[], []]
    assert "deterministic inference" in done.stderr


def test_generate_knows_deterministic_inference(pair, tmp_path):
    """In bfloat16, with and without a draft, in any batch."""
    source = tmp_path / "input.jsonl"
    source.write_text("".join(f'{{"prompt": "prompt number {number} is this"}}\n' for number in range(3)))
    texts = []
    for number, arguments in enumerate((["--draft", "none", "--max-running-requests", "1"], ["--draft", str(pair.draft_dir)])):
        fixed = ["--device", "cpu", "--context-length", "128", "--max-new-tokens", "20", "--temperature", "1", "--dtype", "bfloat16"]
        command = ["generate", "--target", str(pair.target_dir), "-i", str(source), "-o", str(tmp_path / str(number)), *fixed, *arguments]
        assert CliRunner().invoke(app, [*command, "--enable-deterministic-inference"]).exit_code == 0
        texts.append([json.loads(line)["token_ids"] for line in (tmp_path / str(number) / "generations.jsonl").open()])
    assert texts[0] == texts[1]


def pausing(tmp_path):
    """A config whose run decodes plainly from three requests on."""
    config = tmp_path / "config.yaml"
    config.write_text("speculative_adaptive_config: {2: 3/1/4, 8: none}\n")
    return "--config", str(config)


@pytest.fixture
def invoke_pausing(pair, tmp_path):
    models = ["--target", str(pair.target_dir), "--draft", str(pair.draft_dir)]
    small = ["--device", "cpu", "--context-length", "160", "--limit", "3", "--max-new-tokens", "40", "--json"]
    return lambda: CliRunner().invoke(app, ["verify", *pausing(tmp_path), *models, *small])


def test_where_a_run_pauses_its_draft_pauses_are_verified_too(invoke_pausing):
    done = invoke_pausing()
    assert done.exit_code == ExitCode.OK, done.output
    modes = {mode["name"]: mode for mode in json.loads(done.stdout)["modes"]}
    assert list(modes) == [name + paused for paused in ("", ", with pauses of the draft") for name in ("greedy", "seeded, temperature 1")]
    greedy, paused = modes["greedy"], modes["greedy, with pauses of the draft"]
    assert greedy["num_equal"] == paused["num_equal"] == 3 and not paused["differences"]
    assert 0 < paused["num_steps"] < greedy["num_steps"]  # steps that had drafts
    assert paused["num_accepted"] > 0 and paused["found_by_depth"] == paused["expected_by_depth"]


def a_kept_token_is_another(monkeypatch):
    keep = backlog.keep_features
    monkeypatch.setattr(backlog, "keep_features", lambda features, tokens, *rest: keep(features, tokens ^ 1, *rest))


def a_kept_feature_is_of_another_token(monkeypatch):
    keep = backlog.keep_features
    monkeypatch.setattr(backlog, "keep_features", lambda features, *rest: keep(features.roll(1, 0), *rest))


def caught_up_positions_are_one_further(monkeypatch):
    create = backlog.create_extend_spec_info
    moved = lambda *arguments: replace(info := create(*arguments), positions=info.positions + 1)  # noqa: E731
    monkeypatch.setattr(backlog, "create_extend_spec_info", moved)


def nothing_is_caught_up(monkeypatch):
    monkeypatch.setattr(EagleDrafter, "catch_up", lambda *_: None)


@pytest.mark.parametrize(
    "fault",
    [a_kept_token_is_another, a_kept_feature_is_of_another_token, caught_up_positions_are_one_further, nothing_is_caught_up],
)
def test_a_draft_that_catches_up_wrongly_is_found(invoke_pausing, monkeypatch, fault):
    fault(monkeypatch)
    done = invoke_pausing()
    assert done.exit_code == ExitCode.CHECK_FAILED, done.output
    modes = json.loads(done.stdout)["modes"]
    assert {mode["name"] for mode in modes if mode["differences"]} <= {mode["name"] for mode in modes if "pauses" in mode["name"]}


def a_row_keeps_its_first_temperature(monkeypatch):
    write, seen = engine.write_admitted, {}

    def keep(state, admitted, page_size):
        write(state, admitted, page_size)
        for sequence in admitted:
            state.temperature[sequence.row] = seen.setdefault(sequence.row, float(state.temperature[sequence.row]))

    monkeypatch.setattr(engine, "write_admitted", keep)


def test_rows_are_used_again_in_the_sample(invoke, monkeypatch):
    a_row_keeps_its_first_temperature(monkeypatch)
    done = invoke("--json")
    assert done.exit_code == ExitCode.CHECK_FAILED, done.output


def test_prompts_are_cut_in_the_sample(invoke, monkeypatch):
    next_chunks, cut = Scheduler.next_chunks, []

    def watch(self):
        chunks = next_chunks(self)
        cut.extend(chunk for chunk in chunks if not chunk.is_last)
        return chunks

    monkeypatch.setattr(Scheduler, "next_chunks", watch)
    assert invoke().exit_code == ExitCode.OK and cut
