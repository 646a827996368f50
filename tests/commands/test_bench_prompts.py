"""Where a bench gets its prompts: random ids by either tool's rule, ShareGPT, the evaluation sets, files with bad records."""

import json

import numpy as np
import pytest

from eaglecli.commands._bench_engine import find_bench_models
from eaglecli.commands._bench_prompts import BenchData, read_prompts
from eaglecli.commands._bench_settings import BenchConfiguration, configurations, resolve_options, with_bench_defaults
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import resolve_settings
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from eaglecli.errors import UserError
from eaglecli.io.console import Console
from tests.commands.program import write_records
from tests.fixtures import END_OF_TURN_ID, write_twin

CHAIN = SpeculationSettings(5, 1, 6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_twin(tmp_path_factory.mktemp("twin"))


def read(pair, settings=None, largest_batch: int = 4, **given) -> BenchData:
    options = resolve_options(given)
    run = resolve_settings({"target": str(pair.target_dir), **(settings or {})}, None, lambda _: "cpu")
    run = with_bench_defaults(run, options)
    return read_prompts(options, run, find_bench_models(run)[0], largest_batch, Console(quiet=True))


def lengths(data: BenchData) -> tuple[list[int], list[int]]:
    return [len(request.prompt_ids) for request in data.requests], [request.sampling.max_new_tokens for request in data.requests]


def test_random_prompts_depend_on_seed_and_number_alone(pair):
    few = read(pair, random_input_len=7, random_output_len=3)
    many = read(pair, largest_batch=9, random_input_len=7, random_output_len=3)
    other = read(pair, {"random_seed": 1}, random_input_len=7, random_output_len=3)
    assert len(few.requests) == 4 and len(many.requests) == 9
    for one, same, another in zip(few.requests, many.requests, other.requests, strict=False):
        assert np.array_equal(one.prompt_ids, same.prompt_ids)
        assert not np.array_equal(one.prompt_ids, another.prompt_ids)
    assert few.requests[0].sampling.stop_token_ids == ()


def test_a_range_ratio_means_what_it_means_in_the_tool_that_is_copied(pair):
    given = {"random_input_len": 100, "random_output_len": 50, "num_prompts": 300}
    assert lengths(read(pair, **given)) == ([100] * 300, [50] * 300)
    ours, _ = lengths(read(pair, **given, random_range_ratio=0.2))
    assert (min(ours), max(ours)) == (80, 120)
    sglang, _ = lengths(read(pair, **given, random_range_ratio=0.2, compat="sglang"))
    assert (min(sglang), max(sglang)) == (20, 100)
    widest, _ = lengths(read(pair, **given, compat="sglang"))
    assert min(widest) < 5 and max(widest) > 95  # its default of 0 is the widest spread


def test_a_peers_temperature_and_seed_are_taken_over_unless_given(pair):
    options = resolve_options({"compat": "vllm"})
    bare = resolve_settings({"target": "t"}, None, lambda _: "cpu")
    assert with_bench_defaults(bare, options).temperature == 1.0
    given = resolve_settings({"target": "t", "temperature": 0.5, "random_seed": 3}, None, lambda _: "cpu")
    assert with_bench_defaults(given, options).temperature == 0.5
    assert with_bench_defaults(bare, resolve_options({"compat": "sglang"})).random_seed == 42
    assert with_bench_defaults(given, resolve_options({"compat": "sglang"})).random_seed == 3


def sharegpt(folder, sizes):
    conversations = [
        {"conversations": [{"from": "human", "value": "q" * question}, {"from": "gpt", "value": "a" * answer}]}
        for question, answer in sizes
    ]
    broken = [{"conversations": [{"from": "human", "value": "only one"}]}, {"other": 1}, {"conversations": [{"value": 1}, {"value": "x"}]}]
    file = folder / "share.json"
    file.write_text(json.dumps([*broken, *conversations]))
    return (str(file),)


def test_sharegpt_pairs_give_prompt_and_length_and_are_filtered_as_the_peers_do(pair, tmp_path):
    path = sharegpt(tmp_path, [(10, 20), (3, 20), (10, 3), (2, 2), (1, 9), (1100, 20), (900, 1100)])
    given = {"dataset_name": "sharegpt", "dataset_path": path}
    found = lengths(read(pair, **given))
    assert sorted(zip(*found, strict=True)) == [(10, 20), (900, 1100)]
    sglang = lengths(read(pair, **given, compat="sglang"))
    assert sorted(zip(*sglang, strict=True)) == [(2, 2), (3, 20), (10, 3), (10, 20), (900, 1100), (1100, 20)]
    short = lengths(read(pair, **given, sharegpt_context_len=500, sharegpt_output_len=7))
    assert sorted(zip(*short, strict=True)) == [(10, 7), (10, 7)]


def test_sharegpt_order_follows_the_seed(pair, tmp_path):
    path = sharegpt(tmp_path, [(10 + number, 20) for number in range(30)])
    given = {"dataset_name": "sharegpt", "dataset_path": path, "num_prompts": 8}
    first, again, other = (lengths(read(pair, {"random_seed": seed}, **given))[0] for seed in (0, 0, 1))
    assert first == again != other and len(first) == 8


def write_sets(folder, names):
    for name in names:
        write_records(
            folder / f"{name}.jsonl", [{"id": f"{name}-1", "messages": [{"role": "user", "content": name}], "turns": [name, "b"]}]
        )
    return folder


def test_evaluation_sets_are_found_in_their_folder_and_keep_their_names(pair, tmp_path):
    names = ("mt_bench", "gsm8k", "humaneval", "alpaca", "sum", "qa")
    folder = str(write_sets(tmp_path, names))
    data = read(pair, dataset_name="eval", dataset_path=(folder,))
    assert data.tags == names and data.name == "eval"
    one = read(pair, dataset_name="mt-bench", dataset_path=(folder,))
    assert one.tags == ("mt_bench",) and one.end_token_ids == (END_OF_TURN_ID,)
    assert read(pair, dataset_name="gsm8k", dataset_path=(str(tmp_path / "gsm8k.jsonl"),)).tags == ("gsm8k",)
    (tmp_path / "sum.jsonl").unlink()
    with pytest.raises(UserError, match="holds no sum.jsonl"):
        read(pair, dataset_name="eval", dataset_path=(folder,))


def test_prompts_come_round_again_when_more_are_wanted_and_are_shuffled_when_asked(pair, tmp_path):
    source = write_records(tmp_path / "p.jsonl", [{"prompt": "x" * (number + 1)} for number in range(5)])
    data = read(pair, dataset_path=(str(source),), num_prompts=12)
    sizes = lengths(data)[0]
    assert sizes[:5] == sizes[5:10] and sizes[:2] == sizes[10:]
    assert [request.key for request in data.requests] == list(range(12))
    shuffled = lengths(read(pair, {"shuffle_seed": 3}, dataset_path=(str(source),)))[0]
    assert shuffled != sizes[:5] and sorted(shuffled) == sorted(sizes[:5])


def test_bad_records_are_left_out_and_counted(pair, tmp_path):
    source = write_records(tmp_path / "p.jsonl", [{"prompt": "good"}, {"prompt": ""}, {"none": 1}])
    assert read(pair, dataset_path=(str(source),)).describe()["num_set_aside"] == 2
    with pytest.raises(UserError, match="can be used"):
        read(pair, dataset_path=(str(write_records(tmp_path / "q.jsonl", [{"none": 1}])),))


def test_an_end_token_ends_an_answer_only_when_asked(pair, tmp_path):
    source = str(write_records(tmp_path / "p.jsonl", [{"prompt": "good"}]))
    assert read(pair, dataset_path=(source,)).requests[0].sampling.stop_token_ids == ()
    assert read(pair, dataset_path=(source,), disable_ignore_eos=True).requests[0].sampling.stop_token_ids == (END_OF_TURN_ID,)


def test_configurations_follow_the_lists():
    by_size = configurations(resolve_options({"batch_size": "4 1,4", "baseline": True}), CHAIN, has_draft=True)
    assert by_size == (
        BenchConfiguration(4, SpeculationPlan(PLAIN)),
        BenchConfiguration(1, SpeculationPlan(PLAIN)),
        BenchConfiguration(4, SpeculationPlan(CHAIN)),
        BenchConfiguration(1, SpeculationPlan(CHAIN)),
    )
    listed = configurations(resolve_options({"config_list": "2,0,1,1;8,5,4,16"}), CHAIN, has_draft=True)
    assert [item.label for item in listed] == ["batch 2, plain", "batch 8, 5/4/16"]
    assert configurations(resolve_options({}), PLAIN, has_draft=False) == (BenchConfiguration(1, SpeculationPlan(PLAIN)),)
    with pytest.raises(UserError, match="needs a draft"):
        configurations(resolve_options({"config_list": "2,5,1,6"}), PLAIN, has_draft=False)
