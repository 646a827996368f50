"""The text of single tokens as UTF-8 bytes, as it appears while an answer grows, at a cost that does not grow with the answer.

Byte-level tokenizers give each token fixed bytes, which need not be whole characters: a table is enough. Others decide by a
token's neighbours (leading blanks, bytes spelled as tokens), so the last few tokens are decoded together; characters
that are not complete yet are held back.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

MAX_HELD_TOKENS = 8  # no character takes more: what is not one by then never will be
REPLACEMENT = "\ufffd"

DecodeIds = Callable[[list[int]], str]


class TokenBytes(Protocol):
    """Turns tokens of one answer, given in order, into bytes of its text."""

    def read(self, token_id: int) -> bytes:
        """The bytes that this token makes certain."""
        ...


class ByteLevelTable:
    """Bytes of every token of a tokenizer with a byte-level decoder (GPT-2's alphabet). Holds no state of an answer."""

    def __init__(self, backend: Any, silent_ids: Iterable[int]) -> None:
        """`backend` is a tokenizer of `tokenizers`; `silent_ids` are tokens that decoding leaves out."""
        self._piece_of = backend.id_to_token
        self._known: dict[int, bytes] = dict.fromkeys(silent_ids, b"")

    def read(self, token_id: int) -> bytes:
        """The token's own bytes; none for ids without a token."""
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = _piece_bytes(self._piece_of(token_id) or "")
        return data


class DecodedWindow:
    """Bytes of tokens by any decoder: the tokens since the last whole character are decoded with those before them.

    Where a decoder gives up a whole run of byte tokens for one bad byte, a run longer than what is held is given up in parts.
    """

    def __init__(self, decode: DecodeIds, silent_ids: Iterable[int]) -> None:
        """`decode` is that of the whole answer."""
        self._decode, self._silent_ids = decode, frozenset(silent_ids)
        self._context: list[int] = []  # tokens whose text is out already: they decide how the next ones are read
        self._held: list[int] = []  # tokens since, the last of which ends inside a character or shows nothing yet
        self._num_given = 0  # characters of context and held tokens that are out

    def read(self, token_id: int) -> bytes:
        """Whole characters only, unless they have been awaited for too long."""
        if token_id in self._silent_ids:
            return b""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_too_long = len(self._held) == MAX_HELD_TOKENS
        new = (text if is_too_long else text.rstrip(REPLACEMENT))[self._num_given :]
        self._num_given += len(new)
        if is_too_long or (new and not text.endswith(REPLACEMENT)):
            self._context, self._held = self._held, []
            self._num_given = len(self._decode(self._context))
        return new.encode("utf-8")


def is_byte_level(backend: Any) -> bool:
    """Whether every token stands for bytes of its own."""
    return type(backend.decoder).__name__ == "ByteLevel"


def _piece_bytes(piece: str) -> bytes:
    """A piece whose characters all stand for bytes is those bytes; any other is an added token and stands for itself."""
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Visible Latin-1 characters stand for their own byte; the other bytes, in order, have the characters from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
