"""Shapes of a record beyond the messy files: which field counts, what is refused and with which words."""

import pytest

from eaglecli.io.openai_batch import CHAT, COMPLETIONS
from tests.io.reading import codes, good, read_objects

SAY = {"role": "user", "content": "x"}


def batch(body, **line):
    return {"custom_id": "c", "method": "POST", "url": CHAT, "body": body, **line}


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"messages": [SAY], "turns": ["a", "b"]}, "messages"),
        ({"prompt": "a", "turns": ["b"]}, "prompt"),
        ({"prompt": "a", "instruction": "b", "input": "c"}, "prompt"),
        ({"turns": ["a"], "instruction": "b"}, "turns"),
        ({"prompt": None, "input_ids": [1, 2]}, "tokens"),
        ({"prompt_token_ids": [0], "text": "unused"}, "tokens"),
        ({"conversations": [SAY]}, "sharegpt"),
        ({"body": "of a mail", "prompt": "a"}, "prompt"),
    ],
)
def test_the_shape_is_seen_by_the_field_that_is_filled(tmp_path, record, shape):
    (found,) = read_objects(tmp_path, record)
    assert found.shape == shape


@pytest.mark.parametrize("names", [("prompt", "messages"), ("prompt", "input_ids"), ("messages", "conversations")])
def test_two_fields_that_could_be_the_prompt_are_ambiguous(tmp_path, names):
    values = {"prompt": "a", "messages": [SAY], "input_ids": [1], "conversations": [{"from": "human", "value": "x"}]}
    (found,) = read_objects(tmp_path, {name: values[name] for name in names})
    assert (found.code, all(f"`{name}`" in found.message for name in names)) == ("ambiguous", True)
    (chosen,) = read_objects(tmp_path, {name: values[name] for name in names}, input_format="prompt" if "prompt" in names else "messages")
    assert good([chosen])


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([], "empty_prompt"),
        ([1, "2"], "bad_type"),
        ([True], "bad_type"),
        ([-1], "bad_type"),
        ([1.0], "bad_type"),
        ([None], "bad_type"),
        ("1 2", "bad_type"),
        ([2**31], "bad_type"),
    ],
)
def test_token_ids_are_integers_and_never_none_at_all(tmp_path, ids, code):
    """B58."""
    (found,) = read_objects(tmp_path, {"prompt_token_ids": ids})
    assert found.code == code


def test_a_system_field_beside_a_sharegpt_conversation_is_its_system_message(tmp_path):
    (found,) = read_objects(tmp_path, {"system": "Be brief.", "conversations": [{"from": "human", "value": "x"}]})
    assert [message["role"] for message in found.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"max_completion_tokens": 4, "temperature": 0}, {"max_new_tokens": 4, "temperature": 0.0}),
        ({"stream": False, "stop": None, "response_format": {"type": "text"}}, {}),
        ({"n": 3, "stop": "x", "best_of": 1}, {"num_samples": 3, "stop": ("x",)}),
        ({"n": 1, "stop": [], "ignore_eos": True}, {"num_samples": 1, "stop": (), "ignore_eos": True}),
        ({"logprobs": False, "presence_penalty": 0, "top_logprobs": 0}, {"logprobs": None, "presence_penalty": 0.0}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4, "logit_bias": {"7": -1}}, {"logprobs": 4, "logit_bias": ((7, -1.0),)}),
        ({"model": "m", "user": "u", "metadata": {"a": "b"}}, {}),
        ({"top_k": 5, "min_p": 0.1, "stop_token_ids": [3]}, {"top_k": 5, "min_p": 0.1, "stop_token_ids": (3,)}),
    ],
)
def test_parameters_of_a_body_are_honoured_or_ask_for_nothing(tmp_path, body, options):
    (found,) = read_objects(tmp_path, batch({"messages": [SAY], **body}))
    assert found.options == options


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({"best_of": 2}, "unsupported", "`best_of`"),
        ({"n": 0}, "bad_option", "`n`"),
        ({"stop": [""] * 2}, "bad_option", "`stop`"),
        ({"stream": True}, "unsupported", "`stream`"),
        ({"tools": [{"type": "function"}]}, "unsupported", "`tools`"),
        ({"brand_new": 1}, "unsupported", "`brand_new`"),
        ({"temperature": 2.5}, "bad_option", "`temperature`"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "bad_option", "given twice"),
        ({"logprobs": 0}, "bad_option", "`logprobs`"),
        ({"top_logprobs": 3}, "bad_option", "`top_logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "bad_option", "`logprobs`"),
    ],
)
def test_a_parameter_that_is_not_done_is_refused_by_name(tmp_path, body, code, word):
    (found,) = read_objects(tmp_path, batch({"messages": [SAY], **body}))
    assert (found.code, word in found.message) == (code, True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", "text"),
        (["x"], "text"),
        ([1, 2], "tokens"),
        (["x", "y"], "unsupported"),
        ([], "bad_type"),
        (None, "missing_prompt"),
        (" ", "empty_prompt"),
    ],
)
def test_a_completion_prompt_is_raw_text_or_token_ids(tmp_path, prompt, expected):
    (found,) = read_objects(tmp_path, batch({"prompt": prompt}, url=COMPLETIONS))
    if not good([found]):
        assert found.code == expected
    else:
        assert (found.is_raw, found.text) == (True, "x") if expected == "text" else found.token_ids == (1, 2)


def test_a_custom_id_may_come_once_and_the_first_line_counts(tmp_path):
    """B61."""
    line = batch({"messages": [SAY]})
    records = read_objects(tmp_path, line, {**line, "custom_id": "C"}, line, line)
    assert codes(records) == {3: "duplicate_id", 4: "duplicate_id"}


@pytest.mark.parametrize("change", [{"custom_id": 7}, {"custom_id": None}, {"method": "GET"}, {"url": "/v1/embeddings"}, {"body": []}])
def test_a_batch_line_that_is_wrong_is_bad_and_no_other_shape(tmp_path, change):
    (found,) = read_objects(tmp_path, {**batch({"messages": [SAY]}), **change})
    assert not good([found])


def test_fields_of_any_type_beside_a_prompt_change_nothing(tmp_path):
    """B50."""
    rows = [{"prompt": "x", "field": value, "id": number} for number, value in enumerate([*[None] * 50, "text", 7, {"a": [1]}, [[]], 1.5])]
    records = read_objects(tmp_path, *rows, {"messages": [SAY], "id": "a"}, {"input_ids": [1], "id": 3.5})
    assert not codes(records)
    assert [record.key.id_json for record in records[-2:]] == ['"a"', "3.5"]


def test_kept_fields_are_the_record_as_it_came(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text('{"prompt": "x", "big": 9007199254740993, "huge": 1e400, "nan": NaN, "nested": {"ü": [null, 0.1]}}\n')
    from tests.io.reading import read

    (record,) = read(path, keep_fields=True)
    assert record.key.input_json == (
        '{"prompt": "x", "big": 9007199254740993, "huge": "Infinity", "nan": "NaN", "nested": {"ü": [null, 0.1]}}'
    )
