"""A tokenizer that was rebuilt from a GGUF file gives the ids of the original one, or is refused (B56)."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eaglecli.errors import ModelError
from eaglecli.io.gguf_tokenizer import read_tokenizer_names
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer

BLANK, NEWLINE = "Ġ", "Ċ"
MERGES = [(BLANK, BLANK), ("h", "i"), (BLANK, "hi"), ("1", "2"), (BLANK, "1"), (NEWLINE, BLANK), (NEWLINE, NEWLINE), ("Ã", "©")]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES), *SPECIAL]
STRINGS = [
    *("hi", " hi", "  hi", "hi hi", "hi  hi", "12", " 12", "  12", "a 12", "a  12", "\n  12", "\n\n12", "x = 5;\n    3"),
    *("1. one\n  2. two", "3.14", "1,000", "½ ²", "٣٤", "é", "e\u0301", "café 12", "🙂", "🙂 1", "👩‍👩‍👧 hi", "日本 12", "don't 2'll"),
    *("<b>1</b>", "\t1", "\u00a01", "hi!  1"),
]


def original(splits_digits: bool) -> PromptTokenizer:
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(VOCABULARY)}, MERGES))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if splits_digits else byte_level
    backend.decoder = decoders.ByteLevel()
    tokens = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **tokens))


def write_gguf(path: Path, rule: str) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count, writer.add_feed_forward_length):
        add(8)
    writer.add_head_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_tokenizer_pre(rule)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_token_types([3 if piece in SPECIAL else 1 for piece in VOCABULARY])
    writer.add_unk_token_id(VOCABULARY.index(SPECIAL[0]))
    writer.add_bos_token_id(VOCABULARY.index(SPECIAL[1]))
    writer.add_eos_token_id(VOCABULARY.index(SPECIAL[2]))
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("rule", "splits_digits"), [("smollm", True), ("gpt-2", False)])
def test_thirty_strings_get_the_ids_of_the_original(tmp_path, rule, splits_digits):
    """B56."""
    rebuilt = load_tokenizer(write_gguf(tmp_path / "model.gguf", rule))
    assert len(STRINGS) == 30
    for text in STRINGS:
        assert rebuilt.encode_text(text).tolist() == original(splits_digits).encode_text(text).tolist(), text


def test_the_two_rules_differ_where_digits_follow_blanks():
    assert original(True).encode_text("  12").tolist() != original(False).encode_text("  12").tolist()


def test_a_rule_that_is_not_known_is_refused(tmp_path):
    """B56."""
    with pytest.raises(ModelError, match="`martian`") as raised:
        load_tokenizer(write_gguf(tmp_path / "model.gguf", "martian"))
    assert "--tokenizer-path" in raised.value.hint


@pytest.mark.parametrize("data", [b"", b"GGUF\x03", b"GGUX" + b"\0" * 40])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, data):
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ModelError):
        read_tokenizer_names(tmp_path / "model.gguf")
