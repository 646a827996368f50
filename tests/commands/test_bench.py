"""`eaglecli bench` as a whole, in process, on tiny pairs without a GPU."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.commands._bench_checks import warn_of_losses
from eaglecli.commands._bench_measure import measure
from eaglecli.commands._bench_run import run_pass
from eaglecli.commands._bench_settings import OPTION_NAMES
from eaglecli.engine.engine import Engine
from eaglecli.errors import ExitCode
from eaglecli.io.console import Console
from tests.commands.program import lines, write_records
from tests.engine.harness import load_pair, make_engine, random_prompts, requests_of
from tests.fixtures import Pair, write_cycle, write_e3, write_rand

QUICK = ["--device", "cpu", "--context-length", "512", "--skip-warmup", "--repeat", "1", "--no-plot"]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture(scope="module")
def e3(tmp_path_factory):
    return write_e3(tmp_path_factory.mktemp("e3"))


@pytest.fixture(scope="module")
def rand(tmp_path_factory):
    return write_rand(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    records = [{"prompt": text} for text in ("fghij", "klmno ", "abcde and more", "uvwxy")]
    return write_records(tmp_path_factory.mktemp("data") / "small.jsonl", records)


def invoke(pair: Pair | None, output: Path | None, *arguments: str):
    models = [] if pair is None else ["--target", str(pair.target_dir), "--draft", str(pair.draft_dir)]
    folder = [] if output is None else ["-o", str(output)]
    return CliRunner().invoke(app, ["bench", *models, *folder, *QUICK, *arguments])


def run(pair: Pair, output: Path, *arguments: str) -> dict:
    done = invoke(pair, output, *arguments)
    assert done.exit_code == ExitCode.OK, done.output
    return json.loads((output / "bench.json").read_text())


def own(prompts: Path, *more: str, new_tokens: int = 7) -> list[str]:
    return ["--dataset-path", str(prompts), "--max-new-tokens", str(new_tokens), *more]


def test_a_perfect_chain_of_five_accepts_exactly_six_and_a_random_draft_about_one(cycle, rand, prompts, tmp_path):
    """B62: 60 tokens over 10 steps after the token of the prefill."""
    perfect = run(cycle, tmp_path / "cycle", *own(prompts, "--batch-size", "1", "4", new_tokens=61))
    for item in perfect["configurations"]:
        assert item["accept"]["accept_length"] == 6.0
        assert (item["accept"]["spec_verify_ct"], item["accept"]["spec_num_proposed_drafts"]) == (40, 200)
    noise = run(rand, tmp_path / "rand", *own(prompts, "--batch-size", "4", new_tokens=13))["configurations"][0]
    assert 1.0 <= noise["accept"]["accept_length"] < 1.3
    assert "(sum A + sum V) / sum V" in (tmp_path / "rand" / "log.txt").read_text()


def test_totals_and_ratios_equal_a_recount_of_the_output(e3, prompts, tmp_path):
    """B63, B65: a tree of 5 steps, 4 branches and 16 nodes."""
    arguments = ["--config-list", "3,5,4,16", "1,0,0,0", "--num-prompts", "5", "--disable-ignore-eos"]
    document = run(e3, tmp_path / "run", *own(prompts, *arguments, new_tokens=21))
    written = lines(tmp_path / "run" / "generations.jsonl")
    assert [item["mode"] for item in document["configurations"]] == ["5/4/16", "plain"]
    for item in document["configurations"]:
        answers = [line for line in written if line["configuration"] == item["label"]]
        assert [line["index"] for line in answers] == list(range(5))
        assert item["total_output_tokens"] == sum(len(line["token_ids"]) for line in answers)
        assert item["total_input_tokens"] == sum(line["usage"]["prompt_tokens"] for line in answers)
        assert item["output_throughput"] == pytest.approx(item["total_output_tokens"] / item["total_latency"])
        for line in answers:
            emitted = line["spec_num_correct_drafts"] + line["spec_verify_ct"] - line["spec_num_cut_tokens"]
            assert len(line["token_ids"]) == 1 + emitted
    tree = document["configurations"][0]["accept"]
    answers = [line for line in written if "5/4/16" in line["configuration"]]
    accepted, steps = (sum(line[name] for line in answers) for name in ("spec_num_correct_drafts", "spec_verify_ct"))
    assert tree["accept_length"] == pytest.approx((accepted + steps) / steps)
    assert tree["spec_accept_rate"] == pytest.approx(accepted / (15 * steps))
    assert tree["accept_rate_per_position"] == sorted(tree["accept_rate_per_position"], reverse=True)
    assert tree["identity"]["holds"]


def test_the_text_with_a_draft_is_the_text_without(e3, prompts, tmp_path):
    run(e3, tmp_path / "run", *own(prompts, "--batch-size", "3", "--baseline", "--temperature", "1", new_tokens=13))
    by_mode: dict[str, list] = {}
    for line in lines(tmp_path / "run" / "generations.jsonl"):
        by_mode.setdefault(line["configuration"], []).append(line["token_ids"])
    plain, drafted = by_mode.values()
    assert plain == drafted


def test_the_report_shows_plain_decoding_beside_the_draft(rand, prompts, tmp_path):
    """B66: a ratio for every batch size."""
    arguments = ["--batch-size", "1,2", "--baseline", "--repeat", "2"]
    document = run(rand, tmp_path / "run", *own(prompts, *arguments))
    found = {item["label"]: item for item in document["configurations"]}
    assert list(found) == ["batch 1, plain", "batch 2, plain", "batch 1, 5/1/6", "batch 2, 5/1/6"]
    for size in (1, 2):
        plain, drafted = found[f"batch {size}, plain"], found[f"batch {size}, 5/1/6"]
        assert drafted["speedup"]["over"] == plain["label"]
        assert drafted["speedup"]["ratio"] == pytest.approx(drafted["output_throughput"] / plain["output_throughput"])
        low, high = drafted["speedup"]["interval"]
        assert low <= high
        assert "speedup" not in plain and plain["accept"] is None


@pytest.mark.parametrize(
    ("ratio", "interval", "is_told"),
    [(0.9, (0.8, 0.95), True), (0.9, None, True), (0.9, (0.7, 1.1), False), (1.1, (1.05, 1.2), False), (1.1, None, False)],
)
def test_where_speculation_loses_for_certain_it_is_told(capsys, ratio, interval, is_told):
    """B66."""
    item = {"label": "batch 2, 5/1/6", "by_context": [], "speedup": {"ratio": ratio, "interval": interval}}
    warn_of_losses([{"label": "batch 2, plain", "by_context": []}, item], None, Console())
    assert ("batch 2, 5/1/6: speculation loses, 0.90 x plain decoding" in capsys.readouterr().err) is is_told


def test_figures_are_split_by_the_length_of_the_context(tmp_path):
    """B16: prompts in buckets of 0.5, 1, 2 and 4 times the length that the draft was made for."""
    pair = write_e3(tmp_path / "pair")
    config = json.loads((pair.draft_dir / "config.json").read_text())
    (pair.draft_dir / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    records = [{"prompt_token_ids": [number % 200 for number in range(length)]} for length in (20, 50, 100, 200)]
    source = write_records(tmp_path / "ladder.jsonl", records)
    arguments = ["--dataset-path", str(source), "--max-new-tokens", "8", "--baseline", "--batch-size", "2"]
    document = run(pair, tmp_path / "run", *arguments)
    drafted = document["configurations"][1]
    edges = [(bucket["context_above"], bucket["context_up_to"], bucket["records"]) for bucket in drafted["by_context"]]
    assert edges == [(0, 32, 1), (32, 64, 1), (64, 128, 1), (128, None, 1)]
    assert all(bucket["accept_length"] >= 1 and bucket["speedup"] > 0 for bucket in drafted["by_context"])
    log = (tmp_path / "run" / "log.txt").read_text()
    slow = [bucket for bucket in drafted["by_context"] if bucket["speedup"] < 1]
    assert log.count("tokens lose") == len(slow)
    texts = [line["token_ids"] for line in lines(tmp_path / "run" / "generations.jsonl")]
    assert texts[:4] == texts[4:]
    by_batch_size = drafted["accept"]["splits"]["batch_size"]
    assert by_batch_size and set(by_batch_size) <= {"1", "2"}
    assert min(by_batch_size.values()) <= drafted["accept"]["accept_length"] <= max(by_batch_size.values())


def test_simulated_acceptance_is_stamped_and_writes_no_text(e3, tmp_path):
    arguments = ["--simulate-acc-len", "2.5", "--random-input-len", "9", "--random-output-len", "26", "--batch-size", "3", "--baseline"]
    document = run(e3, tmp_path / "run", *arguments)
    plain, drafted = document["configurations"]
    assert (plain["simulated_accept_length"], drafted["simulated_accept_length"]) == (None, 2.5)
    assert document["conditions"]["simulated_accept_length"] == 2.5
    assert drafted["accept"]["accept_length"] == pytest.approx(2.5, abs=0.06)
    assert drafted["total_output_tokens"] == 3 * 26
    assert not (tmp_path / "run" / "generations.jsonl").exists()
    assert "SIMULATED" in (tmp_path / "run" / "log.txt").read_text()


def test_a_named_shape_runs_without_any_file(tmp_path):
    arguments = ["--load-format", "dummy", "--target", "tiny", "--draft", "dummy", "--random-input-len", "5", "--random-output-len", "6"]
    done = invoke(None, tmp_path / "run", *arguments, "--json")
    assert done.exit_code == ExitCode.OK, done.output
    document = json.loads(done.stdout)
    assert document["conditions"]["weights"] == "dummy"
    assert document["configurations"][0]["total_output_tokens"] == 6
    assert not (tmp_path / "run" / "generations.jsonl").exists()


def test_times_are_told_apart_and_files_agree(cycle, prompts, tmp_path):
    copy = tmp_path / "copy.json"
    document = run(
        cycle, tmp_path / "run", *own(prompts, "--repeat", "2", "--output-json", str(copy), "--metric-names", "vllm", new_tokens=31)
    )
    assert json.loads(copy.read_text()) == document
    assert lines(tmp_path / "run" / "results.jsonl") == document["configurations"]
    item = document["configurations"][0]
    assert set(item["timing"]) == {"load_s", "capture_s", "warmup_s", "timed_s", "profile_s"}
    assert item["timing"]["timed_s"] == pytest.approx(sum(repeat["total_latency"] for repeat in item["repeats"]))
    assert set(item["stages_ms"]) == {"prefill", "draft", "verify", "extend", "host", "idle_share"}
    assert item["stages_ms"]["verify"]["p50"] > 0 and item["stages_ms"]["host"]["mean"] > 0
    assert 0 < item["host_share"] < 1 and 0 < item["statistics_share"] < 1
    assert item["floor"]["ratio"] > 1
    assert item["tokens_per_second"] == item["total_throughput"]
    assert item["mean_acceptance_length"] == item["accept"]["accept_length"]
    assert item["graph_hit_rate"] == 0.0  # on the CPU nothing is captured


def test_warm_up_goes_on_until_two_windows_agree(cycle, prompts, tmp_path, monkeypatch):
    from eaglecli.commands import _bench_run

    rates = iter([1.0, 5.0, 10.0, 10.2])
    run_pass, monkeyed = _bench_run.run_pass, []

    def scripted(engine, requests, batch_size, end_token_ids):
        done = run_pass(engine, requests, batch_size, end_token_ids)
        rate = next(rates, None)
        if rate is not None:
            monkeyed.append(rate)
            monkeypatch.setattr(type(done), "output_throughput", property(lambda _: rate))
        return done

    monkeypatch.setattr(_bench_run, "run_pass", scripted)
    done = CliRunner().invoke(
        app,
        ["bench", "--target", str(cycle.target_dir), "--draft", str(cycle.draft_dir), "-o", str(tmp_path / "run"), "--device", "cpu"]
        + ["--context-length", "512", "--repeat", "1", "--no-plot", "--dataset-path", str(prompts), "--max-new-tokens", "4"],
    )
    assert done.exit_code == ExitCode.OK, done.output
    item = lines(tmp_path / "run" / "results.jsonl")[0]
    assert item["warmup"] == {"windows": [1.0, 5.0, 10.0, 10.2], "agreed": True}


def test_a_run_is_compared_with_an_earlier_one(cycle, prompts, tmp_path):
    document = run(cycle, tmp_path / "old", *own(prompts))
    old = tmp_path / "old" / "bench.json"
    much_slower, much_faster = (tmp_path / name for name in ("much_slower.json", "much_faster.json"))
    for file, factor in ((much_slower, 1e-3), (much_faster, 1e3)):
        item = document["configurations"][0]
        rate = item["output_throughput"] * factor
        changed = {**item, "output_throughput": rate, "repeats": [{"output_throughput": rate}] * 3}
        file.write_text(json.dumps({**document, "configurations": [changed]}))
    faster = invoke(None, None, "--compare", str(much_slower), "--compare", str(old), "--json")
    assert faster.exit_code == ExitCode.OK, faster.output
    assert json.loads(faster.stdout)["compare"]["configurations"][0]["verdict"] == "faster"
    slower = invoke(cycle, tmp_path / "new", *own(prompts, "--compare", str(much_faster)), "--json")
    assert slower.exit_code == ExitCode.CHECK_FAILED
    assert "became slower" in slower.stderr
    assert json.loads(slower.stdout)["compare"]["configurations"][0]["verdict"] == "slower"


def test_what_cannot_be_compared_is_told_before_anything_is_measured_and_other_conditions_are_named(cycle, prompts, tmp_path):
    run(cycle, tmp_path / "old", *own(prompts))
    other = invoke(cycle, tmp_path / "other", *own(prompts, "--compare", str(tmp_path / "old"), "--batch-size", "3"))
    assert other.exit_code == ExitCode.USAGE and "no configuration in common" in other.stderr
    assert not (tmp_path / "other" / "results.jsonl").exists()
    invoke(cycle, tmp_path / "warm", *own(prompts, "--compare", str(tmp_path / "old"), "--temperature", "1"))
    warmer = json.loads((tmp_path / "warm" / "bench.json").read_text())
    assert warmer["compare"]["changed_conditions"] == ["temperature: 0.0 then, 1.0 now"]


def test_a_failed_check_counts_for_more_than_failed_requests(cycle, prompts, tmp_path, monkeypatch):
    from eaglecli.commands import _bench_measure

    counts = _bench_measure._counts
    monkeypatch.setattr(_bench_measure, "_counts", lambda done: {**counts(done), "failed_requests": 1})
    assert invoke(cycle, tmp_path / "a", *own(prompts)).exit_code == ExitCode.PARTIAL
    assert invoke(cycle, tmp_path / "b", *own(prompts, "--assert-throughput", "1e12")).exit_code == ExitCode.CHECK_FAILED


def test_an_interrupted_bench_keeps_what_was_measured(cycle, prompts, tmp_path, monkeypatch):
    from eaglecli.commands import bench
    from eaglecli.io.signals import Interrupted

    measure, num_left = bench.measure, 1

    def interrupted(*arguments):
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise Interrupted(signal.SIGTERM)
        return measure(*arguments)

    monkeypatch.setattr(bench, "measure", interrupted)
    done = invoke(cycle, tmp_path / "run", *own(prompts, "--batch-size", "1", "2"))
    assert done.exit_code == ExitCode.TERMINATED and "what was measured" in done.stderr
    document = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert (document["status"], [item["batch_size"] for item in document["configurations"]]) == ("interrupted", [1])
    none = invoke(cycle, tmp_path / "none", *own(prompts))
    assert none.exit_code == ExitCode.TERMINATED and "nothing was measured yet" in none.stderr
    assert [file.name for file in (tmp_path / "none").iterdir()] == ["log.txt"]


def test_all_figures_are_those_of_the_pass_in_the_middle(cycle, prompts, tmp_path):
    item = run(cycle, tmp_path / "run", *own(prompts), "--repeat", "4")["configurations"][0]
    rates = [repeat["output_throughput"] for repeat in item["repeats"]]
    assert item["output_throughput"] == sorted(rates)[1]
    assert item["output_throughput"] == pytest.approx(item["total_output_tokens"] / item["total_latency"])


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (["--assert-throughput", "1e12"], False),
        (["--assert-throughput", "0.001"], True),
        (["--assert-accept-length", "6.01"], False),
        (["--assert-accept-length", "6"], True),
        (["--assert-speedup", "1000", "--baseline"], False),
        (["--assert-accept-length", "1", "--draft", "none"], False),
    ],
)
def test_an_assertion_that_fails_is_exit_code_7(cycle, prompts, tmp_path, arguments, holds):
    done = invoke(cycle, tmp_path / "run", *own(prompts, *arguments))
    assert done.exit_code == (ExitCode.OK if holds else ExitCode.CHECK_FAILED), done.output
    checks = json.loads((tmp_path / "run" / "bench.json").read_text())["checks"]
    assert [check["holds"] for check in checks] == [holds]
    assert ("does not hold" in done.stderr or "against no configuration" in done.stderr) == (not holds)


def test_a_profile_is_a_chrome_trace(cycle, prompts, tmp_path):
    import gzip

    run(cycle, tmp_path / "run", *own(prompts, "--profile", str(tmp_path / "traces"), "--profile-steps", "2", new_tokens=40))
    trace = json.loads(gzip.decompress((tmp_path / "traces" / "trace-b1-5-1-6.json.gz").read_bytes()))
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def test_the_picture_is_drawn(cycle, prompts, tmp_path):
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(
        app,
        ["bench", "--target", str(cycle.target_dir), "--draft", str(cycle.draft_dir), "-o", str(tmp_path / "run"), *QUICK[:-1]]
        + own(prompts, "--baseline", "--batch-size", "1", "2"),
    )
    assert done.exit_code == ExitCode.OK, done.output
    picture = (tmp_path / "run" / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--dataset-name", "random", "--dataset-path", "x.jsonl"], "leave one of the two out"),
        (["--dataset-path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--batch-size", "two"], "--batch-size two"),
        (["--config-list", "1,5,1"], "batch,steps,topk,draft_tokens"),
        (["--config-list", "1,5,1,6", "--batch-size", "2"], "leave --batch-size out"),
        (["--config-list", "1,5,1,7"], "--speculative-num-draft-tokens 7"),
        (["--repeat", "0"], "--repeat 0"),
        (["--assert-accept-length", "2"], "noise"),
        (["--assert-speedup", "2"], "--baseline"),
        (["--simulate-acc-len", "7", "--random-input-len", "4", "--random-output-len", "4"], "--simulate-acc-len 7"),
        (["--simulate-acc-len", "2", "--disable-ignore-eos"], "--disable-ignore-eos"),
        (["--random-input-len", "600"], "context of 512"),
        (["--compare", "nowhere.json"], "nowhere.json"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio"),
        (["--dataset-path", "."], "--dataset-path . is a directory"),
        (["--output-json", "nowhere/x.json"], "--output-json nowhere/x.json"),
        (["--output-json", "."], "--output-json . cannot be written"),
        (["--profile", "/proc/nowhere"], "--profile /proc/nowhere"),
        (["--compare", "a.json", "--compare", "b.json", "--assert-throughput", "1"], "--assert-throughput is about a run"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(e3, tmp_path, arguments, words):
    done = invoke(e3, tmp_path / "run", *arguments)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert words in done.stderr and "Traceback" not in done.stderr


def test_plain_decoding_cannot_be_simulated(e3, tmp_path):
    done = CliRunner().invoke(app, ["bench", "--target", str(e3.target_dir), "--draft", "none", "--simulate-acc-len", "2", *QUICK])
    assert done.exit_code == ExitCode.USAGE and "--draft" in done.stderr


def test_results_that_are_there_are_not_overwritten_unasked(cycle, prompts, tmp_path):
    run(cycle, tmp_path / "run", *own(prompts))
    again = invoke(cycle, tmp_path / "run", *own(prompts))
    assert again.exit_code == ExitCode.USAGE and "--overwrite" in again.stderr
    assert invoke(cycle, tmp_path / "run", *own(prompts, "--overwrite")).exit_code == ExitCode.OK


def test_a_bench_does_not_write_into_a_run_of_generate(cycle, prompts, tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    refused = invoke(cycle, tmp_path, *own(prompts))
    assert refused.exit_code == ExitCode.USAGE and "holds an earlier run" in refused.stderr


def test_a_signal_leaves_what_was_measured(cycle, prompts, tmp_path, monkeypatch):
    def measure_one(opened, models, data, configuration, options):
        if configuration.batch_size == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(opened, models, data, configuration, options)

    monkeypatch.setattr("eaglecli.commands.bench.measure", measure_one)
    done = invoke(cycle, tmp_path / "run", *own(prompts, "--batch-size", "1", "2", "--json"))
    assert done.exit_code == ExitCode.TERMINATED, done.output
    assert [item["batch_size"] for item in json.loads(done.stdout)["configurations"]] == [1]
    assert len(lines(tmp_path / "run" / "results.jsonl")) == 1


def test_a_shortage_of_memory_has_its_exit_code(cycle, prompts, tmp_path, monkeypatch):
    def lose(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "step", lose)
    done = invoke(cycle, tmp_path / "run", *own(prompts))
    assert done.exit_code == ExitCode.MEMORY and "out of memory" in done.stderr


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_help_page_names_every_option_within_its_width(columns):
    done = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= columns
    for name in OPTION_NAMES:
        assert f"--{name.replace('_', '-')}" in done.stdout, name


def test_deterministic_inference_reaches_the_engine_and_its_models(e3, prompts, tmp_path, monkeypatch):
    seen = []
    step = Engine.step

    def watch(engine):
        seen.append((engine.settings.is_deterministic, engine._iteration._target.kernels.is_row_invariant))
        return step(engine)

    monkeypatch.setattr(Engine, "step", watch)
    run(e3, tmp_path / "run", *own(prompts, "--batch-size", "2", "--enable-deterministic-inference"))
    assert set(seen) == {(True, True)}


def test_records_that_ask_for_more_are_served(cycle, tmp_path):
    records = [{"prompt": "fghij", "repetition_penalty": 1.5, "logprobs": 2}, {"prompt": "klmno"}]
    source = write_records(tmp_path / "asking.jsonl", records)
    document = run(cycle, tmp_path / "run", "--dataset-path", str(source), "--max-new-tokens", "6", "--batch-size", "2")
    assert document["configurations"][0]["successful_requests"] == 2


def test_the_deterministic_mode_is_measured_and_stamped(cycle, prompts, tmp_path):
    document = run(cycle, tmp_path / "run", *own(prompts, "--enable-deterministic-inference"))
    assert document["conditions"]["is_deterministic"]
    assert document["configurations"][0]["accept"]["identity"]["holds"]


@pytest.mark.parametrize(("batch_size", "group_size"), [(1, 1), (3, 1), (8, 3), (5, 9)])
def test_requests_are_submitted_by_groups_as_an_engine_of_so_many_rows_admits_them(rand, batch_size, group_size):
    """An engine with more rows than requests would admit every one alone."""
    engine = make_engine(load_pair(rand).target, None, max_running_requests=16)
    engine.group_size = lambda rows: group_size if rows == batch_size else 1
    requests = requests_of(random_prompts([4] * 20), 8)
    requests = [replace(r, sampling=replace(r.sampling, max_new_tokens=2 + n % 5)) for n, r in enumerate(requests)]
    done = run_pass(engine, requests, batch_size, ())
    assert sorted(completion.request.key for completion in done.completions) == list(range(20))
    assert done.log.in_flight[0] == batch_size == max(done.log.in_flight)
    admitted = [more // 4 for more in np.diff(done.log.prompt_tokens) if more]
    assert all(count >= min(group_size, batch_size) for count in admitted[:-1])  # the last ones are what is left
