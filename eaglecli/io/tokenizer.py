"""Text to token ids and back: loading, chat templates in which content stays plain text, whole-answer decoding.

Control tokens in content must never be parsed, and all other text must get exactly the ids that it gets inside the
rendered template. So the prompt is encoded in one piece by a *sealed* copy of the tokenizer, in which every control
token bears an unguessable name: control tokens that the template wrote are renamed, those in content are not and
are encoded like any other characters. (Encoding the pieces apart would change ids where pieces touch.)
"""

import copy
import inspect
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglecli.errors import ModelError, UserError
from eaglecli.io.gguf_tokenizer import apply_splitting_rule
from eaglecli.io.records import RecordFault
from eaglecli.io.token_bytes import ByteLevelTable, DecodedWindow, TokenBytes, is_byte_level

LOOKS_LIKE_CONTROL = re.compile(r"<.+>|\[.+\]", re.DOTALL)
KEPT_FIELDS = ("role",)  # fields of a message whose value the template compares, and which the reader has checked


class PromptTokenizer:
    """A loaded tokenizer as `generate` uses it. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of transformers. Raises ModelError if it has no `tokenizers` backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError("the tokenizer has no fast (tokenizer.json) form", "give one with --tokenizer-path")
        self._tokenizer, self._backend = tokenizer, backend
        self._template: str | None = None  # instead of the tokenizer's own
        self._template_variables: Mapping[str, Any] = {}
        self._lock = threading.Lock()  # templates and encoders are not promised to bear two callers
        self._control_tokens = _control_tokens(backend)
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        nonce = secrets.token_hex(16)
        self._sealed_names = {text: f"{nonce}s{number:06d}e" for number, text in enumerate(self._control_tokens)}
        self._escaped_names = {text: f"{nonce}c{number:06d}e" for number, text in enumerate(self._control_tokens)}
        self._escaped_texts = {name: text for text, name in self._escaped_names.items()}
        self._control_pattern = _any_of(self._control_tokens)
        self._escaped_pattern = re.compile(f"{nonce}c[0-9]{{6}}e")
        self._sealed = _renamed_copy(backend, self._sealed_names)
        self._raw = _renamed_copy(backend, {})  # a copy, since decoding goes on in another thread
        self._silent_tokens = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        self._byte_table = ByteLevelTable(backend, self._silent_tokens.values()) if is_byte_level(backend) else None

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock: each process has its own."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def has_chat_template(self) -> bool:
        """Whether `messages` can be rendered."""
        return bool(self._template or self._tokenizer.chat_template)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._vocab_size

    def with_template(self, template: str | None, variables: Mapping[str, Any]) -> "PromptTokenizer":
        """The same tokenizer with another chat template (None keeps its own) and values for the template's variables.

        Raises UserError for a template that is no Jinja, and for variables that are not the template's to have.
        """
        reserved = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages", "add_generation_prompt"}
        taken = next((name for name in variables if name in reserved), None)
        if taken is not None:
            raise UserError(f"--chat-template-kwargs must not set `{taken}`", "it is decided by the run")
        other = copy.copy(self)
        other._template, other._template_variables = template, {name: self._escaped_value(item) for name, item in variables.items()}
        try:
            other.render([{"role": "user", "content": "x"}])
        except RecordFault as fault:
            if type(fault.__cause__).__name__ == "TemplateSyntaxError":
                raise UserError(f"--chat-template is no Jinja template: {fault.__cause__}", "mend the file") from fault
        return other

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-text id."""
        return self._tokenizer.eos_token_id

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Texts of the control tokens and their ids."""
        return self._control_tokens

    @property
    def silent_tokens(self) -> Mapping[str, int]:
        """Texts and ids of the control tokens that `decode` leaves out."""
        return self._silent_tokens

    def token_bytes(self) -> TokenBytes:
        """What reads the tokens of one answer as they come. Not to be used from several threads, but for byte-level tokenizers."""
        return self._byte_table or DecodedWindow(self._decode_list, self._silent_tokens.values())

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32 [prompt_len] ids of the rendered conversation, the opening of the answer included.

        Raises RecordFault "template" with the template's own message when it refuses the conversation.
        """
        self._check_tools(messages)
        with self._lock:
            rendered = self.render([self._escaped(message) for message in messages])
        sealed = self._control_pattern.sub(lambda found: self._sealed_names[found[0]], rendered)
        plain = self._escaped_pattern.sub(lambda found: self._escaped_texts[found[0]], sealed)
        return np.array(self._sealed.encode(plain, add_special_tokens=False).ids, dtype=np.int32)

    def encode_text(self, text: str) -> np.ndarray:
        """int32 [prompt_len] ids of raw text as the tokenizer encodes it, without a second BOS if the text brings one."""
        ids = self._raw.encode(text).ids
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return np.array(ids, dtype=np.int32)

    def cut_text(self, text: str, num_tokens: int, side: Literal["left", "right"]) -> str:
        """The text without about its first (left) or last (right) tokens, cut between characters; all of it when it has no more."""
        spans = self._raw.encode(text, add_special_tokens=False).offsets
        if num_tokens >= len(spans):
            return ""
        return text[spans[num_tokens][0] :] if side == "left" else text[: spans[len(spans) - num_tokens - 1][1]]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text. Raises RecordFault "template"."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=True, **self._template_variables
            )
        except Exception as error:  # templates are programs: they may raise anything, and it spoils this record alone
            raise RecordFault("template", f"the chat template refuses this conversation: {' '.join(str(error).split())}") from error

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of a whole answer; control tokens are left out."""
        return self._decode_list(token_ids.tolist())

    def _decode_list(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)  # transformers would look at each id in Python first

    def decode_token(self, token_id: int) -> str:
        """Text of one token alone, control tokens included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_prompt(self, token_ids: np.ndarray) -> str:
        """Text of a prompt as the model sees it, control tokens included."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _escaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value if name in KEPT_FIELDS else self._escaped_value(value) for name, value in message.items()}

    def _escaped_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control_pattern.sub(lambda found: self._escaped_names[found[0]], value)
        if isinstance(value, list):
            return [self._escaped_value(item) for item in value]
        if isinstance(value, dict):
            return {name: self._escaped_value(item) for name, item in value.items()}
        return value

    def _check_tools(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """A template that does not know tool calls would drop them without a word."""
        uses_tools = any(message.get("tool_calls") or message["role"] in ("tool", "function") for message in messages)
        if uses_tools and "tool" not in str(self._template or self._tokenizer.chat_template):
            raise RecordFault("template", "the chat template does not know tool calls")


def load_tokenizer(path: Path, revision: str | None = None, local_files_only: bool = False) -> PromptTokenizer:
    """From a folder, a GGUF file, or a hub id (a path that does not exist). Raises ModelError."""
    from transformers import AutoTokenizer

    place, extra = str(path), {}
    if path.is_file() and path.suffix == ".gguf":
        place, extra = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir() and not any(path.glob("tokenizer*")) and (gguf := sorted(path.glob("*.gguf"))):
        extra = {"gguf_file": gguf[0].name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, local_files_only=local_files_only, **extra)
    except Exception as error:  # the loader raises a dozen kinds; each of them means the same to the user
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {reason}", "give one with --tokenizer-path") from error
    if "gguf_file" in extra and getattr(tokenizer, "backend_tokenizer", None) is not None:
        apply_splitting_rule(tokenizer.backend_tokenizer, Path(place) / extra["gguf_file"])
    return PromptTokenizer(tokenizer)


def _control_tokens(backend: Any) -> dict[str, int]:
    """Added tokens that steer a model: special ones, and bracketed ones such as <think> that are not marked special.

    Other added tokens (runs of blanks, say) are ordinary text and stay so.
    """
    added = backend.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special or LOOKS_LIKE_CONTROL.fullmatch(token.content)}


def _any_of(texts: Mapping[str, int]) -> re.Pattern[str]:
    """Longest first, so that a token is not taken for its own beginning; without tokens, a pattern that never matches."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _renamed_copy(backend: Any, names: Mapping[str, str]) -> Any:
    """A copy of the tokenizer in which control tokens have other names and the same ids. Raises ModelError."""
    from tokenizers import Tokenizer

    document = json.loads(backend.to_str())
    for token in document["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    _rename_vocabulary(document["model"], names)
    document["truncation"] = document["padding"] = None
    copy = Tokenizer.from_str(json.dumps(document))
    moved = [text for text, name in names.items() if copy.token_to_id(name) != backend.token_to_id(text)]
    if moved:
        raise ModelError(
            f"the tokenizer cannot keep control tokens out of prompts: `{moved[0]}` has no fixed id", "give another with --tokenizer-path"
        )
    return copy


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
