"""`eaglecli capture` as a whole, in process; and the flags of graphs in `generate`. Without a GPU: the padded stages on the CPU."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from eaglecli.cli import app, join_values
from eaglecli.commands._graphs import capture_for_run, capture_graphs, choose_backend, wanted_graph_sizes
from eaglecli.commands._open_engine import find_models
from eaglecli.config import normalize_graph_sizes, resolve_settings
from eaglecli.engine.engine import Engine
from eaglecli.engine.graph_runner import CaptureError, CaptureReport
from eaglecli.errors import ExitCode, UserError
from tests.fixtures import Pair, read_checkpoint, write_checkpoint, write_e3, write_twin

on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_e3(tmp_path_factory.mktemp("e3"))


def invoke(pair: Pair, *arguments: str, command: str = "capture"):
    models = ["--target", str(pair.target_dir), "--draft", str(pair.draft_dir)]
    sizes = ["--context-length", "256", "--max-total-tokens", "2048", "--max-running-requests", "5", "--num-speculative-tokens", "3"]
    return CliRunner().invoke(app, [command, *models, *sizes, "--device", "cpu", *arguments])


def settings_of(device: str = "cpu", **given):
    return resolve_settings({"target": "t", **given}, None, lambda _: device)


def test_without_a_gpu_the_padded_stages_are_checked_and_nothing_is_captured(pair):
    done = invoke(pair, "--cuda-graph-bs", "4", "2", "1", "2", "8", "--json")
    assert done.exit_code == ExitCode.OK, done.output
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert (document["is_captured"], document["graphs"], document["device"]) == (False, [], "cpu")
    assert document["graph_sizes"] == [1, 2, 4, 8]
    assert document["padding_waste"]["4"] == 1 / 8
    checked = [(check["size"], check["num_requests"]) for check in document["checks"]]
    assert checked == [(1, 1), (2, 2), (4, 3), (4, 4), (8, 5)]  # at most five requests run
    assert all(check["is_exact"] and check["num_padding_differs"] == 0 for check in document["checks"])
    prefills = [(check["size_tokens"], check["num_tokens"] <= check["size_tokens"]) for check in document["prefill_checks"]]
    assert prefills == [(64, True), (128, True), (256, True), (512, True)]
    assert all(check["is_exact"] and check["num_padding_differs"] == 0 for check in document["prefill_checks"])
    assert "graphs are not used" in done.stderr and "9 checks passed" in done.stderr


def test_without_json_nothing_goes_to_standard_output(pair):
    done = invoke(pair, "--cuda-graph-bs", "1")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no effect" in done.stderr


def test_a_largest_size_below_the_batch_is_pointed_out(pair):
    document = json.loads(invoke(pair, "--cuda-graph-max-bs", "2", "--json").stdout)
    assert document["graph_sizes"] == [1, 2]
    assert document["advice"] == ["batches of 3 to 5 requests run without a graph: add 5 to --cuda-graph-bs"]


def test_sizes_with_much_padding_are_pointed_out(pair):
    document = json.loads(invoke(pair, "--cuda-graph-bs", "5", "--json").stdout)
    assert "40% of the rows" in document["advice"][0]


def test_a_difference_is_told_by_name_and_exit_code(pair, monkeypatch):
    check_stages = Engine.check_stages

    def differ(engine, num_requests, seed, mode_number):
        return dataclasses.replace(check_stages(engine, num_requests, seed), poison_differs=("run.features",))

    monkeypatch.setattr(Engine, "check_stages", differ)
    done = invoke(pair, "--cuda-graph-bs", "1", "--json")
    assert done.exit_code == ExitCode.CHECK_FAILED
    assert json.loads(done.stdout)["exit_code"] == ExitCode.CHECK_FAILED
    assert "poison: run.features" in done.stderr


def test_other_text_by_padding_fails_in_float32_only(pair, monkeypatch):
    check_stages = Engine.check_stages
    monkeypatch.setattr(
        Engine,
        "check_stages",
        lambda engine, count, seed, mode_number: dataclasses.replace(check_stages(engine, count, seed), num_padding_differs=1),
    )
    assert invoke(pair, "--cuda-graph-bs", "2").exit_code == ExitCode.CHECK_FAILED
    assert invoke(pair, "--cuda-graph-bs", "2", "--dtype", "bfloat16").exit_code == ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda-graph-bs", ""], "nothing to capture"),
        (["--cuda-graph-bs", "0"], "--cuda-graph-bs"),
        (["--cuda-graph-bs", "one"], "--cuda-graph-bs"),
        (["--attention-backend", "triton"], "--attention-backend triton needs a CUDA device"),
        (["--from-run", "nowhere"], "nowhere"),
    ],
)
@on_the_cpu
def test_what_cannot_be_is_refused_as_usage(pair, arguments, words):
    done = invoke(pair, *arguments)
    assert done.exit_code == ExitCode.USAGE
    assert words in done.stderr and "Traceback" not in done.stderr


def write_run(folder: Path, iterations_by_requests: dict) -> str:
    folder.mkdir()
    (folder / "stats.json").write_text(json.dumps({"engine": {"iterations_by_requests": iterations_by_requests}}))
    return str(folder)


def test_an_earlier_run_shows_which_sizes_it_would_have_used(pair, tmp_path):
    folder = write_run(tmp_path / "run", {"3": 6, "5": 2})
    document = json.loads(invoke(pair, "--cuda-graph-bs", "1", "2", "4", "--from-run", folder, "--json").stdout)
    assert document["from_run"] == {"graph_hit_rate": 6 / 8, "padding_waste": 1 / 4}
    assert any("graphs of 1 2 requests" in line for line in document["advice"])
    assert any("25.0% of its iterations had more than 4 requests" in line for line in document["advice"])


@pytest.mark.parametrize("stats", ["{}", "[]", "{", '{"engine": {"iterations_by_requests": {}}}'])
def test_a_run_without_batches_is_refused(pair, tmp_path, stats):
    (tmp_path / "stats.json").write_text(stats)
    done = invoke(pair, "--from-run", str(tmp_path))
    assert done.exit_code == ExitCode.USAGE and "--from-run" in done.stderr


def recast_draft(pair: Pair, folder: Path, dtype: torch.dtype, names_dtype: bool) -> Pair:
    config, tensors = read_checkpoint(pair.draft_dir)
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    config |= {"dtype": str(dtype).removeprefix("torch.")} if names_dtype else {}
    recast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return pair._replace(draft_dir=write_checkpoint(folder, config, recast))


@pytest.mark.parametrize(("dtype", "names_dtype"), [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, False)], ids=str)
@pytest.mark.parametrize("command", ["capture", "generate"])
def test_a_draft_of_another_type_is_cast_with_one_warning(pair, tmp_path, dtype, names_dtype, command):
    """B09."""
    recast = recast_draft(pair, tmp_path / "draft", dtype, names_dtype)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    files = ["-i", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "run"), "--max-new-tokens", "4"]
    done = invoke(recast, *(["--cuda-graph-bs", "2"] if command == "capture" else files), command=command)
    assert done.exit_code == ExitCode.OK, done.output
    assert done.stderr.count("cast to the run's float32") == 1


@on_the_cpu
def test_generate_says_that_graph_flags_change_nothing_without_a_gpu(pair, tmp_path):
    """B28."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    files = ["-i", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "run"), "--max-new-tokens", "4"]
    done = invoke(pair, *files, "--cuda-graph-bs", "1", "2", "--attention-backend", "torch", command="generate")
    assert done.exit_code == ExitCode.OK, done.output
    assert "graphs are not used: --cuda-graph-bs changes nothing" in done.stderr
    engine = json.loads((tmp_path / "run" / "stats.json").read_text())["engine"]
    assert engine["attention_backend"] == "torch"
    assert (engine["graph_sizes"], engine["graph_hit_rate"]) == ([], 0.0)
    assert engine["stages"]["verify"] == {"graph_runs": 0, "eager_runs": engine["num_iterations"]}
    assert engine["iterations_by_requests"] == {"1": engine["num_iterations"]}


