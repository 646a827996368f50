"""Adaptive speculation, tables by batch size and `eaglecli tune`, as a user runs them. The models are the CYCLE and RAND pairs."""

import json
import os
import signal

import pytest
import yaml
from typer.testing import CliRunner

from eaglecli.cli import app, join_values
from eaglecli.commands import tune
from eaglecli.commands._speculation import plan_speculation
from eaglecli.config import read_config, resolve_settings
from eaglecli.engine.mode_race import ModeRace, run_race
from eaglecli.engine.speculation_policy import StepObservation
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import LOW_ACCEPT_LENGTH
from eaglecli.speculation_table import normalize_table
from tests.commands.program import lines, write_records
from tests.fixtures import write_cycle, write_rand

RECORDS = [{"prompt": chr(97 + number) * (1 + number % 5), "max_new_tokens": 4 + 3 * number % 17} for number in range(8)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return {"cycle": write_cycle(tmp_path_factory.mktemp("cycle")), "rand": write_rand(tmp_path_factory.mktemp("rand"))}


@pytest.fixture
def invoke(pairs, tmp_path):
    """Runs a command on one of the pairs and the records."""
    source = write_records(tmp_path / "input.jsonl", RECORDS)

    def call(command, *arguments, pair="cycle", draft=True):
        models = ["--target", str(pairs[pair].target_dir), *(["--draft", str(pairs[pair].draft_dir)] if draft else [])]
        return CliRunner().invoke(app, [command, *models, "-i", str(source), "--device", "cpu", "--context-length", "256", *arguments])

    return call


def settings_of(**given):
    return resolve_settings({"draft": "d", **given}, None, lambda device: "cpu")


@pytest.mark.parametrize("pair", ["cycle", "rand"])
def test_adaptive_text_is_plain_text_and_the_files_say_what_was_done(invoke, tmp_path, pair):
    done = invoke("generate", "-o", str(tmp_path / "run"), "--speculative-adaptive", "--max-running-requests", "4", pair=pair)
    assert done.exit_code == 0, done.output
    assert invoke("generate", "-o", str(tmp_path / "plain"), pair=pair, draft=False).exit_code == 0
    found, plain = lines(tmp_path / "run" / "generations.jsonl"), lines(tmp_path / "plain" / "generations.jsonl")
    assert [line["token_ids"] for line in found] == [line["token_ids"] for line in plain]
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["accept"]["identity"]["holds"]
    speculation = stats["engine"]["speculation"]
    assert speculation["policy"] == "adaptive"
    assert list(speculation["modes"]) == ["5/1/6", "none", "2/1/3", "3/1/4", "7/1/8", "5/4/16"]
    assert sum(mode["tokens"] for mode in speculation["modes"].values()) == sum(line["usage"]["completion_tokens"] - 1 for line in found)
    assert sum(mode["share_of_iterations"] for mode in speculation["modes"].values()) == pytest.approx(1)
    assert speculation["modes"]["none"]["accept_length"] in (1.0, None)
    drafted = [mode for mode in speculation["modes"].values() if mode["accept_length"] is not None]
    accepted = sum(line["spec"]["spec_num_correct_drafts"] for line in found)
    assert (accepted > 0) == any(mode["accept_length"] > 1 for mode in drafted)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "speculation: adaptive: 5/1/6 none 2/1/3" in log
    assert "ms of an iteration of 1 / 4 requests" in log
    assert "of the tokens" in done.stderr
    settings = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert settings["speculative_adaptive"] == {"value": True, "origin": "command line"}
    assert settings["speculative_num_steps"]["value"] is None


def test_a_table_is_followed_by_batch_size(invoke, tmp_path):
    table = json.dumps({"2": "2/1/3", "8": ["none", "5/1/6"]})
    arguments = ("--speculative-adaptive-config", table, "--max-running-requests", "8")
    done = invoke("generate", "-o", str(tmp_path / "run"), *arguments)
    assert done.exit_code == 0, done.output
    engine = json.loads((tmp_path / "run" / "stats.json").read_text())["engine"]
    assert engine["speculation"]["modes_by_batch_size"] == {"2": 1, "8": 0}
    by_requests = {int(size): count for size, count in engine["iterations_by_requests"].items()}
    modes = engine["speculation"]["modes"]
    assert modes["none"]["iterations"] == sum(count for size, count in by_requests.items() if size > 2)
    assert modes["2/1/3"]["iterations"] == sum(count for size, count in by_requests.items() if size <= 2) > 0


@pytest.mark.parametrize(("pair", "is_warned"), [("cycle", False), ("rand", True)])
def test_steps_without_drafts_are_not_held_against_the_draft(invoke, tmp_path, pair, is_warned):
    """The accept length of a run counts them; a warning goes by those that had drafts."""
    table = ("--speculative-adaptive-config", json.dumps({"2": "1/1/2", "8": "none"}), "--max-running-requests", "8")
    done = invoke("generate", "-o", str(tmp_path / "run"), *table, pair=pair)
    assert done.exit_code == 0, done.output
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    modes = stats["engine"]["speculation"]["modes"]
    assert modes["1/1/2"]["row_steps"] and stats["accept"]["accept_length"] < LOW_ACCEPT_LENGTH
    assert "verify steps, those without drafts among them" in done.stderr
    assert ("hardly ever guesses right" in done.stderr) == is_warned
    assert f"by 1/1/2 (accept length {modes['1/1/2']['accept_length']:.2f})" in done.stderr


def test_a_run_is_taken_up_again_with_the_same_candidates_only(invoke, tmp_path):
    output = ("-o", str(tmp_path / "run"))
    assert invoke("generate", *output, "--speculative-adaptive").exit_code == 0
    assert invoke("generate", *output, "--speculative-adaptive").exit_code == 0
    assert invoke("generate", *output).exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"5/1/6": None}),
        ({"speculative_adaptive": True}, {"5/1/6": None, "none": 64, "2/1/3": 64, "3/1/4": 64, "7/1/8": 64, "5/4/16": 64}),
        (
            {"speculative_adaptive": True, "num_speculative_tokens": 3, "max_running_requests": 200},
            {"3/1/4": None, "none": 200, "2/1/3": 200, "5/1/6": 170, "7/1/8": 128, "5/4/16": 64},
        ),
        ({"speculative_adaptive_config": {1: "7/1/8", 8: "3/1/4", 32: "none"}}, {"none": None, "7/1/8": 1, "3/1/4": 8}),
        ({"speculative_adaptive_config": {8: "6/4/32", 128: "3/1/4"}, "max_running_requests": 8}, {"6/4/32": None}),
        ({"speculative_adaptive_config": {8: "6/4/32", 128: "3/1/4"}, "max_running_requests": 9}, {"3/1/4": None, "6/4/32": 8}),
        (
            {"speculative_adaptive": True, "speculative_adaptive_config": {1: ["7/1/8", "5/1/6"], 8: "3/1/4", 32: "2/1/3"}},
            {"2/1/3": None, "7/1/8": 8, "5/1/6": 8, "3/1/4": 64, "none": 64},
        ),
    ],
)
def test_what_settings_make_an_engine_hold(given, expected):
    plan = plan_speculation(settings_of(**{"max_running_requests": 64, **given}), has_draft=True)
    found = {str(plan.first): None} | {str(item.speculation): item.max_requests for item in plan.alternatives}
    assert found == expected
    assert plan.is_adaptive == given.get("speculative_adaptive", False)


