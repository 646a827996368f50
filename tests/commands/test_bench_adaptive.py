"""`eaglecli bench --speculative-adaptive`, in process, on tiny pairs without a GPU."""

import json

import pytest
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.commands import _bench_adaptive
from eaglecli.commands._bench_adaptive import describe_choices, put_ratios_to_best
from eaglecli.errors import ExitCode
from eaglecli.io.bench_table import choice_table, speed_table
from tests.commands.program import lines, write_records
from tests.fixtures import write_cycle

ALL_MODES = ["5/1/6", "none", "2/1/3", "3/1/4", "7/1/8", "5/4/16"]
QUICK = ["--device", "cpu", "--context-length", "256", "--skip-warmup", "--max-new-tokens", "24", "--no-plot"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("data") / "small.jsonl", [{"prompt": text} for text in ("fghij", "klmno ", "uvwxy")])


@pytest.fixture
def bench(pair, prompts, tmp_path):
    """Runs the command; returns how it ended and what bench.json holds, {} where there is none."""

    def call(*arguments, draft=True, data=True):
        models = ["--target", str(pair.target_dir), "--draft", str(pair.draft_dir) if draft else "none"]
        source = ["--dataset-path", str(prompts)] if data else ["--random-input-len", "4", "--random-output-len", "4"]
        folder = tmp_path / "run"
        done = CliRunner().invoke(app, ["bench", *models, *source, *QUICK, "-o", str(folder), *arguments])
        file = folder / "bench.json"
        return done, json.loads(file.read_text()) if file.exists() else {}

    return call


def test_an_adaptive_configuration_is_measured_beside_the_others_at_every_batch_size(bench, tmp_path):
    done, document = bench("--speculative-adaptive", "--baseline", "--batch-size", "1", "2", "--repeat", "2", "--metric-names", "vllm")
    assert done.exit_code == ExitCode.OK, done.output
    found = {item["label"]: item for item in document["configurations"]}
    modes = ("plain", "5/1/6", "adaptive")
    assert list(found) == [f"batch {size}, {mode}" for mode in modes for size in (1, 2)]
    assert lines(tmp_path / "run" / "results.jsonl") == document["configurations"]
    for size in (1, 2):
        plain, fixed, adaptive = (found[f"batch {size}, {mode}"] for mode in modes)
        choices = adaptive["speculation"]
        assert choices["policy"] == "adaptive" and list(choices["modes"]) == ALL_MODES == list(choices["start_costs_ms"])
        # three answers of 24 tokens, the first token of each from the prefill: the one pass that all figures are of
        assert sum(mode["tokens"] for mode in choices["modes"].values()) == 3 * 23
        steps, accepted = (sum(mode[name] for mode in choices["modes"].values()) for name in ("row_steps", "accepted_drafts"))
        assert adaptive["accept"]["accept_length"] == pytest.approx(1 + accepted / steps)
        assert sum(mode["share_of_tokens"] for mode in choices["modes"].values()) == pytest.approx(1)
        assert adaptive["timing"]["capture_s"] > choices["start_costs_s"] > 0
        assert adaptive["accept"]["identity"]["holds"] and len(adaptive["accept"]["spec_correct_drafts_histogram"]) == 8
        assert set(adaptive["stages_ms"]) == {"prefill", "draft", "verify", "extend", "host", "idle_share"}
        assert adaptive["speculative_num_steps"] is None and adaptive["floor"]["ratio"] is None
        best = max((plain, fixed), key=lambda item: item["output_throughput"])
        ratio = adaptive["ratio_to_best_fixed"]
        assert ratio["over"] == best["label"]
        assert ratio["ratio"] == pytest.approx(adaptive["output_throughput"] / best["output_throughput"])
        assert ratio["interval"][0] <= ratio["interval"][1]
        assert adaptive["speedup"]["over"] == plain["label"]
        assert "ratio_to_best_fixed" not in fixed and "speculation" not in fixed
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "tokens by mode" in log and "batch 2, adaptive: ms of an iteration" in log and "batch 1, adaptive: speculation: " in log


