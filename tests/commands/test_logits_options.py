"""`generate` with penalties, bias, least lengths and log-probabilities: flags and records, files and sentences. The models are CYCLE."""

import json

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.errors import ExitCode
from eaglecli.io.prompts import InputSelection
from eaglecli.io.sampling_options import EVERY_NEED, SamplingNeeds
from eaglecli.io.scan import scan_input
from tests.commands.program import Program, write_records
from tests.fixtures import END_OF_TURN_ID, text_cycle, write_cycle

LETTERS = text_cycle("abcdefghij")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Prints abcdefghij in a circle."""
    return write_cycle(tmp_path_factory.mktemp("letters"), [LETTERS])


@pytest.fixture
def run(pair, tmp_path):
    """Runs records and gives the program; prompts are raw text."""

    def call(records, *more, code=ExitCode.OK):
        program = Program(pair, write_records(tmp_path / "input.jsonl", records), tmp_path / "run")
        done = program.run("--no-apply-chat-template", "--max-new-tokens", "6", *more)
        assert done.exit_code == code, done.output
        return program

    return call


def bias(letter: str, value: float) -> dict[str, float]:
    return {str(ord(letter)): value}


def test_a_records_option_wins_over_the_flag_and_the_manifest_knows_where_it_came_from(run):
    records = [{"prompt": "a"}, {"prompt": "a", "logit_bias": {}}, {"prompt": "a", "logit_bias": bias("b", -100)}]
    program = run(records, "--logit-bias", json.dumps(bias("c", -100)), "--presence-penalty", "0.5")
    flag, nothing, own = program.lines()
    assert nothing["text"] == "bcdefg"
    assert flag["text"][0] == "b" and "c" not in flag["text"]
    assert own["text"][0] != "b" and "b" not in own["text"]
    settings = program.document("manifest.json")["settings"]
    assert settings["logit_bias"] == {"value": [[ord("c"), -100.0]], "origin": "command line"}
    assert settings["presence_penalty"] == {"value": 0.5, "origin": "command line"}
    assert settings["repetition_penalty"] == {"value": 1.0, "origin": "default"}


def test_an_option_that_one_record_alone_asks_for_is_honoured_and_its_neighbours_stay_as_they_are(run):
    """B36: the engine is opened for what any record asks."""
    program = run([{"prompt": "a"}, {"prompt": "a", "repetition_penalty": 8.0, "max_new_tokens": 30}, {"prompt": "c"}])
    plain, penalised, other = program.lines()
    assert (plain["text"], other["text"]) == ("bcdefg", "defghi")
    assert penalised["token_ids"] != (LETTERS * 4)[1:31]


def test_a_least_length_bars_the_end_until_it_is_reached(run):
    records = [{"prompt": "a"}, {"prompt": "a", "min_new_tokens": 3}, {"prompt": "a", "min_tokens": 6, "max_new_tokens": 6}]
    early, later, never = run(records, "--stop-token-ids", str(ord("c"))).lines()
    assert (early["finish_reason"], early["token_ids"]) == ("stop", [ord("b"), ord("c")])
    assert ord("c") not in later["token_ids"][:3] and len(later["token_ids"]) > 3
    assert ord("c") not in never["token_ids"] or never["token_ids"].index(ord("c")) == 5


def test_a_stream_may_ask_for_anything_in_a_later_record(pair, tmp_path):
    records = [{"prompt": "a"}, {"prompt": "a", "logit_bias": bias("b", -100), "logprobs": 20}]
    program = Program(pair, tmp_path / "unused", tmp_path / "run")
    arguments = [argument if argument != str(program.source) else "-" for argument in program.arguments("--no-apply-chat-template")]
    done = CliRunner().invoke(app, arguments, input="".join(json.dumps(record) + "\n" for record in records))
    assert done.exit_code == ExitCode.OK, done.output
    first, second = program.lines()
    assert first["text"] == "bcde" and second["text"][0] != "b"
    assert "logprobs" not in first and len(second["logprobs"]["top_logprobs"][0]) == 20


def test_needs_are_those_of_all_records(tmp_path):
    def needs(*options):
        source = write_records(tmp_path / "input.jsonl", [{"prompt": "a", **own} for own in options])
        return scan_input(InputSelection((str(source),))).needs

    assert needs({}, {"temperature": 1}, {"repetition_penalty": 1.0, "logit_bias": {}, "min_new_tokens": 0}) == SamplingNeeds()
    assert needs({}, {"frequency_penalty": 0.1}) == SamplingNeeds(adjusts_logits=True)
    assert needs({"logprobs": 2}, {"logprobs": 7}, {"logprobs": 0}) == SamplingNeeds(max_logprobs=7)
    assert needs({"logprobs": 0}, {"min_new_tokens": 2}) == SamplingNeeds(True, 0)
    assert EVERY_NEED.and_of({"logprobs": 3}) is EVERY_NEED


# ---- log-probabilities in the files --------------------------------------------------------------------------------


def test_logprobs_have_an_entry_for_each_token_and_name_the_tokens(run):
    """B53, the side of the answer: the end token has one too; a record without the option has none."""
    program = run([{"prompt": "a"}, {"prompt": "a", "logprobs": 0}, {"prompt": "a", "stop_token_ids": [ord("d")]}], "--logprobs", "3")
    for line in program.lines():
        given, count = line["logprobs"], len(line["token_ids"])
        wanted = 0 if line["index"] == 1 else 3
        assert list(given) == ["tokens", "token_logprobs", "top_token_ids", "top_tokens", "top_logprobs"]
        assert given["tokens"] == list("bcdefg")[:count]
        assert len(given["token_logprobs"]) == count
        for ids, tokens, values in zip(given["top_token_ids"], given["top_tokens"], given["top_logprobs"], strict=True):
            assert len(ids) == len(tokens) == len(values) == wanted
            assert values == sorted(values, reverse=True) and all(value <= 0 for value in values)
        if wanted:
            assert [ids[0] for ids in given["top_token_ids"]] == line["token_ids"]
            assert [values[0] for values in given["top_logprobs"]] == given["token_logprobs"]
    assert "logprobs" not in run([{"prompt": "a"}], "--overwrite").lines()[0]


def test_logprobs_of_several_turns_are_those_of_all_tokens(run):
    (line,) = run([{"turns": ["a", "b"]}], "--apply-chat-template", "--logprobs", "1").lines()
    assert len(line["turns"]) == 2
    assert len(line["logprobs"]["token_logprobs"]) == len(line["token_ids"]) == 12


def test_openai_lines_carry_logprobs_as_the_api_does(run):
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    raw = {"prompt": "a", "logprobs": 2, "max_tokens": 3}
    silent = {"prompt": "a", "logprobs": False, "max_tokens": 3}
    records = [
        {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": body}
        for name, url, body in (("chat", "chat/completions", chat), ("raw", "completions", raw), ("none", "completions", silent))
    ]
    program = run(records, "--output-format", "openai-batch", "--logprobs", "5")
    lines = [line["response"]["body"]["choices"][0]["logprobs"] for line in program.lines("openai_batch_output.jsonl")]
    written = [line.get("logprobs") for line in program.lines()]
    content = lines[0]["content"]
    assert [entry["logprob"] for entry in content] == written[0]["token_logprobs"]
    assert all(len(entry["top_logprobs"]) == 2 and bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert lines[1]["tokens"] == ["b", "c", "d"] and lines[1]["text_offset"] == [0, 1, 2]
    assert lines[1]["token_logprobs"] == written[1]["token_logprobs"]
    assert [max(alternatives, key=alternatives.get) for alternatives in lines[1]["top_logprobs"]] == ["b", "c", "d"]
    assert lines[2] is None and written[2] is None


def test_the_parquet_table_has_logprobs_as_json(run):
    program = run([{"prompt": "a", "logprobs": 1}, {"prompt": "b"}], "--output-format", "parquet")
    first, second = pyarrow.parquet.read_table(program.output / "generations.parquet")["logprobs"].to_pylist()
    assert json.loads(first) == program.lines()[0]["logprobs"] and second is None


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--min-new-tokens", "7"], "--min-new-tokens 7 is more than --max-new-tokens 6"),
        (["--logit-bias", '{"320": 1}'], "--logit-bias names token 320, the target has 320 tokens"),
        (["--logit-bias", "b=3"], "--logit-bias must be an object of token ids and numbers"),
        (["--logit-bias", '{"3": 101}'], "--logit-bias of token 3 must be a number from -100 up to 100"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be a number above 0"),
        (["--frequency-penalty", "2.5"], "--frequency-penalty must be a number from -2 up to 2"),
        (["--logprobs", "21"], "--logprobs must be an integer from 0 to 20"),
    ],
)
def test_a_flag_out_of_range_is_a_usage_error(pair, tmp_path, arguments, sentence):
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), tmp_path / "run")
    done = program.run("--max-new-tokens", "6", *arguments)
    assert done.exit_code == ExitCode.USAGE
    assert sentence in " ".join(done.output.split())


def test_a_record_that_contradicts_itself_or_the_vocabulary_is_set_aside_by_line(run):
    records = [
        {"prompt": "a"},
        {"prompt": "a", "min_new_tokens": 9},
        {"prompt": "a", "logit_bias": {"999": 1}},
        {"prompt": "a", "logprobs": 21},
        {"prompt_token_ids": [97] * 500, "min_new_tokens": 20, "max_new_tokens": None},
    ]
    errors = run(records, code=ExitCode.PARTIAL).lines("errors.jsonl")
    assert [(error["line"], error["code"]) for error in errors] == [(line, "bad_option") for line in (2, 3, 4, 5)]
    assert "`min_new_tokens` 9 is more than max_new_tokens 6" in errors[0]["message"]
    assert "`logit_bias` names token 999, the target has 320 tokens" in errors[1]["message"]


def test_a_repetition_penalty_of_the_models_own_config_is_used_when_that_samples(tmp_path):
    pair = write_cycle(tmp_path / "models", [LETTERS])
    (pair.target_dir / "generation_config.json").write_text(json.dumps({"do_sample": True, "repetition_penalty": 1.25, "temperature": 0.5}))
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}]), tmp_path / "run")
    done = program.run()
    assert "repetition_penalty 1.25" in done.output
    assert program.document("manifest.json")["settings"]["repetition_penalty"] == {"value": 1.25, "origin": "generation_config"}
    assert END_OF_TURN_ID not in program.lines()[0]["token_ids"]
