"""Settings: layers and their origins, ranges, config files, the triple."""

from pathlib import Path

import pytest

from eaglecli.config import DEFAULT_CONFIG, SETTINGS, GenerateSettings, choose_speculation, find_config, read_config, resolve_settings
from eaglecli.errors import ExitCode, UserError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def on_cpu(requested: str) -> str:
    return requested.replace("auto", "cpu")


def settings(given=None, text=None, folder=None, device="auto") -> GenerateSettings:
    config = None
    if text is not None:
        path = folder / "config.yaml"
        path.write_text(text)
        config = read_config(path)
    return resolve_settings({**(given or {}), **({} if device == "auto" else {"device": device})}, config, lambda asked: on_cpu(asked))


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    result = settings({"top_p": 0.5}, "top_p: 0.9\ntop_k: 3\n", tmp_path)
    assert (result.top_p, result.top_k, result.min_p) == (0.5, 3, 0.0)
    assert [result.origin(name) for name in ("top_p", "top_k", "min_p")] == ["command line", "config file", "default"]


def test_values_that_are_false_or_zero_survive_every_layer(tmp_path):
    given = {"temperature": 0.0, "ordered": False}
    result = settings(given, "temperature: 0.7\nordered: true\nignore_eos: false\noffset: 0\n", tmp_path)
    result = result.with_generation_config({"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    assert (result.temperature, result.ordered, result.top_p) == (0.0, False, 0.9)
    assert result.origin("temperature") == "command line"
    assert result.origin("ignore_eos") == "config file"


def test_the_section_of_the_device_lies_over_the_common_part(tmp_path):
    text = "dtype: float32\npage_size: 8\ncpu:\n  page_size: 4\ncuda:\n  page_size: 64\n"
    assert settings({}, text, tmp_path).page_size == 4
    result = settings({}, text, tmp_path, device="cuda")
    assert (result.page_size, result.dtype, result.origin("page_size")) == (64, "float32", "config file, cuda")


def test_generation_config_counts_only_when_it_samples():
    base = settings()
    assert base.with_generation_config({"temperature": 0.6, "do_sample": False}).temperature == 0.0
    sampled = base.with_generation_config({"temperature": 0.6, "top_k": 0, "do_sample": True, "max_new_tokens": 5})
    assert (sampled.temperature, sampled.top_k, sampled.max_new_tokens) == (0.6, -1, 512)
    assert sampled.origin("temperature") == "generation_config"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, float("nan"), float("inf"), "hot", True)],
        *[("top_p", value) for value in (0, 1.1)],
        *[("top_k", value) for value in (0, -2, 1.0)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("page_size", 0), ("limit", 0), ("offset", -1), ("speculative_num_steps", 0), ("speculative_num_draft_tokens", 1)],
        *[
            ("max_new_tokens", 0),
            ("mem_fraction_static", 0),
            ("dtype", "int8"),
            ("draft_config_overrides", "[1]"),
            ("stop_token_ids", "1,x"),
        ],
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag(name, value):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must be") as raised:
        settings({name: value})
    assert raised.value.exit_code == ExitCode.USAGE


def test_stop_token_ids_come_as_text_or_as_a_list():
    assert settings({"stop_token_ids": "2, 0,2"}).stop_token_ids == (2, 0)
    assert settings({"stop_token_ids": [5]}).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature: 1\n", "temperature"),
        ("cuda:\n  page_sise: 1\n", "page_size"),
        ("cudaa:\n  page_size: 1\n", "cuda"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(tmp_path, text, words):
    with pytest.raises(UserError, match="unknown key") as raised:
        settings({}, text, tmp_path)
    assert f"`{words}`" in raised.value.hint


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "temperature: hot", "cpu: 3"])
def test_a_file_that_is_no_mapping_of_good_values_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="config file"):
        settings({}, text, tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("top_k: 3\npage_size: 8\ntop_k: 4\n", "line 3: `top_k`"),
        ("cuda:\n  page_size: 8\n  page_size: 8\n", "line 3: `page_size`"),
        ("cpu: {}\ncpu: {}\n", "line 2: `cpu`"),
        ("speculative_adaptive_config: {4: none, 4: 5/1/6}\n", "line 1: `4`"),
    ],
)
def test_a_key_given_twice_is_refused(tmp_path, text, found):
    with pytest.raises(UserError, match=f"{found} is given twice"):
        settings({}, text, tmp_path)