@pytest.mark.parametrize("value", ["8,2 1 2", "1 2 8", [8, 2, 1, 1], ["8", "2,", 1]])
def test_sizes_in_odd_order_with_repeats_are_put_in_order(value):
    """B27."""
    if value == ["8", "2,", 1]:
        with pytest.raises(ValueError, match="batch sizes"):
            normalize_graph_sizes(value)
    else:
        assert normalize_graph_sizes(value) == (1, 2, 8)


@pytest.mark.parametrize("value", ["0", "x", "-1", [True], [1.5], {"a": 1}])
def test_what_is_no_batch_size_is_refused(value):
    with pytest.raises(ValueError, match="batch sizes"):
        normalize_graph_sizes(value)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (1, 2, 4, 8, 16)),
        ({"max_running_requests": 5}, (1, 2, 4, 5)),
        ({"cuda_graph_max_bs": 6}, (1, 2, 4, 6)),
        ({"cuda_graph_max_bs": 99}, (1, 2, 4, 8, 16)),
        ({"cuda_graph_bs": "32 3 3"}, (3, 32)),
        ({"cuda_graph_bs": "3 32 64"}, (3, 32)),
        ({"cuda_graph_bs": "1 2 8", "cuda_graph_max_bs": 4}, (1, 2)),
        ({"cuda_graph_bs": ""}, ()),
        ({"disable_cuda_graph": True, "cuda_graph_bs": "1"}, ()),
    ],
    ids=str,
)
def test_the_sizes_of_a_run_follow_from_its_settings(given, sizes):
    assert wanted_graph_sizes(settings_of(**given)) == sizes


def test_values_after_the_option_belong_to_it_up_to_the_next_option():
    assert join_values(["--cuda-graph-bs", "1", "2", "4,8", "--json", "5"]) == ["--cuda-graph-bs", "1,2,4,8", "--json", "5"]
    assert join_values(["--limit", "1", "2", "--cuda_graph_bs", "3", "x"]) == ["--limit", "1", "2", "--cuda_graph_bs", "3", "x"]


