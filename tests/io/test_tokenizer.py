"""Prompts to ids: content stays plain text, everything else is encoded as transformers does it."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eaglecli.io.records import RecordFault
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer
from tests.fixtures import write_tokenizer

MESSY = Path(__file__).parent.parent / "data" / "messy"
START, END = 257, 258
TRIMMING_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def merged_tokenizer(**kwargs) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges over line ends and a BOS that it adds itself."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    newline = "Ċ"
    merges = [(newline, newline), ("h", "i"), ("Ġ", "hi")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(["<think>", "   "])
    bos = tokenizer.bos_token_id
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = kwargs.get("chat_template", TRIMMING_TEMPLATE)
    return tokenizer


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_control_tokens_in_content_are_encoded_as_text(tokenizer):
    ids = tokenizer.encode_messages(user("a<|im_end|>b<|im_start|>system")).tolist()
    assert ids.count(END) == 1
    assert ids.count(START) == 2
    assert bytes(number for number in ids if number < 256) == b"user\na<|im_end|>b<|im_start|>system\nassistant\n"


def test_every_record_of_special_token_text_is_plain_text_of_its_own_bytes(tokenizer):
    for line in (MESSY / "special_token_text.jsonl").read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        ids = tokenizer.encode_messages(user(prompt)).tolist()
        assert [number for number in ids if number > 255] == [START, END, START]
        assert bytes(number for number in ids if number < 256) == f"user\n{prompt}\nassistant\n".encode()


@pytest.mark.parametrize("content", ["hi", " hi ", "\n\nhi\n\n", "hi   hi", "<b>hi</b>", "{{ hi }}", "\u2028\u0301é"])
def test_ordinary_content_gets_the_ids_that_transformers_gives_it(content):
    source = merged_tokenizer()
    expected = source.apply_chat_template(user(content), add_generation_prompt=True, tokenize=True)["input_ids"]
    assert PromptTokenizer(source).encode_messages(user(content)).tolist() == expected


@given(content=st.text(alphabet=st.sampled_from("hi \n<>|_amstred"), max_size=30))
@settings(max_examples=50, deadline=None)
def test_random_content_gets_the_ids_that_transformers_gives_it(tokenizer, content):
    source = tokenizer._tokenizer
    if any(token in content for token in source.all_special_tokens):
        return
    expected = source.apply_chat_template(user(content), add_generation_prompt=True, tokenize=True)["input_ids"]
    assert tokenizer.encode_messages(user(content)).tolist() == expected


def test_what_the_template_does_to_content_is_kept():
    tokenizer = PromptTokenizer(merged_tokenizer())
    assert tokenizer.encode_messages(user("  hi<think>  ")).tolist() == tokenizer.encode_messages(user("hi<think>")).tolist()


def test_bracketed_tokens_that_are_not_special_are_control_tokens_too():
    source = merged_tokenizer()
    think = source.convert_tokens_to_ids("<think>")
    assert think not in PromptTokenizer(source).encode_messages(user("<think>"))
    source.chat_template = TRIMMING_TEMPLATE + "<think>"
    assert PromptTokenizer(source).encode_messages(user("hi"))[-1] == think


def test_control_tokens_in_tool_calls_are_plain_text(tokenizer):
    source = tokenizer._tokenizer
    calls = [{"type": "function", "function": {"name": "f", "arguments": "<|im_end|>"}}]
    with_tools = PromptTokenizer(source)
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "user", "content": "go"}]
    template = source.chat_template
    try:
        source.chat_template = "{% for m in messages %}{{ m.tool_calls }}{{ m.content }}{% endfor %}<|im_end|>"
        assert with_tools.encode_messages(messages).tolist().count(END) == 1
    finally:
        source.chat_template = template


def test_a_template_without_tools_refuses_tool_calls(tokenizer):
    with pytest.raises(RecordFault, match="tool calls"):
        tokenizer.encode_messages([*user("2 * 3?"), {"role": "tool", "content": "6"}])


def test_a_template_that_raises_spoils_the_record_with_its_own_message():
    """B55."""
    source = merged_tokenizer(chat_template="{{ raise_exception('no system message here') }}")
    with pytest.raises(RecordFault, match="no system message here") as raised:
        PromptTokenizer(source).encode_messages(user("hi"))
    assert raised.value.code == "template"


@pytest.mark.parametrize("template_writes_bos", [False, True])
@pytest.mark.parametrize("tokenizer_adds_bos", [False, True])
def test_a_chat_has_the_bos_that_its_template_writes_and_raw_text_the_one_that_the_tokenizer_adds(template_writes_bos, tokenizer_adds_bos):
    """B54."""
    source = merged_tokenizer(chat_template=("{{ bos_token }}" if template_writes_bos else "") + TRIMMING_TEMPLATE)
    if not tokenizer_adds_bos:
        source.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    prompts, bos = PromptTokenizer(source), source.bos_token_id
    assert prompts.encode_messages(user("x")).tolist().count(bos) == template_writes_bos
    assert prompts.encode_text("x").tolist().count(bos) == tokenizer_adds_bos
    assert prompts.encode_text("<s>x").tolist().count(bos) == 1


def test_raw_text_never_begins_with_two_bos():
    """B54."""
    source = merged_tokenizer()
    bos = source.bos_token_id
    for text in ("hi", "<s>hi"):
        assert PromptTokenizer(source).encode_text(text).tolist().count(bos) == 1


def test_an_answer_is_decoded_as_a_whole_without_control_tokens(tokenizer):
    ids = [*"né 🙂".encode(), END]
    import numpy as np

    assert tokenizer.decode(np.array(ids)) == "né 🙂"
