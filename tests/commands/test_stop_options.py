"""Stop strings, stop ids and ignore-eos from flags, config files and records, and what a line says of the end. A token a byte."""

import json

import pytest

from eaglecli.engine.request import Completion
from eaglecli.errors import ExitCode
from tests.commands.program import Program, ScriptedModels, lines, scripted_run, write_records
from tests.fixtures import END_OF_TURN_ID, text_cycle, write_cycle

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Says the alphabet from where the prompt's last letter stands; the newline of the template is followed by `a`."""
    return write_cycle(tmp_path_factory.mktemp("letters"), [[10, *text_cycle(ALPHABET)]])


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """Says `ab`, then the end of the turn, then begins anew."""
    return write_cycle(tmp_path_factory.mktemp("ending"), [[10, 97, 98, END_OF_TURN_ID]])


@pytest.fixture
def run(pair, tmp_path):
    """The lines of a run over records."""

    def call(records, *options, pair=pair, code=0):
        program = Program(pair, write_records(tmp_path / "input.jsonl", records), tmp_path / "run")
        done = program.run("--max-new-tokens", "20", "--num-speculative-tokens", "4", "--overwrite", *options)
        assert done.exit_code == code, done.output
        return program.lines()

    return call


def end_of(line: dict) -> tuple:
    return line["text"], line["finish_reason"], line["stop_reason"], line["usage"]["completion_tokens"]


def closes(line: dict) -> bool:
    spec = line["spec"]
    steps_and_drafts = spec["spec_verify_ct"] + spec["spec_num_correct_drafts"]
    turns = len(line.get("turns") or (1,))
    return line["usage"]["completion_tokens"] == len(line["token_ids"]) == turns + steps_and_drafts - spec["spec_num_cut_tokens"]


def test_the_text_ends_before_the_stop_string_and_the_ids_behind_it(run):
    """B39, B63: C counts the tokens of the string; the counts close."""
    line, other = run([{"prompt": "x"}, {"prompt": "y", "stop": "hij"}], "--stop", "fg", "--stop", "zz")
    assert end_of(line) == ("abcde", "stop", "fg", 7)
    assert bytes(line["token_ids"]) == b"abcdefg"
    assert end_of(other) == ("abcdefg", "stop", "hij", 10)
    assert closes(line)
    assert closes(other)


def test_a_record_wins_over_the_command_line_and_may_ask_for_none(run):
    records = [{"prompt": "x", "stop": stop} for stop in ("d", ["k", "c"], "", [], None)]
    texts = [line["text"] for line in run(records, "--stop", "b")]
    assert texts == ["abc", "ab", ALPHABET[:20], ALPHABET[:20], "a"]


def test_the_command_line_wins_over_the_config_file_and_origins_are_told(run, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text('stop: ["e", "f"]\nignore_eos: true\nnum_samples: 1\n')
    assert [line["text"] for line in run([{"prompt": "x"}], "--config", str(config))] == ["abcd"]
    settings = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert settings["stop"] == {"value": ["e", "f"], "origin": "config file"}
    assert settings["ignore_eos"] == {"value": True, "origin": "config file"}
    assert [line["text"] for line in run([{"prompt": "x"}], "--config", str(config), "--stop", "")] == [ALPHABET[:20]]
    settings = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert settings["stop"] == {"value": [], "origin": "command line"}


def test_other_stop_strings_make_another_run(pair, tmp_path):
    program = Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "x"}]), tmp_path / "run")
    assert program.run("--stop", "b").exit_code == 0
    assert program.run("--stop", "b").exit_code == 0
    done = program.run("--stop", "c")
    assert done.exit_code == ExitCode.USAGE
    assert "stop: ['b'] -> ['c']" in done.stderr