def test_the_text_of_an_adaptive_configuration_is_the_plain_one(bench, tmp_path):
    done, _ = bench("--speculative-adaptive", "--baseline", "--batch-size", "2", "--repeat", "1")
    assert done.exit_code == ExitCode.OK, done.output
    texts: dict[str, list] = {}
    for line in lines(tmp_path / "run" / "generations.jsonl"):
        texts.setdefault(line["configuration"], []).append(line["token_ids"])
    assert list(texts) == ["batch 2, plain", "batch 2, 5/1/6", "batch 2, adaptive"]
    assert texts["batch 2, adaptive"] == texts["batch 2, plain"]


def test_every_configuration_begins_with_a_policy_of_its_own(bench, monkeypatch):
    made = []
    begin = _bench_adaptive.make_policy
    monkeypatch.setattr(_bench_adaptive, "make_policy", lambda engine, plan: made.append(begin(engine, plan)) or made[-1])
    done, _ = bench("--speculative-adaptive", "--config-list", "1,3,1,4", "2,0,1,1", "--repeat", "1")
    assert done.exit_code == ExitCode.OK, done.output
    adaptive = [policy for policy in made if policy.describe()["policy"] == "adaptive"]
    assert len(adaptive) == 2 and adaptive[0] is not adaptive[1]


def test_a_table_alone_is_measured_as_it_stands(bench):
    done, document = bench("--speculative-adaptive-config", '{"1": "3/1/4", "4": "none"}', "--batch-size", "1", "3", "--repeat", "1")
    assert done.exit_code == ExitCode.OK, done.output
    assert [item["label"] for item in document["configurations"]] == ["batch 1, 3/1/4", "batch 3, 3/1/4", "batch 3, table"]
    table = document["configurations"][-1]  # for one request it is 3/1/4, which is measured anyway
    assert table["speculation"]["modes"]["none"]["tokens"] > 0
    assert table["ratio_to_best_fixed"]["mode"] == "3/1/4"  # of the table: no triple was given


def test_a_table_that_is_to_be_held_against_the_others_is_measured_wherever_it_is_one_of_them(bench):
    table = ("--speculative-adaptive-config", '{"1": "3/1/4", "4": "none"}')
    done, document = bench(*table, "--batch-size", "1", "--repeat", "1", "--assert-adaptive-ratio", "0.0001")
    assert done.exit_code == ExitCode.OK, done.output
    assert [item["mode"] for item in document["configurations"]] == ["3/1/4", "table"]


@pytest.mark.parametrize(("least", "holds"), [("0.0001", True), ("1000", False)])
def test_an_adaptive_ratio_that_is_missed_is_exit_code_7(bench, least, holds):
    arguments = ("--speculative-adaptive", "--batch-size", "1", "2", "--assert-adaptive-ratio", least, "--assert-accept-length", "6")
    done, document = bench(*arguments, "--repeat", "1", "--max-new-tokens", "25")
    assert done.exit_code == (ExitCode.OK if holds else ExitCode.CHECK_FAILED), done.output
    checks = [(check["check"], check["label"], check["holds"]) for check in document["checks"]]
    assert checks == [  # the accept length is asked of the triple alone
        *(("--assert-accept-length", f"batch {size}, 5/1/6", True) for size in (1, 2)),
        *(("--assert-adaptive-ratio", f"batch {size}, adaptive", holds) for size in (1, 2)),
    ]


