"""Fields under other names: dotted paths, templates that are filled once, and no guessing when something is missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.errors import UserError
from eaglecli.io.field_mapping import MISSING, FieldMapping, check_template, fill_template, look_up, parse_mapping
from eaglecli.io.records import RecordFault
from tests.io.reading import codes, read_objects


@pytest.mark.parametrize(
    ("path", "value"),
    [("a", {"b": [{"c": 7}]}), ("a.b.0.c", 7), ("a.b.1.c", MISSING), ("x.y", 8), ("a.z", MISSING), ("q.r", MISSING), ("n.r", MISSING)],
)
def test_a_dotted_path_leads_to_its_value(path, value):
    assert look_up({"a": {"b": [{"c": 7}]}, "x.y": 8, "n": None}, path) == value


def test_mapped_fields_take_the_place_of_those_we_know(tmp_path):
    sources = parse_mapping(["max_new_tokens=limits.tokens"], "question.text", "meta.key")
    record = {"question": {"text": "x"}, "prompt": "unused", "meta": {"key": 5}, "id": "unused", "limits": {"tokens": 3}}
    (found,) = read_objects(tmp_path, record, mapping=FieldMapping(sources))
    assert (found.text, found.key.id_json, found.options) == ("x", "5", {"max_new_tokens": 3})


def test_a_mapped_field_that_is_missing_is_not_replaced_by_another(tmp_path):
    records = read_objects(tmp_path, {"prompt": "x"}, {"question": "y", "messages": []}, mapping=FieldMapping({"prompt": "question"}))
    assert codes(records) == {1: "missing_prompt"}
    assert records[1].text == "y"


@pytest.mark.parametrize("target", ["messages", "conversations", "turns", "instruction", "prompt_token_ids"])
def test_every_shape_can_be_mapped(tmp_path, target):
    value = {
        "messages": [{"role": "user", "content": "x"}],
        "conversations": [{"from": "human", "value": "x"}],
        "turns": ["x"],
        "instruction": "x",
        "prompt_token_ids": [1],
    }[target]
    (record,) = read_objects(tmp_path, {"in": {"side": value}, "prompt": "unused"}, mapping=FieldMapping({target: "in.side"}))
    assert record.shape in ("messages", "sharegpt", "turns", "alpaca", "tokens")


def test_a_template_is_filled_once_and_never_looks_into_what_it_filled_in():
    text = fill_template("{{{a}}} {b.c} {d}", {"a": "{d} %s {{x}}", "b": {"c": "\\1"}, "d": 7})
    assert text == "{{d} %s {{x}}} \\1 7"


@given(st.text(), st.text())
def test_what_a_field_holds_comes_through_a_template_unchanged(first, second):
    assert fill_template("<{a}|{b}>", {"a": first, "b": second}) == f"<{first}|{second}>"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "missing_prompt"),
        ({"a": None}, "missing_prompt"),
        ({"a": [1]}, "bad_type"),
        ({"a": 1.5}, "bad_type"),
        ({"a": True}, "bad_type"),
    ],
)
def test_a_template_takes_text_and_whole_numbers_alone(fields, code):
    with pytest.raises(RecordFault) as raised:
        fill_template("{a}", fields)
    assert raised.value.code == code


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a", "a}", "{{a}"])
def test_a_template_with_stray_braces_is_refused(template):
    with pytest.raises(ValueError, match="stray"):
        check_template(template)


def test_a_template_builds_the_prompt_from_any_fields(tmp_path):
    mapping = FieldMapping(template="Translate into {language}: {text}")
    first, second = read_objects(tmp_path, {"language": "Thai", "text": "{tea}"}, {"language": "Thai"}, mapping=mapping)
    assert (first.text, second.code) == ("Translate into Thai: {tea}", "missing_prompt")


@pytest.mark.parametrize(("pairs", "field"), [(["prompt"], None), (["=a"], None), (["a="], None), (["prompt=a"], "b")])
def test_a_mapping_that_makes_no_sense_is_refused(pairs, field):
    with pytest.raises(UserError):
        parse_mapping(pairs, field, None)