def test_a_later_turn_is_asked_after_the_answer_without_its_stop_string(run, pair):
    """What was left out of the text is not in the prompt of the next turn either."""
    (line,) = run([{"turns": ["x", "y"]}], "--stop", "cd")
    assert [(turn["text"], turn["stop_reason"]) for turn in line["turns"]] == [("ab", "cd")] * 2
    assert end_of(line) == ("ab", "stop", "cd", 8)
    asked = [turn["usage"]["prompt_tokens"] for turn in line["turns"]]
    assert asked[1] - asked[0] == len("ab.\n.user\ny.\n.assistant\n"), "the template and the answer's two letters"
    assert closes(line)


@pytest.mark.parametrize("options", [(), ("--draft", "none")], ids=["draft", "plain"])
def test_the_control_token_that_a_stop_string_spells_ends_the_answer(run, ending, options):
    """No text ever shows it. The record's own stop strings count as well, with end-of-text ignored."""
    records = [
        {"prompt": "x", "stop": "<|im_end|>", "ignore_eos": True},
        {"prompt": "x", "stop": ["ba", "<|im_end|>x"], "ignore_eos": True, "max_new_tokens": 9},
    ]
    first, second = run(records, *options, pair=ending)
    assert end_of(first) == ("ab", "stop", END_OF_TURN_ID, 3)
    assert end_of(second)[1:] == ("length", None, 9)
    assert second["text"] == "ab\nab\na"


@pytest.mark.parametrize("options", [(), ("--draft", "none")], ids=["draft", "plain"])
def test_end_tokens_end_the_answer_unless_the_record_or_the_run_ignores_them(run, ending, options):
    """B41: a token of the model's end ids; caps of 1, 2, 3; a record that ignores it beside others; false wins over the flag."""
    records = [
        {"prompt": "x"},
        {"prompt": "x", "ignore_eos": True, "max_new_tokens": 9},
        *({"prompt": "x", "max_new_tokens": cap} for cap in (1, 2, 3)),
        {"prompt_token_ids": [98]},
    ]
    found = [end_of(line) for line in run(records, *options, pair=ending)]
    ended = ("ab", "stop", END_OF_TURN_ID, 3)
    assert found[0] == ended
    assert found[1] == ("ab\nab\na", "length", None, 9)
    assert found[2:5] == [("a", "length", None, 1), ("ab", "length", None, 2), ended]
    assert found[5] == ("", "stop", END_OF_TURN_ID, 1), "the very first token"
    first, second = run([{"prompt": "x", "ignore_eos": False}, {"prompt": "x"}], "--ignore-eos", *options, pair=ending)
    assert (end_of(first), second["finish_reason"]) == (ended, "length")


@pytest.mark.parametrize(
    ("in_config", "in_generation", "reason"),
    [
        (98, None, 98),
        ([98, 100], None, 98),
        ([101, 102], {"eos_token_id": 98}, 98),
        (None, {"eos_token_id": [200, 98]}, 98),
        (None, None, END_OF_TURN_ID),
        (200, None, None),
    ],
)
def test_end_tokens_are_found_wherever_the_model_keeps_them(tmp_path, run, in_config, in_generation, reason):
    """B41: an int, a list, in generation_config alone; the tokenizer's own when the model names none, and only then."""
    other = write_cycle(tmp_path / "model", [[10, 97, 98, END_OF_TURN_ID]], eos_token_id=in_config)
    if in_generation is not None:
        (other.target_dir / "generation_config.json").write_text(json.dumps(in_generation))
    assert [line["stop_reason"] for line in run([{"prompt": "x"}], pair=other)] == [reason]