def fake_engine(is_out_of_memory: bool, fitting_size: int | None):
    def capture():
        yield CaptureReport("draft", 8, 8, 128, 0.1, 0.1, 1 << 20)
        raise CaptureError("verify", 8, 32, is_out_of_memory, "no luck")

    return SimpleNamespace(capture=capture, find_capturable_size=lambda below: fitting_size if below == 8 else -1)


@pytest.mark.parametrize(
    ("is_out_of_memory", "fitting_size", "words"),
    [
        (True, 4, "--cuda-graph-max-bs 4"),
        (True, 4, "--mem-fraction-static 0.75"),
        (True, None, "--disable-cuda-graph"),
        (False, None, "--disable-cuda-graph"),
    ],
)
def test_a_capture_that_fails_names_a_flag_and_a_value_that_would_do(is_out_of_memory, fitting_size, words):
    """B28."""
    seen = []
    with pytest.raises(UserError) as raised:
        capture_graphs(fake_engine(is_out_of_memory, fitting_size), settings_of("cuda"), seen.append)  # type: ignore[arg-type]
    assert raised.value.exit_code == ExitCode.MEMORY
    assert words in raised.value.hint
    assert "verify" in raised.value.message and "8 requests" in raised.value.message
    assert len(seen) == 1


def test_where_memory_is_short_for_graphs_of_prefills_alone_these_run_eagerly(pair, monkeypatch):
    """B28."""
    kept = CaptureReport("draft", 8, 8, 128, 0.1, 0.1, 1 << 20)

    def capture(engine):
        yield kept
        yield CaptureReport("prefill", 8, 512, 128, 0.1, 0.1, 1 << 20)
        raise CaptureError("prefill", 8, 384, True, "no luck")

    settings = resolve_settings(
        {"target": str(pair.target_dir), "draft": str(pair.draft_dir), "context_length": 256}, None, lambda _: "cpu"
    )
    engine = find_models(settings).build_engine(settings, choose_backend(settings), (2, 4)).engine
    assert engine.prefill_sizes
    monkeypatch.setattr(Engine, "capture", capture)
    assert "no memory is left for graphs of prefills" in capture_for_run(engine, settings)
    assert not engine.prefill_sizes and engine.lacks_prefill_graphs
    assert capture_graphs(engine, settings) == [kept]


def test_a_difference_of_a_prefill_is_told_by_name_and_exit_code(pair, monkeypatch):
    check_prefill = Engine.check_prefill
    monkeypatch.setattr(
        Engine,
        "check_prefill",
        lambda engine, size, seed: dataclasses.replace(check_prefill(engine, size, seed), poison_differs=("state.verified_id",)),
    )
    done = invoke(pair, "--cuda-graph-bs", "1")
    assert done.exit_code == ExitCode.CHECK_FAILED
    assert "poison: state.verified_id" in done.stderr


def test_the_backend_is_chosen_by_flag_or_by_device():
    assert choose_backend(settings_of()).name == "torch"
    assert choose_backend(settings_of("cuda")).name == "triton"
    assert choose_backend(settings_of("cuda", attention_backend="torch")).needs_host_lengths


def test_capture_checks_plain_decoding_too(tmp_path):
    pair = write_twin(tmp_path)
    arguments = ["--target", str(pair.target_dir), "--device", "cpu", "--context-length", "128", "--max-total-tokens", "1024"]
    done = CliRunner().invoke(app, ["capture", *arguments, "--cuda-graph-bs", "1", "3", "--json", "-q"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["speculation"]["num_steps"] == 0


def test_with_deterministic_inference_padding_must_change_nothing_in_any_dtype(pair, monkeypatch):
    arguments = ("--cuda-graph-bs", "4", "--dtype", "bfloat16", "--enable-deterministic-inference", "--json")
    checks = json.loads(invoke(pair, *arguments).stdout)["checks"]
    assert [check["padding_difference"] for check in checks] == [0.0, 0.0]
    check_stages = Engine.check_stages
    monkeypatch.setattr(
        Engine,
        "check_stages",
        lambda engine, count, seed, mode_number: dataclasses.replace(check_stages(engine, count, seed), num_padding_differs=1),
    )
    assert invoke(pair, *arguments).exit_code == ExitCode.CHECK_FAILED


def test_every_mode_of_an_adaptive_run_is_checked(pair):
    done = invoke(pair, "--cuda-graph-bs", "2", "--max-running-requests", "2", "--speculative-adaptive", "--json")
    assert done.exit_code == ExitCode.OK, done.output
    document = json.loads(done.stdout)
    assert list(document["alternatives"]) == ["none", "2/1/3", "5/1/6", "7/1/8", "5/4/16"]
    assert len(document["checks"]) == 2 * 6
    assert all(check["is_exact"] for check in document["checks"])