@pytest.mark.parametrize(
    ("arguments", "draft", "words"),
    [
        (("--assert-adaptive-ratio", "0.9"), True, "add --speculative-adaptive"),
        (("--speculative-adaptive",), False, "--speculative-adaptive needs a draft"),
        (("--speculative-adaptive", "--simulate-acc-len", "2"), True, "--simulate-acc-len is what one triple accepts"),
        (("--speculative-adaptive-config", '{"1": "5/1/3"}'), True, "cannot hold the root and 5 steps"),
    ],
)
def test_what_cannot_be_chosen_is_refused(bench, arguments, draft, words):
    done, _ = bench(*arguments, draft=draft, data=False)
    assert done.exit_code == ExitCode.USAGE and words in " ".join(done.stderr.split()), done.output


def test_a_choice_that_a_config_file_asks_for_gives_way_to_simulation(bench, tmp_path):
    config = tmp_path / "tuned.yaml"
    config.write_text('speculative_adaptive_config: {1: ["3/1/4", "none"]}\n')
    done, document = bench("--config", str(config), "--simulate-acc-len", "2", "--repeat", "1", data=False)
    assert done.exit_code == ExitCode.OK, done.output
    assert [item["mode"] for item in document["configurations"]] == ["3/1/4"]


def test_choices_are_those_between_two_summaries():
    def summary(tokens: int, iterations: int, changes: int) -> dict:
        plain = {"iterations": 5, "tokens": 5, "row_steps": 5, "accepted_drafts": 0}
        chain = {"iterations": iterations, "tokens": tokens, "row_steps": 2 * iterations, "accepted_drafts": tokens - 2 * iterations}
        modes = {"none": plain, "5/1/6": chain}
        return {"policy": "adaptive", "num_changes": changes, "changes": [], "modes": modes}

    found = describe_choices(summary(10, 2, 4), summary(40, 8, 5))
    assert found["num_changes"] == 1 and "changes" not in found
    chain, plain = found["modes"]["5/1/6"], found["modes"]["none"]
    assert (chain["iterations"], chain["tokens"], chain["accept_length"]) == (6, 30, 2.5)
    assert (plain["iterations"], plain["tokens"], plain["accept_length"]) == (0, 0, None)
    assert [chain[f"share_of_{what}"] for what in ("iterations", "tokens")] == [1, 1]
    assert [plain[f"share_of_{what}"] for what in ("iterations", "tokens")] == [0, 0]


def row(mode: str, rate: float, batch_size: int = 256) -> dict:
    return {
        "label": f"batch {batch_size}, {mode}",
        "batch_size": batch_size,
        "mode": mode,
        "output_throughput": rate,
        "repeats": [{"output_throughput": rate}] * 2,
        "accept": None,
        "spread": 0.0,
        "floor": {"step_ms": 1.0, "ratio": None},
    }


def test_the_best_of_the_others_is_that_of_the_same_batch_size_and_tables_keep_their_width():
    found = [row("plain", 100.0), row("6/4/32", 150.0), row("5/1/6", 900.0, batch_size=8), row("adaptive", 147.0)]
    shares = {name: {"tokens": 5, "share_of_tokens": 0.2} for name in ("none", "10/10/64", "10/10/63", "10/10/62", "2/1/3")}
    found[3]["speculation"] = {"num_changes": 12345, "modes": shares}
    put_ratios_to_best(found)
    assert (found[3]["ratio_to_best_fixed"]["over"], found[3]["ratio_to_best_fixed"]["ratio"]) == ("batch 256, 6/4/32", 0.98)
    table = [*speed_table(found), *choice_table(found)]
    assert max(map(len, table)) <= 80
    assert table[-1].split() == ["256", "adaptive", "0.980", "6/4/32", "12345", "20%", "none", "20%", "2/1/3", "20%", "10/10/64", "+40%"]


def test_the_picture_shows_what_chooses(bench, tmp_path):
    pytest.importorskip("matplotlib")
    done, _ = bench("--speculative-adaptive", "--baseline", "--repeat", "1", "--plot")
    assert done.exit_code == ExitCode.OK, done.output
    assert (tmp_path / "run" / "report.png").stat().st_size > 20_000