def test_a_stop_that_cannot_be_is_a_bad_record_with_its_line(run, tmp_path):
    """The sentence names the option; the run's own is refused before anything is read."""
    records = [
        {"prompt": "x", "stop": 3},
        {"prompt": "x", "stop": ["a", ""]},
        {"prompt": "x", "ignore_eos": "yes"},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "stop_sequences": ["a"]},
        {"prompt": "x", "n": 2, "num_samples": 2},
        {"prompt": "x", "stop_token_ids": list(range(300, 318))},
        {"prompt": "x"},
    ]
    run(records, code=ExitCode.PARTIAL)
    errors = lines(tmp_path / "run" / "errors.jsonl")
    assert [error["line"] for error in errors] == [1, 2, 3, 4, 5, 6, 7]
    assert [error["code"] for error in errors] == ["bad_option"] * 4 + ["unsupported"] + ["bad_option"] * 2
    words = ["`stop` must be a text", "`stop`", "`ignore_eos`", "`n`", "`stop_sequences`", "twice", "19 stop"]
    assert all(word in error["message"] for word, error in zip(words, errors, strict=True))


@pytest.mark.parametrize("options", [("--stop", "a", "--stop", ""), ("--stop", "\ufffd")])
def test_a_stop_string_of_the_run_that_can_never_be_said_is_refused_at_once(run, options):
    assert run([{"prompt": "x"}], code=0)
    program_lines = run([{"prompt": "x"}], *options, code=ExitCode.USAGE)
    assert len(program_lines) == 1, "the earlier run was not touched"


def test_a_table_gives_stop_strings_as_they_stand_or_as_a_list(run, tmp_path, pair):
    source = tmp_path / "input.csv"
    source.write_text('prompt,stop,n,ignore_eos\nx,c,,\nx,"[""e"", ""g""]",,\nx,42,2,true\nx,,,\n')
    program = Program(pair, source, tmp_path / "run")
    assert program.run("--max-new-tokens", "8").exit_code == 0
    assert [line["text"] for line in program.lines()] == ["ab", "abcd", *["abcdefgh"] * 3]


def test_stop_strings_of_a_batch_line_hold_for_it_alone(run):
    def batch(name: str, **body: object) -> dict:
        messages = [{"role": "user", "content": "x"}]
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, **body}}

    found = run([batch("a", stop="c"), batch("b", stop=["d"], n=2), batch("c")])
    assert [(line["id"], line["sample"], line["text"]) for line in found] == [
        ("a", 0, "ab"),
        ("b", 0, "abc"),
        ("b", 1, "abc"),
        ("c", 0, ALPHABET[:20]),
    ]


def test_each_sample_has_a_watch_of_its_own(tmp_path, pair):
    """Samples share the prompt's tokens, never what was read of an answer."""
    watches = []

    def respond(request):
        watches.append(request.make_stop_watch())
        return Completion(request, request.prompt_ids[:1], "length")

    assert scripted_run(tmp_path, ScriptedModels(pair.target_dir, respond), 1, num_samples=3, stop="x", max_new_tokens=4).exit_code == 0
    assert len({id(watch) for watch in watches}) == 3


def test_log_probabilities_end_where_the_tokens_of_a_stop_string_end(run):
    """B53: one entry a token, whatever was cut of the last step; the accept length is that without them."""
    with_them, without = run([{"prompt": "x", "logprobs": 2}, {"prompt": "x"}], "--stop", "fg")
    assert len(with_them["logprobs"]["token_logprobs"]) == len(with_them["logprobs"]["top_tokens"]) == 7
    assert with_them["logprobs"]["tokens"] == list("abcdefg")
    assert with_them["spec"] == without["spec"]
    assert with_them["spec"]["spec_num_cut_tokens"] > 0


def test_a_stop_string_ends_nothing_before_the_least_length(run):
    """Ids and strings alike: the token that ends the answer has as many before it."""
    records = [{"prompt": "x", "min_new_tokens": least, **stop} for least in (2, 3) for stop in ({"stop": "c"}, {"stop_token_ids": [99]})]
    assert [line["usage"]["completion_tokens"] for line in run(records)][:2] == [3, 3]
    string, token = run(records[2:])
    assert end_of(string)[1:] == ("length", None, 20)
    assert token["usage"]["completion_tokens"] == 20
