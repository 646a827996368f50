"""Prompts of records to token ids: chat template or raw text, the run's system prompt, and cutting what does not fit on request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from eaglecli.io.chat_messages import Message
from eaglecli.io.records import PromptRecord, RecordFault
from eaglecli.io.tokenizer import PromptTokenizer

MAX_CUTS = 16
SETS_THE_SCENE = ("system", "developer")

Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One of the three is given."""

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """`uses_template`: whether a text becomes one user message."""

    tokenizer: PromptTokenizer
    uses_template: bool
    system_prompt: str | None = None

    def opening(self, record: PromptRecord) -> Prompt:
        """What is to be answered first. Raises RecordFault when it takes a template and there is none."""
        if record.token_ids is not None:
            return Prompt(token_ids=record.token_ids)
        if record.messages is not None:
            return self.conversation(record.messages, f"`{record.shape}`")
        if record.turns is not None:
            return self._of_text(record.turns[0], is_raw=len(record.turns) == 1 and not self.uses_template, name="`turns`")
        assert record.text is not None
        return self._of_text(record.text, is_raw=record.is_raw or not self.uses_template, name="`prompt`")

    def conversation(self, messages: Sequence[Message], name: str = "`messages`") -> Prompt:
        """Messages under the run's system prompt, unless they have one of their own. Raises RecordFault without a template."""
        if not self.tokenizer.has_chat_template:
            raise RecordFault("template", f"{name} need a chat template and the tokenizer has none")
        if self.system_prompt is not None and messages[0]["role"] not in SETS_THE_SCENE:
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        return Prompt(messages=tuple(messages))

    def encode(self, prompt: Prompt) -> np.ndarray:
        """int32 [prompt_len]. Raises RecordFault: refused by the template, unknown token ids, or nothing left of it."""
        if prompt.messages is not None:
            ids = self.tokenizer.encode_messages(prompt.messages)
        elif prompt.text is not None:
            ids = self.tokenizer.encode_text(prompt.text)
        else:
            ids = self._checked_ids(prompt.token_ids or ())
        if not len(ids):
            raise RecordFault("empty_prompt", "empty prompt: the tokenizer makes no token of it")
        return ids

    def encode_within(self, prompt: Prompt, limit: int, side: Side) -> np.ndarray:
        """As `encode`, with at most `limit` tokens: text is cut at the left or right, of messages the longest one, never the template.

        Raises RecordFault "too_long" when the rest alone is too much.
        """
        ids = self.encode(prompt)
        num_tokens, num_cut = len(ids), 0
        for _ in range(MAX_CUTS):
            if len(ids) <= limit:
                return ids
            num_cut += len(ids) - limit
            shorter = self._shortened(prompt, num_cut, side)
            if shorter is None:
                break
            ids = self.encode(shorter)
        raise RecordFault("too_long", f"{num_tokens} prompt tokens cannot be cut to {limit}: the template and other messages are too long")

    def _of_text(self, text: str, is_raw: bool, name: str) -> Prompt:
        return Prompt(text=text) if is_raw else self.conversation(({"role": "user", "content": text},), name)

    def _checked_ids(self, token_ids: tuple[int, ...]) -> np.ndarray:
        unknown = next((number for number in token_ids if number >= self.tokenizer.vocab_size), None)
        if unknown is not None:
            raise RecordFault("bad_type", f"token id {unknown} is not in the vocabulary of {self.tokenizer.vocab_size}")
        return np.array(token_ids, dtype=np.int32)

    def _shortened(self, prompt: Prompt, num_tokens: int, side: Side) -> Prompt | None:
        """The prompt without `num_tokens` tokens of its text, or None when it has not so many."""
        if prompt.token_ids is not None:
            kept = prompt.token_ids[num_tokens:] if side == "left" else prompt.token_ids[:-num_tokens]
            return Prompt(token_ids=kept) if kept else None
        if prompt.text is not None:
            text = self.tokenizer.cut_text(prompt.text, num_tokens, side)
            return Prompt(text=text) if text else None
        messages = list(prompt.messages or ())
        longest = max(range(len(messages)), key=lambda number: len(messages[number]["content"] or ""))
        text = self.tokenizer.cut_text(messages[longest]["content"] or "", num_tokens, side)
        messages[longest] = {**messages[longest], "content": text}
        return replace(prompt, messages=tuple(messages)) if text else None
