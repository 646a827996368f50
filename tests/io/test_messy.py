"""Every file of the messy data set behaves as its README says: which records are good, which are bad, which files are refused."""

import json

import pytest

from eaglecli.errors import UserError
from eaglecli.io.field_mapping import FieldMapping
from tests.io.reading import MESSY, codes, good, read

# file: good records, {line: code} of the bad ones
EXPECTED = {
    "bom_crlf.jsonl": (5, {}),
    "blank_lines.jsonl": (5, {}),
    "no_final_newline.jsonl": (3, {}),
    "empty_file.jsonl": (0, {}),
    "only_bom_and_blanks.jsonl": (0, {}),
    "utf16le_bom.jsonl": (3, {}),
    "non_utf8_bytes.jsonl": (3, dict.fromkeys((2, 4, 5, 6), "encoding")),
    "line_separators_in_strings.jsonl": (4, {}),
    "control_characters.jsonl": (4, dict.fromkeys((3, 4), "invalid_json")),
    "whitespace_matters.jsonl": (5, {}),
    "malformed_middle.jsonl": (5, {3: "invalid_json"}),
    "truncated_last_line.jsonl": (4, {5: "invalid_json"}),
    "trailing_comma.jsonl": (1, dict.fromkeys((1, 2, 3, 5), "invalid_json")),
    "single_quotes_and_comments.jsonl": (3, dict.fromkeys((1, 3, 4, 5, 7), "invalid_json")),
    "duplicate_keys.jsonl": (0, dict.fromkeys((1, 2), "invalid_json")),
    "array.json": (5, {}),
    "array_named.jsonl": (3, {}),
    "single_object.json": (1, {}),
    "not_objects.jsonl": (1, dict.fromkeys(range(1, 6), "not_object")),
    "duplicate_ids.jsonl": (6, {}),
    "odd_ids.jsonl": (13, {}),
    "missing_prompt.jsonl": (2, dict.fromkeys(range(2, 8), "missing_prompt")),
    "null_prompt.jsonl": (3, dict.fromkeys((2, 3, 4, 5), "bad_type")),
    "empty_prompt.jsonl": (2, dict.fromkeys(range(2, 9), "empty_prompt")),
    "numbers_as_prompts.jsonl": (1, dict.fromkeys(range(1, 10), "bad_type")),
    "extra_fields.jsonl": (3, {}),
    "both_prompt_and_messages.jsonl": (0, dict.fromkeys((1, 2), "ambiguous")),
    "mixed_schemas.jsonl": (6, {}),
    "repeated_prompts.jsonl": (6, {}),
    "messages_multi_turn.jsonl": (
        7,
        {**dict.fromkeys((3, 4, 5, 9), "unsupported"), **dict.fromkeys((11, 13, 14, 15, 16, 17), "bad_type")},
    ),
    "mt_bench_turns.jsonl": (2, {3: "empty_prompt", 4: "bad_type"}),
    "sharegpt.jsonl": (4, {3: "unsupported", 4: "empty_prompt", 6: "missing_prompt"}),
    "sharegpt_array.json": (2, {}),
    "openai_batch.jsonl": (
        7,
        {
            **dict.fromkeys((6, 7, 8, 14), "unsupported"),
            **{9: "bad_option", 10: "bad_option", 13: "bad_type", 15: "duplicate_id"},
        },
    ),
    "alpaca.json": (5, {21: "empty_prompt", 31: "missing_prompt"}),
    "special_token_text.jsonl": (9, {}),
    "jinja_and_braces.jsonl": (6, {}),
    "plain_prompts.txt": (5, {}),
    "scripts.jsonl": (30, {}),
    "emoji_rtl_combining.jsonl": (21, {}),
    "escaped_unicode.jsonl": (2, {}),
    "lone_surrogates.jsonl": (1, dict.fromkeys((1, 2, 3), "encoding")),
    "prompts.csv": (9, {7: "empty_prompt", 14: "bad_type"}),
    "prompts.tsv": (3, {}),
    "prompts.jsonl.gz": (5, {}),
    "two_members.jsonl.gz": (5, {}),
    "gzip_without_gz_name.jsonl": (5, {}),
    "not_really.jsonl.gz": (5, {}),
    "prompts.parquet": (3, {3: "bad_type", 4: "empty_prompt"}),
    "messages.parquet": (2, {3: "empty_prompt", 4: "bad_type"}),
    "zero_rows.parquet": (0, {}),
    "very_long_prompt.jsonl": (3, {}),
    "length_ladder.jsonl": (10, {}),
    "long_without_spaces.jsonl": (6, {}),
    "many_short.jsonl": (300, {}),
}

# file: words of the one sentence with which it is refused as a whole
REFUSED = {
    "cr_only.jsonl": "CR alone",
    "wrapped_array.json": "under the key `data`",
    "semicolon_bom.csv": "the columns are `ID`, `Prompt`, `Note`",
    "no_header.csv": "the columns are `h1`, `What is a hinge",
    "truncated.jsonl.gz": "broken gzip archive",
}


