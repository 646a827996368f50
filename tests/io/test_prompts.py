"""Records: which are good, which are bad and why; ids, options and text survive unchanged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.io.chat_messages import is_blank
from eaglecli.io.prompts import read_prompts
from eaglecli.io.record_ids import IdPlan, request_seed
from eaglecli.io.records import PromptRecord, RecordError
from eaglecli.io.scan import scan_input
from tests.io.reading import MESSY, read, read_objects, select


def test_conversations_that_ask_nothing_or_hold_no_text_are_bad_one_by_one():
    bad = {json.loads(record.key.id_json) for record in read(MESSY / "messages_multi_turn.jsonl") if isinstance(record, RecordError)}
    assert bad == {
        *("ends-with-assistant", "ends-with-system", "system-only", "image-part", "unknown-role", "messages-as-dict"),
        *("messages-as-json-text", "messages-of-strings", "missing-content", "nested-list"),
    }


def test_parts_of_a_content_are_joined_with_nothing_between():
    record = next(record for record in read(MESSY / "messages_multi_turn.jsonl") if record.key.id_json == '"content-parts"')
    assert record.messages[0]["content"] == "Translate to French: good evening"


def test_prompt_text_is_unchanged():
    path = MESSY / "whitespace_matters.jsonl"
    expected = [json.loads(line)["prompt"] for line in path.read_bytes().split(b"\n") if line]
    assert [record.text for record in read(path)] == expected


def test_ids_keep_their_type_and_value_and_missing_ones_are_made_up():
    ids = [record.key.id_json for record in read(MESSY / "odd_ids.jsonl")]
    assert ids[:3] == ['"record-0"', '"record-1"', '"record-2"']
    assert ids[3:8] == ["7", '"7"', "7.0", "true", '{"run": 1, "row": 2}']
    assert "9007199254740993" in ids


def test_a_made_up_id_never_meets_a_given_one(tmp_path):
    records = read_objects(tmp_path, {"prompt": "a"}, {"prompt": "b", "id": "record-0"}, {"prompt": "c", "id": "record--0"})
    assert len({record.key.id_json for record in records}) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_id_that_json_cannot_write_is_bad(tmp_path, value):
    (record,) = read_objects(tmp_path, {"prompt": "a", "id": value})
    assert record.code == "bad_type"


def test_the_error_of_a_bad_byte_names_the_byte_offset_in_the_file():
    data = (MESSY / "non_utf8_bytes.jsonl").read_bytes()
    record = next(record for record in read(MESSY / "non_utf8_bytes.jsonl") if isinstance(record, RecordError))
    assert data[record.byte_offset] == 0xE9
    assert f"byte {record.byte_offset}" in record.message


def test_a_trailing_comma_is_called_so():
    messages = [record.message for record in read(MESSY / "trailing_comma.jsonl") if isinstance(record, RecordError)]
    assert len(messages) == 4
    assert all("trailing comma" in message for message in messages)


def test_a_missing_prompt_lists_the_keys_that_are_there():
    messages = {record.key.line: record.message for record in read(MESSY / "missing_prompt.jsonl") if isinstance(record, RecordError)}
    assert "`id`, `Prompt`" in messages[4]


@pytest.mark.parametrize(("input_format", "text"), [("prompt", "Say two."), ("messages", None)])
def test_the_input_format_decides_between_prompt_and_messages(input_format, text):
    assert read(MESSY / "both_prompt_and_messages.jsonl", input_format=input_format)[1].text == text


def test_offset_and_limit_select_records_and_keep_their_index():
    records = read(MESSY / "malformed_middle.jsonl", choice={"offset": 1, "limit": 3})
    assert [(record.key.index, record.key.line) for record in records] == [(1, 2), (2, 3), (3, 4)]
    assert isinstance(records[1], RecordError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-1, "hot", True, float("nan"))],
        *[("top_p", value) for value in (0, 1.5, -0.1)],
        *[("top_k", value) for value in (0, -2, 2.0)],
        *[("min_p", value) for value in (-0.1, 1.01)],
        *[("max_new_tokens", value) for value in (0, 1.5, "9")],
        *[("seed", value) for value in (-1, 2**63, 1.0)],
        *[("stop_token_ids", value) for value in ([-1], ["x"], [True], {"a": 1})],
        *[("repetition_penalty", value) for value in (0, -1, "x")],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, True)],
        *[("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"3": 101}, {"3": None}, [3], 5, "{", [[True, 1]])],
        *[("min_new_tokens", value) for value in (-1, 1.5)],
        *[("logprobs", value) for value in (-1, 21, True, 2.0)],
    ],
)
def test_an_option_out_of_range_is_a_bad_option_that_names_it(tmp_path, name, value):
    (record,) = read_objects(tmp_path, {"prompt": "a", name: value})
    assert record.code == "bad_option"
    assert f"`{name}`" in record.message


@pytest.mark.parametrize("name", ["stop_regex", "best_of", "top_logprobs", "bad_words", "guided_json"])
def test_a_sampling_option_of_other_tools_is_refused_by_name(tmp_path, name):
    (record,) = read_objects(tmp_path, {"prompt": "a", name: 1})
    assert (record.code, f"`{name}`" in record.message) == ("unsupported", True)


def test_good_options_are_kept_with_their_falsy_values_and_null_is_not_given(tmp_path):
    (record,) = read_objects(tmp_path, {"prompt": "a", "temperature": 0, "min_p": 0, "seed": 0, "top_p": None, "max_tokens": 3, "n": None})
    assert record.options == {"temperature": 0.0, "min_p": 0.0, "seed": 0, "max_new_tokens": 3}


def test_an_option_given_under_two_names_is_bad(tmp_path):
    (record,) = read_objects(tmp_path, {"prompt": "a", "max_tokens": 3, "max_new_tokens": 3})
    assert record.code == "bad_option"


def test_records_that_share_an_id_are_named_and_numbered():
    scan = scan_input(select(MESSY / "duplicate_ids.jsonl"))
    assert scan.repeated_lines == (1, 3, 4)
    assert [record.key.occurrence for record in read(MESSY / "duplicate_ids.jsonl")] == [0, 0, 1, 2, 0, 0]


def test_occurrences_count_from_the_start_of_the_file_whatever_the_offset():
    assert [record.key.occurrence for record in read(MESSY / "duplicate_ids.jsonl", choice={"offset": 3})] == [2, 0, 0]


def test_seeds_depend_on_id_type_occurrence_and_run_seed_alone():
    records = read(MESSY / "odd_ids.jsonl") + read(MESSY / "duplicate_ids.jsonl")
    seeds = [request_seed(0, record.key) for record in records]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, records[3].key) != seeds[3]
    assert request_seed(0, records[3].key) == 2607872009921351729  # the same in every process and version


@given(st.text())
def test_any_prompt_of_valid_unicode_comes_back_unchanged(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("prompts")
    (record,) = read_objects(folder, {"prompt": text})
    if is_blank(text):
        assert record.code == "empty_prompt"
    else:
        assert record.text == text


@given(st.binary(max_size=200))
def test_no_line_of_bytes_raises(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "input.jsonl"
    path.write_bytes(b'{"prompt": "first"}\n' + data)
    records = list(read_prompts(select(path), IdPlan()))
    assert isinstance(records[0], PromptRecord)
