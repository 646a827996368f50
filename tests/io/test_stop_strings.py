"""Stop strings against a naive reader that decodes everything after each token: any tokens, any strings, any step borders."""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from eaglecli.config import normalize_stop_strings
from eaglecli.io.stop_strings import StopStringWatch, answer_text, watch_maker
from eaglecli.io.token_bytes import MAX_HELD_TOKENS, REPLACEMENT, ByteLevelTable, DecodedWindow, is_byte_level
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer
from tests.fixtures import _byte_symbol, write_tokenizer

ALPHABET = "ab é€😀"


def byte_level_tokenizer() -> Tokenizer:
    """Single bytes, pieces that begin or end inside a character, a silent token (last but one), an added one that shows (last)."""
    texts = [bytes([byte]) for byte in range(256)]
    texts += [b"ab", b"ba", b" a", "é".encode(), "a€".encode(), "€".encode()[1:] + b"b", "😀".encode()[:2], "b😀".encode()[:-1]]
    tokenizer = Tokenizer(models.BPE({"".join(map(_byte_symbol, text)): number for number, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<é>", special=False)])
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models are: a blank at the start is dropped, bytes of rare characters are tokens that are joined."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "ab", "▁b", "é", "▁€"]
    tokenizer = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_tokens([AddedToken("<end>", special=True)])
    return tokenizer


BYTE_LEVEL, FALLBACK = byte_level_tokenizer(), fallback_tokenizer()
KINDS = {
    "table": (BYTE_LEVEL, lambda: ByteLevelTable(BYTE_LEVEL, [264])),
    "window over bytes": (BYTE_LEVEL, lambda: DecodedWindow(decoding(BYTE_LEVEL), [264])),
    "window over pieces": (FALLBACK, lambda: DecodedWindow(decoding(FALLBACK), [FALLBACK.get_vocab_size() - 1])),
}


def decoding(tokenizer: Tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Bytes of the text as tokens."""
    if tokenizer is BYTE_LEVEL:
        return list(text.encode())
    return [1 + byte for byte in text.encode()]


def naive(tokenizer: Tokenizer, ids: list[int], strings: list[str]) -> tuple[int, str, str] | None:
    """Tokens kept, the string, the text before it: everything decoded after each token."""
    decode = decoding(tokenizer)
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        found = [(text.find(string), len(string), string) for string in strings if string in text]
        if found:
            return count, min(found)[2], text[: min(found)[0]]
    return None


def watched(make_reader, tokenizer: Tokenizer, ids: list[int], strings: list[str], borders: set[int]) -> tuple[int, str, str] | None:
    """The same by a watch that is shown the output at the borders and at the end."""
    watch = StopStringWatch(strings, make_reader)
    for end in sorted({*borders, len(ids)}):
        found = watch.look(np.array(ids[:end], np.int32))
        if found is not None:
            count, string = found
            return count, string, answer_text(decoding(tokenizer), np.array(ids[:count]), string)
    return None


@st.composite
def answers(draw, tokenizer: Tokenizer):
    """Tokens, stop strings, step borders. Half of the tokens spell whole characters, so that strings are met."""
    vocabulary = tokenizer.get_vocab_size()
    first_piece = 256 if tokenizer is BYTE_LEVEL else 257
    part = st.one_of(
        st.text(ALPHABET, min_size=1, max_size=3).map(lambda text: text_ids(tokenizer, text)),
        st.integers(first_piece, vocabulary - 1).map(lambda token: [token]),
        st.integers(0, vocabulary + 2).map(lambda token: [token]),  # any byte, and ids without a token
    )
    ids = sum(draw(st.lists(part, max_size=12)), [])
    strings = draw(st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    borders = draw(st.sets(st.integers(1, max(1, len(ids))), max_size=6))
    return ids, strings, {border for border in borders if border <= len(ids)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_where_a_reader_of_everything_ends_it(kind):
    """B39: whatever the tokens, the strings and the step borders."""
    tokenizer, make_reader = KINDS[kind]

    @settings(max_examples=150, deadline=None)
    @given(answers(tokenizer))
    @example(([*b"xab"], ["b", "ab", "abc"], {1, 2, 3}))
    @example(([263 if tokenizer is BYTE_LEVEL else 98], ["b"], set()))  # a letter, then a character that is cut
    def check(answer):
        ids, strings, borders = answer
        assume(tokenizer is BYTE_LEVEL or REPLACEMENT * MAX_HELD_TOKENS not in decoding(tokenizer)(ids))  # see `DecodedWindow`
        assert watched(make_reader, tokenizer, ids, strings, borders) == naive(tokenizer, ids, strings)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_of_single_tokens_gives_the_whole_text(kind):
    tokenizer, make_reader = KINDS[kind]
    text = "a b €é😀 ab"
    ids = [*text_ids(tokenizer, text), *text_ids(tokenizer, "b" * (2 * MAX_HELD_TOKENS))]
    reader = make_reader()
    assert b"".join(map(reader.read, ids)).decode() == decoding(tokenizer)(ids)


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    """Else the cost of a token would grow with the answer."""
    lengths = []
    reader = DecodedWindow(lambda ids: lengths.append(len(ids)) or BYTE_LEVEL.decode(ids), [])
    assert b"".join(reader.read(0xFF) for _ in range(100)).count("\ufffd".encode()) >= 100 - MAX_HELD_TOKENS
    assert max(lengths) <= 2 * MAX_HELD_TOKENS


def test_of_several_strings_the_one_that_begins_first_counts():
    table = KINDS["table"][1]
    whole = 256  # "ab"
    for strings, expected in ((["b", "ab"], "ab"), (["ab", "a"], "a"), (["b", "x"], "b")):
        assert StopStringWatch(strings, table).look(np.array([whole])) == (1, expected)


def test_what_is_complete_before_the_least_number_of_tokens_does_not_end_the_answer():
    """The text is then cut at the occurrence that counts, not at the first one."""
    ids = np.frombuffer(b"xab-ab-ab", np.uint8).astype(np.int32)
    make = watch_maker(["ab", "longer than what was read"], KINDS["table"][1], min_new_tokens=4)
    whole, watch = make(), make()
    assert whole.look(ids) == (6, "ab")
    found = [watch.look(ids[:count]) for count in range(1, 7)]
    assert found == [None] * 5 + [(6, "ab")]
    assert answer_text(decoding(BYTE_LEVEL), ids[:6], "ab") == "xab-"
    ends = [watch_maker(["ab"], KINDS["table"][1], least)().look(ids) for least in (2, 3, 5, 6, 9)]
    assert ends == [(3, "ab"), (6, "ab"), (6, "ab"), (9, "ab"), None]


def test_an_output_that_begins_anew_is_read_anew():
    """A request that was set back is shown its output from the start."""
    watch = StopStringWatch(["ab"], KINDS["table"][1])
    assert watch.look(np.array([97, 99])) is None
    assert watch.look(np.array([98])) is None
    assert watch.look(np.array([98, 97, 98])) == (3, "ab")


def test_the_bytes_of_a_loaded_tokenizer_are_those_of_its_decoder(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer.token_bytes(), ByteLevelTable)
    assert tokenizer.token_bytes() is tokenizer.token_bytes(), "the table is made once"
    for number in range(260):
        assert tokenizer.token_bytes().read(number).decode("utf-8", "replace") == tokenizer.decode(np.array([number]))
    assert tokenizer.silent_tokens["<|im_end|>"] == 258
    assert not is_byte_level(FALLBACK)


def test_a_tokenizer_without_bytes_of_its_own_is_read_through_a_window():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=fallback_tokenizer()))
    first, second = tokenizer.token_bytes(), tokenizer.token_bytes()
    assert isinstance(first, DecodedWindow)
    assert first is not second, "a window belongs to one answer"
    blank_a = FALLBACK.token_to_id("▁a")
    assert [first.read(blank_a), first.read(blank_a), second.read(blank_a)] == [b"a", b" a", b"a"]


@pytest.mark.parametrize(("value", "strings"), [("", ()), ([], ()), ([""], ()), ("a", ("a",)), (["a", "b", "a"], ("a", "b"))])
def test_stop_strings_are_one_text_or_several_and_may_be_none(value, strings):
    assert normalize_stop_strings(value) == strings


@pytest.mark.parametrize("value", [3, ["a", 3], ["a", ""], {"a": 1}, True, "\ud800", ["\ufffd"]])
def test_what_can_never_be_in_a_text_is_no_stop_string(value):
    with pytest.raises(ValueError, match="must"):
        normalize_stop_strings(value)