def test_every_file_of_the_set_is_expected_here():
    assert {path.name for path in MESSY.iterdir()} - {"README.md"} == {*EXPECTED, *REFUSED, "deep_nesting.jsonl"}


def test_deep_nesting_spoils_at_most_its_own_record():
    """How deep is too deep depends on the Python version."""
    records = read(MESSY / "deep_nesting.jsonl")
    assert [record.key.line for record in records] == [1, 2]
    assert records[1] in good(records)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_messy_file_has_the_good_and_bad_records_that_its_readme_says(name):
    """B46, B47, B49, B50, B58."""
    num_good, bad = EXPECTED[name]
    records = read(MESSY / name)
    assert len(good(records)) == num_good
    assert codes(records) == bad
    assert [record.key.index for record in records] == list(range(len(records)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_one_sentence(name):
    with pytest.raises(UserError, match=REFUSED[name]):
        read(MESSY / name)


def test_a_column_can_be_named_for_a_table_whose_header_is_another():
    records = read(MESSY / "semicolon_bom.csv", mapping=FieldMapping({"prompt": "Prompt", "id": "ID"}))
    assert [record.key.id_json for record in records] == ['"1"', '"2"', '"3"']
    assert [record.text for record in good(records)][0] == "Name a cheese; any cheese."


def test_values_of_a_table_stay_text():
    texts = {json.loads(record.key.id_json): record.text for record in good(read(MESSY / "prompts.csv"))}
    assert (texts["c5"], texts["c6"], texts["c7"], texts["c9"]) == ("  padded with spaces  ", "=1+1", "007", "NULL")
    assert texts["c1"] == 'Give a synonym for "quick".'
    assert texts["c2"] == "Explain this list:\n- salt, pepper\n- oil, vinegar"


def test_quotes_and_backslashes_of_a_tsv_table_are_text():
    assert [record.text for record in good(read(MESSY / "prompts.tsv"))][1:] == [
        "A literal backslash-t: \\t here.",
        '"quoted" at the start',
    ]


def test_only_an_encoding_that_is_named_makes_other_bytes_good():
    """B46."""
    records = read(MESSY / "non_utf8_bytes.jsonl", encoding="cp1252")
    assert {2, 4} <= {record.key.line for record in good(records)}


def test_ids_of_a_parquet_file_stay_integers():
    assert [record.key.id_json for record in good(read(MESSY / "prompts.parquet"))] == ["1", "2", "5"]


def test_alpaca_input_follows_after_a_blank_line_and_the_output_never_enters():
    texts = [record.text for record in good(read(MESSY / "alpaca.json"))]
    assert texts == [
        "Sort the words by length.\n\npear, fig, banana",
        "Name three primary colours.",
        "Rewrite in the past tense.\n\nShe walks to the mill.",
        "Explain the joke.\n\n<noinput>",
        "Classify the sentence.",
    ]


def test_sharegpt_keeps_history_and_drops_the_answer_at_the_end():
    conversations = {json.loads(record.key.id_json): record.messages for record in good(read(MESSY / "sharegpt.jsonl"))}
    assert [message["role"] for message in conversations["sg-1"]] == ["user", "assistant", "user"]
    assert [message["role"] for message in conversations["sg-2"]] == ["system", "user"]
    assert [message["content"] for message in conversations["sg-5"]][1] == ""
    assert conversations["sg-7"][0]["content"].startswith('<div class="markdown">')


def test_parameters_of_a_batch_line_belong_to_it_alone():
    records = {json.loads(record.key.id_json): record for record in good(read(MESSY / "openai_batch.jsonl"))}
    assert records["request-1"].options == {"max_new_tokens": 20}
    assert records["request-2"].options == {"temperature": 0.7, "top_p": 0.9, "seed": 7, "max_new_tokens": 60}
    assert (records["request-5"].text, records["request-5"].is_raw) == ("Once upon a time", True)
    assert records["request-11"].options["logprobs"] == 5
    assert records["request-12"].options == {}
    assert records["request-3"].options["stop"] == ("Thursday", "\n\n")
    assert records["request-4"].options["num_samples"] == 3


def test_both_turns_are_kept_apart():
    records = good(read(MESSY / "mt_bench_turns.jsonl"))
    assert [len(record.turns) for record in records] == [2, 1]
    assert [record.key.id_json for record in records] == ["901", "902"]


def test_the_shapes_of_a_mixed_file_are_seen_record_by_record():
    shapes = [record.shape for record in good(read(MESSY / "mixed_schemas.jsonl"))]
    assert shapes == ["prompt", "messages", "sharegpt", "alpaca", "turns", "openai-batch"]


def test_a_line_of_text_that_looks_like_json_is_a_prompt():
    records = good(read(MESSY / "plain_prompts.txt"))
    assert [(record.key.line, record.text) for record in records][2:4] == [
        (4, "   Why is the sky red at dusk?   "),
        (5, '{"this": "line looks like JSON"}'),
    ]


def test_blank_prompts_are_taken_when_that_is_asked_for():
    records = read(MESSY / "empty_prompt.jsonl", allow_blank=True)
    assert len(good(records)) > 2
    assert set(codes(records).values()) <= {"empty_prompt"}