def test_without_a_draft_there_is_nothing_to_adapt(invoke, tmp_path):
    plan = plan_speculation(settings_of(draft="none"), has_draft=False)
    assert str(plan.first) == "none" and not plan.alternatives
    done = invoke("generate", "-o", str(tmp_path / "run"), "--speculative-adaptive", draft=False)
    assert done.exit_code == 0 and "--speculative-adaptive changes nothing" in done.stderr


@pytest.mark.parametrize("value", ["5/1/6", "[]", "{}", {"0": "5/1/6"}, {"a": "none"}, {"1": []}, {"1": "5/1"}, {"1": 5}, {"1": "x/1/2"}])
def test_a_table_that_is_none_is_refused(value):
    with pytest.raises(ValueError):
        normalize_table(value)
    with pytest.raises(UserError, match="--speculative-adaptive-config"):
        settings_of(speculative_adaptive_config=value)


def test_a_table_with_a_triple_that_cannot_be_is_refused_before_anything_is_read(invoke, tmp_path):
    done = invoke("generate", "-o", str(tmp_path / "run"), "--speculative-adaptive-config", '{"4": "5/1/3"}')
    assert done.exit_code == ExitCode.USAGE and "cannot hold the root and 5 steps" in done.stderr


def race_of(rates: dict[int, float], **options) -> ModeRace:
    """A race of modes that take 1 s and give that many tokens a row-step, run to its end."""
    race = ModeRace(list(rates), batch_size=4, **options)
    for _ in range(10_000):
        if race.is_done:
            break
        mode = race.choose(4)
        race.observe(StepObservation(mode, 4, None, round(4 * rates[mode]), 1.0, caught_up=False))
        race.observe(StepObservation(mode, 4, None, 100, None, caught_up=False))  # disturbed: never counts
        race.observe(StepObservation(mode, 2, None, 100, 1.0, caught_up=False))  # too few requests
        race.observe(StepObservation(mode, 4, None, 100, 1.0, caught_up=True))
    return race