def test_relative_paths_of_a_file_start_at_its_folder(tmp_path):
    (tmp_path / "draft").mkdir()
    result = settings({}, "input: data/a.jsonl\ntarget: org/model\ndraft: draft\n", tmp_path)
    assert result.input == (str(tmp_path / "data/a.jsonl"),)
    assert (result.target, result.draft) == ("org/model", str(tmp_path / "draft"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_shipped_config_is_found_by_name_and_resolves(path, device):
    assert find_config(path.stem).read_bytes() == path.read_bytes()
    result = resolve_settings({"device": device}, read_config(find_config(path.stem)), on_cpu)
    choose_speculation(result)
    assert result.target


def test_an_unknown_config_name_lists_what_there_is():
    with pytest.raises(UserError) as raised:
        find_config("smolm2-135m")
    assert "smollm2-135m" in raised.value.hint


def test_every_setting_is_described_with_its_origin():
    described = settings({"seed": 1} if "seed" in SETTINGS else {"random_seed": 1}).described()
    assert set(described) == set(SETTINGS)
    assert described["random_seed"] == {"value": 1, "origin": "command line"}


STEPS, TOPK, NODES, CHAIN = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "num_speculative_tokens"


@pytest.mark.parametrize(
    ("given", "triple"),
    [
        ({}, (5, 1, 6)),
        ({STEPS: 3}, (3, 1, 4)),
        ({TOPK: 4}, (5, 4, 8)),
        ({NODES: 4}, (3, 1, 4)),
        ({STEPS: 3, TOPK: 1}, (3, 1, 4)),
        ({STEPS: 1, TOPK: 2}, (1, 2, 3)),
        ({STEPS: 5, NODES: 8}, (5, 2, 8)),
        ({TOPK: 2, NODES: 4}, (3, 2, 4)),
        ({TOPK: 2, NODES: 60}, (16, 2, 60)),
        ({CHAIN: 3}, (3, 1, 4)),
        ({CHAIN: 3, STEPS: 3}, (3, 1, 4)),
        ({STEPS: 5, TOPK: 1, NODES: 9}, (5, 1, 9)),  # wrong and given: left as it is, the engine's rule refuses it
    ],
)
def test_parts_of_the_triple_that_are_left_out_follow_from_the_others(given, triple):
    choice = choose_speculation(settings(given))
    assert (choice.num_steps, choice.topk, choice.num_draft_tokens) == triple


def test_the_chain_shortcut_must_agree_with_the_triple():
    with pytest.raises(UserError, match="contradict"):
        choose_speculation(settings({CHAIN: 3, STEPS: 4}))


def test_a_part_on_the_command_line_sets_the_triple_of_the_file_aside(tmp_path):
    text = f"{STEPS}: 5\n{TOPK}: 4\n{NODES}: 8\n"
    assert choose_speculation(settings({}, text, tmp_path)).num_draft_tokens == 8
    choice = choose_speculation(settings({STEPS: 2}, text, tmp_path))
    assert (choice.num_steps, choice.topk, choice.num_draft_tokens) == (2, 1, 3)
    assert "derived: topk, draft tokens" in choice.explanation


def test_where_only_a_table_is_given_the_triple_is_its_first_one(tmp_path):
    text = "speculative_adaptive_config: {8: [none, 6/4/32], 128: 3/1/4}\n"
    choice = choose_speculation(settings({}, text, tmp_path))
    assert (choice.num_steps, choice.topk, choice.num_draft_tokens) == (6, 4, 32)
    assert "table" in choice.explanation
    assert choose_speculation(settings({CHAIN: 2}, text, tmp_path)).num_draft_tokens == 3


@pytest.mark.parametrize(("device", "triple"), [("cpu", (3, 1, 4)), ("cuda", (6, 4, 32))])
def test_what_the_shipped_config_verifies_and_benches_by_itself(device, triple):
    shipped = resolve_settings({}, read_config(find_config(DEFAULT_CONFIG)), lambda _: device)
    choice = choose_speculation(shipped)
    assert (choice.num_steps, choice.topk, choice.num_draft_tokens) == triple


def test_a_triple_on_the_command_line_sets_aside_what_the_file_chooses_among(tmp_path):
    text = "cpu:\n  speculative_adaptive: true\n  speculative_adaptive_config: {8: [3/1/4]}\n"
    assert settings({}, text, tmp_path).speculative_adaptive
    fixed = settings({CHAIN: 3}, text, tmp_path)
    assert not fixed.speculative_adaptive and fixed.speculative_adaptive_config is None
    both = settings({CHAIN: 3, "speculative_adaptive": True}, text, tmp_path)
    assert both.speculative_adaptive and both.speculative_adaptive_config is None
