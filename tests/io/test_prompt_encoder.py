"""Prompts to ids: system prompt, other templates and their variables, and cutting that leaves the template whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglecli.errors import UserError
from eaglecli.io.prompt_encoder import Prompt, PromptEncoder
from eaglecli.io.records import PromptRecord, RecordFault, RecordKey
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer
from tests.fixtures import write_tokenizer

KEY = RecordKey(0, '"a"', "in.jsonl", 1, 0)
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ mood }}>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def record(**content) -> PromptRecord:
    return PromptRecord(KEY, "", **content)


def said(encoder: PromptEncoder, **content) -> str:
    return encoder.tokenizer.decode(encoder.encode(encoder.opening(record(**content))))


def test_another_template_and_its_variables_are_used(tokenizer):
    other = tokenizer.with_template(TEMPLATE, {"mood": "<|im_end|>"})
    assert said(PromptEncoder(other, True), text="x") == "[user:x]<|im_end|>>"  # a variable is text, whatever it holds
    assert "[user:x]" not in said(PromptEncoder(tokenizer, True), text="x")


def test_a_broken_template_and_reserved_variables_are_refused(tokenizer):
    """B55."""
    with pytest.raises(UserError, match="no Jinja template"):
        tokenizer.with_template("{% for %}", {})
    for name in ("messages", "tokenize", "add_generation_prompt"):
        with pytest.raises(UserError, match=name):
            tokenizer.with_template(None, {name: True})


def test_a_template_that_refuses_a_conversation_spoils_that_record_with_its_words(tokenizer):
    """B55."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system please') }}{% endif %}" + TEMPLATE
    encoder = PromptEncoder(tokenizer.with_template(strict, {}), True)
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "x"})
    with pytest.raises(RecordFault, match="no system please"):
        said(encoder, messages=messages)
    assert said(encoder, text="x") == "[user:x]>"


def test_the_system_prompt_goes_before_conversations_that_have_none(tokenizer):
    encoder = PromptEncoder(tokenizer.with_template(TEMPLATE, {}), True, "S")
    assert said(encoder, text="x") == "[system:S][user:x]>"
    assert said(encoder, turns=("x", "y")) == "[system:S][user:x]>"
    own = ({"role": "system", "content": "mine"}, {"role": "user", "content": "x"})
    assert said(encoder, messages=own) == "[system:mine][user:x]>"
    assert said(encoder, text="x", is_raw=True) == "x"
    assert said(encoder, token_ids=(120,)) == "x"


def test_token_ids_outside_the_vocabulary_are_refused(tokenizer):
    encoder = PromptEncoder(tokenizer, True)
    assert encoder.encode(Prompt(token_ids=(0, tokenizer.vocab_size - 1))).tolist() == [0, tokenizer.vocab_size - 1]
    with pytest.raises(RecordFault, match="not in the vocabulary"):
        encoder.encode(Prompt(token_ids=(tokenizer.vocab_size,)))


@pytest.mark.parametrize("prompt", [Prompt(text=""), Prompt(token_ids=())])
def test_no_prompt_without_a_token_reaches_the_model(tokenizer, prompt):
    """B58."""
    with pytest.raises(RecordFault) as raised:
        PromptEncoder(tokenizer, False).encode(prompt)
    assert raised.value.code == "empty_prompt"


@pytest.mark.parametrize(("side", "kept"), [("left", "[system:S][user:fghij]>"), ("right", "[system:S][user:abcde]>")])
def test_the_longest_message_is_cut_and_the_template_stays(tokenizer, side, kept):
    encoder = PromptEncoder(tokenizer.with_template(TEMPLATE, {}), True, "S")
    prompt = encoder.opening(record(text="abcdefghij"))
    ids = encoder.encode_within(prompt, len(encoder.encode(prompt)) - 5, side)
    assert encoder.tokenizer.decode(ids) == kept


def test_what_cannot_be_cut_short_enough_is_too_long(tokenizer):
    encoder = PromptEncoder(tokenizer.with_template(TEMPLATE, {}), True)
    with pytest.raises(RecordFault, match="cannot be cut") as raised:
        encoder.encode_within(encoder.opening(record(text="abc")), 4, "left")
    assert raised.value.code == "too_long"


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), st.integers(1, 60), st.sampled_from(["left", "right"]))
def test_cut_text_fits_and_is_an_end_or_a_beginning_of_the_text(tokenizer, text, limit, side):
    encoder = PromptEncoder(tokenizer, False)
    whole = encoder.encode(Prompt(text=text)).tolist()
    try:
        ids = encoder.encode_within(Prompt(text=text), limit, side).tolist()
    except RecordFault:
        assert limit < 4  # the bytes of one character
        return
    assert len(ids) <= limit
    assert ids == (whole[len(whole) - len(ids) :] if side == "left" else whole[: len(ids)])


def test_token_ids_are_cut_as_they_are(tokenizer):
    encoder = PromptEncoder(tokenizer, True)
    prompt = Prompt(token_ids=(1, 2, 3, 4))
    assert encoder.encode_within(prompt, 3, "left").tolist() == [2, 3, 4]
    assert encoder.encode_within(prompt, 3, "right").tolist() == [1, 2, 3]