def test_a_race_ranks_modes_by_rate_and_spends_most_on_the_best():
    race = race_of({0: 2.0, 1: 1.0, 2: 3.0, 3: 2.75, 4: 1.5}, first_round=10)
    assert race.is_done
    assert [time.mode for time in race.ranking()] == [2, 3, 0, 4, 1]
    assert [len(time.step_s) for time in race.ranking()] == [40, 40, 20, 10, 10]
    assert race.ranking()[0].tokens_per_second(4) == 12.0


def test_tune_writes_a_config_that_generate_takes(invoke, tmp_path):
    output = tmp_path / "tuned.yaml"
    more = ("--batch-size", "1", "3", "--config-list", "3,1,4", "3,2,5", "--num-iters", "3", "--max-new-tokens", "24", "--json")
    more += ("--page-size", "8")
    done = invoke("tune", "-o", str(output), *more)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {(item["batch_size"], item["speculation"]) for item in document["measured"]} == {
        (size, name) for size in (1, 3) for name in ("none", "3/1/4", "3/2/5")
    }
    assert all(item["num_iterations"] >= 3 and item["output_throughput"] > 0 for item in document["measured"])
    config = yaml.safe_load(output.read_text())
    assert list(config["speculative_adaptive_config"]) == [1, 3]
    assert config["max_running_requests"] == 3
    assert config["page_size"] == 8 and "mem_fraction_static" not in config  # what was asked for, not what was left at its default
    assert "fastest" in done.stderr
    assert done.stderr.index("batch 3: 3 candidates take turns, for 20 s at most") > done.stderr.index("fastest")
    run = CliRunner().invoke(app, ["generate", "--config", str(output), "-i", str(tmp_path / "input.jsonl"), "-o", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    assert len(lines(tmp_path / "run" / "generations.jsonl")) == len(RECORDS)


QUICK_TUNE = ("--config-list", "3,1,4", "--num-iters", "2", "--max-new-tokens", "16", "--seconds", "60")


def test_tune_replaces_a_file_only_when_asked(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned.yaml").write_text("mine")
    refused = invoke("tune", "--batch-size", "1", *QUICK_TUNE)
    assert refused.exit_code == ExitCode.USAGE and "--output tuned.yaml is there already" in refused.stderr
    assert (tmp_path / "tuned.yaml").read_text() == "mine"
    done = invoke("tune", "--batch-size", "1", *QUICK_TUNE, "--overwrite")
    assert done.exit_code == 0, done.output
    assert yaml.safe_load((tmp_path / "tuned.yaml").read_text())["speculative_adaptive_config"]


@pytest.fixture
def race_of_each(monkeypatch):
    """Calls `before(race)` ahead of every race, which is not run where that says False."""

    def patch(before):
        def race_unless(engine, requests, race, seconds):
            if before(race) is not False:
                run_race(engine, requests, race, seconds)

        monkeypatch.setattr(tune, "run_race", race_unless)

    return patch


def test_what_tune_had_no_time_to_measure_is_no_winner(invoke, tmp_path, race_of_each):
    output = tmp_path / "tuned.yaml"
    arguments = ("-o", str(output), "--batch-size", "1", "2", *QUICK_TUNE)
    race_of_each(lambda race: False)
    refused = invoke("tune", *arguments)
    assert refused.exit_code == ExitCode.USAGE and "no batch size could be measured" in refused.stderr
    assert "<- fastest" not in refused.stderr and not output.exists()
    race_of_each(lambda race: race.batch_size == 1)
    done = invoke("tune", *arguments, "--json")
    assert done.exit_code == 0, done.output
    assert "batch 2: 0 s were too short to measure anything, it is left out; --seconds gives more" in done.stderr
    assert {item["batch_size"] for item in json.loads(done.stdout)["measured"]} == {1}
    assert list(yaml.safe_load(output.read_text())["speculative_adaptive_config"]) == [1]


def test_a_mode_without_a_measurement_is_in_no_table(invoke, tmp_path, race_of_each):
    def only_plain(race):
        race.observe(StepObservation(1, race.batch_size, None, 1, 0.01, caught_up=False))
        return False

    race_of_each(only_plain)
    done = invoke("tune", "-o", str(tmp_path / "tuned.yaml"), "--batch-size", "1", *QUICK_TUNE, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["measured"]) == len(json.loads(done.stdout)["table"]["1"]) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)])
