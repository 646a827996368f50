"""Log-probabilities as they are written: in generations.jsonl, and in the two forms of OpenAI's API.

`-9999` stands for minus infinity, which JSON cannot write. The text of a token is what the tokenizer makes of it alone, control tokens
included; a piece of a character has U+FFFD for what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LOWEST = -9999.0
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class AnswerLogprobs:
    """Of n tokens of an answer and of the k most probable tokens at each of their places."""

    chosen: np.ndarray  # float32 [n]
    top_ids: np.ndarray  # int32 [n, k]
    top_values: np.ndarray  # float32 [n, k]


class TokenTexts:
    """Texts of single tokens, each asked of the tokenizer once."""

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The texts, in order."""
        for token in token_ids:
            if token not in self._known:
                self._known[token] = self._text_of(token)
        return [self._known[token] for token in token_ids]


def logprob_fields(token_ids: np.ndarray, logprobs: AnswerLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """The object `logprobs` of a generation line: one entry a token, in the order of `token_ids`."""
    return {
        "tokens": texts.of(token_ids.tolist()),
        "token_logprobs": np.maximum(logprobs.chosen, LOWEST).tolist(),
        "top_token_ids": logprobs.top_ids.tolist(),
        "top_tokens": [texts.of(ids) for ids in logprobs.top_ids.tolist()],
        "top_logprobs": np.maximum(logprobs.top_values, LOWEST).tolist(),
    }


def chat_logprobs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A generation line's `logprobs` as a choice of /v1/chat/completions has them."""
    content = [
        {**_entry(token, value), "top_logprobs": [_entry(*pair) for pair in zip(top_tokens, top_values, strict=True)]}
        for token, value, top_tokens, top_values in _places(fields)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A generation line's `logprobs` as a choice of /v1/completions has them. Of alternatives that read the same the best one stays."""
    offsets, position = [], 0
    for token in fields["tokens"]:
        offsets.append(position)
        position += len(token)
    alternatives = [dict(reversed(list(zip(top_tokens, top_values, strict=True)))) for _, _, top_tokens, top_values in _places(fields)]
    return {"tokens": fields["tokens"], "token_logprobs": fields["token_logprobs"], "top_logprobs": alternatives, "text_offset": offsets}


def _places(fields: Mapping[str, Any]) -> zip:
    names = ("tokens", "token_logprobs", "top_tokens", "top_logprobs")
    return zip(*(fields[name] for name in names), strict=True)


def _entry(token: str, value: float) -> dict[str, Any]:
    """`bytes` is null where the text does not tell them."""
    return {"token": token, "logprob": value, "bytes": None if REPLACEMENT in token else list(token.encode())}