def test_a_signal_leaves_what_tune_has_measured(invoke, tmp_path, race_of_each, number, code):
    output = tmp_path / "tuned.yaml"
    arguments = ("-o", str(output), "--batch-size", "1", "2", *QUICK_TUNE, "--json")
    race_of_each(lambda race: race.batch_size == 1 or os.kill(os.getpid(), number))
    done = invoke("tune", *arguments)
    assert done.exit_code == code, done.output
    document = json.loads(done.stdout)
    assert (document["status"], document["exit_code"], list(document["table"])) == ("interrupted", code, ["1"])
    assert f"{number.name}: stopped; what was measured is in {output}" in done.stderr
    assert list(yaml.safe_load(output.read_text())["speculative_adaptive_config"]) == [1]
    output.unlink()
    race_of_each(lambda race: os.kill(os.getpid(), number))
    done = invoke("tune", *arguments)
    assert done.exit_code == code and "stopped before there was anything to keep" in done.stderr
    assert not output.exists()


def test_a_tuned_config_gives_the_settings_that_were_measured(pairs, tmp_path, monkeypatch):
    """What decides which models run and what is accepted; not what one run reads, writes and shows."""
    monkeypatch.chdir(tmp_path)
    for name in ("map.json", "template.jinja"):
        (tmp_path / name).write_text("x")
    (tmp_path / "models").symlink_to(pairs["cycle"].target_dir.parent)
    of_models = {
        **{"target": "models/target", "draft": "models/draft", "tokenizer_path": "models/target", "revision": "main"},
        **{"local_files_only": True, "load_format": "safetensors", "speculative_algorithm": "EAGLE", "speculative_token_map": "map.json"},
        **{"draft_config_overrides": {"rope_theta": 5000.0}, "chat_template": "template.jinja", "chat_template_kwargs": {"a": 1}},
        **{"apply_chat_template": False, "system_prompt": "short", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        **{"logit_bias": {"4": 2.0}, "stop": ["x"], "stop_token_ids": "2,0", "dtype": "float32", "device": "cpu", "context_length": 64},
        **{"page_size": 8, "attention_backend": "torch", "disable_cuda_graph": True, "enable_deterministic_inference": True},
    }
    of_the_run = {
        **{"input": ["a.jsonl"], "prompt_field": "a", "limit": 3, "max_new_tokens": 24, "min_new_tokens": 3, "progress": "none"},
        **{"cuda_graph_bs": [1], "max_errors": 3, "num_speculative_tokens": 3},
    }
    given = resolve_settings(of_models | of_the_run, None, lambda device: "cpu")
    measured = tune._with_candidates(given, tune.choose_candidates(tune.TuneOptions("", batch_size="1,4")))
    (tmp_path / "elsewhere").mkdir()
    output = tmp_path / "elsewhere" / "tuned.yaml"
    tune._write_config(output, measured, {"1": ["3/1/4"], "4": ["none"]}, {})
    found = resolve_settings({}, read_config(output), lambda device: "cpu")
    assert set(found.origins) - {"chunked_prefill_size"} == {*of_models, "max_running_requests", "speculative_adaptive_config"}
    for name in of_models:
        value, expected = getattr(found, name), getattr(given, name)
        is_path = name in ("target", "draft", "tokenizer_path", "speculative_token_map", "chat_template")
        assert value == (str((tmp_path / expected).resolve()) if is_path else expected), name
    assert found.max_running_requests == 4


def test_a_list_may_name_the_batch_size_of_each_candidate(invoke, tmp_path):
    more = ("--config-list", "1,3,1,4", "2,2,1,3", "--num-iters", "2", "--max-new-tokens", "16", "--json")
    done = invoke("tune", "-o", str(tmp_path / "tuned.yaml"), *more)
    assert done.exit_code == 0, done.output
    measured = {(item["batch_size"], item["speculation"]) for item in json.loads(done.stdout)["measured"]}
    assert measured == {(1, "none"), (1, "3/1/4"), (2, "none"), (2, "2/1/3")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "tuned.json"), "must be a YAML file"),
        (("-o", "no/such/folder/tuned.yaml"), "there is no folder"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--config-list", "5,1"), "--config-list 5,1"),
        (("--config-list", "5,1,3"), "cannot hold"),
        (("--draft", "none"), "tune needs a draft"),
        *((("--seconds", value), f"--seconds {value} must be a number above 0") for value in ("-5", "0", "nan", "inf")),
        (("--num-iters", "0"), "--num-iters 0 must be at least 1"),
    ],
)
def test_what_tune_cannot_do_is_said_in_a_sentence(invoke, tmp_path, arguments, message):
    output = () if "-o" in arguments else ("-o", str(tmp_path / "tuned.yaml"))
    done = invoke("tune", *output, *arguments)
    assert done.exit_code == ExitCode.USAGE and message in done.stderr


def test_values_of_options_that_take_many_are_joined():
    assert join_values(["--batch-size", "1", "4", "--config-list", "3,1,4", "5,1,6", "-i", "x"]) == [
        *("--batch-size", "1,4", "--config-list", "3,1,4;5,1,6", "-i", "x")
    ]


def test_fewer_rows_than_a_table_has_take_up_a_run_and_its_statistics(invoke, tmp_path):
    """Rows of the table that no batch can reach make no mode; the run is the same all the same."""
    table = ("--speculative-adaptive-config", json.dumps({"2": "2/1/3", "4": "5/1/6", "8": "none"}))
    first = invoke("generate", "-o", str(tmp_path / "run"), *table, "--max-running-requests", "8", "--limit", "3")
    assert first.exit_code == 0, first.output
    again = invoke("generate", "-o", str(tmp_path / "run"), *table, "--max-running-requests", "2")
    assert again.exit_code == 0, again.output
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    found = lines(tmp_path / "run" / "generations.jsonl")
    accepted = sum(line["spec"]["spec_num_correct_drafts"] for line in found)
    assert len(found) > 3 and stats["accept"]["identity"]["holds"] and stats["accept"]["spec_num_correct_drafts"] == accepted
