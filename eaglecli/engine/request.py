"""What is asked of the engine and what it answers: plain records, no tensors."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and where it ends.

    `temperature` 0 is greedy. `top_k` -1 keeps the whole vocabulary. `stop_token_ids` holds end-of-text ids and
    the request's own stop ids alike: the engine treats both the same.

    Penalties and bias change the logits before temperature and filters. `repetition_penalty` looks at prompt and output, as in
    transformers; `presence_penalty` and `frequency_penalty` at the output alone, as in OpenAI's API. `logit_bias` holds (token id,
    bias) pairs. None of `stop_token_ids` is chosen before the output has `min_new_tokens` tokens. `logprobs` None asks for none, k
    for those of each token and of the k most probable ones at its place, by the model's own law: before bias, penalties, temperature.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None

    @property
    def adjusts_logits(self) -> bool:
        """Whether tokens are chosen from anything but the model's own logits."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalties or bool(self.logit_bias) or (self.min_new_tokens > 0 and bool(self.stop_token_ids))


class StopWatch(Protocol):
    """Looks for the end of one answer where token ids do not show it. Remembers what it has seen, so that each token is read once."""

    def look(self, output_ids: np.ndarray) -> tuple[int, str] | None:
        """How many tokens to keep and the stop string that the last of them completes, or None.

        output_ids int32 [n]: the whole output so far. The answer must not depend on how it grew.
        """
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue. `key` names it to the caller and is never looked at by the engine."""

    key: Hashable
    prompt_ids: np.ndarray  # int32 [prompt_len], prompt_len >= 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sample: int = 0  # number of this copy when one prompt is sampled several times
    make_stop_watch: Callable[[], StopWatch] | None = None  # asked once each time the request is given a row
    num_follow_ups: int = 0  # requests that can only be made after this one: more work than its own hangs on it


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of the n tokens of an output, and of the k most probable tokens at each of their places, best first."""

    chosen: np.ndarray  # float32 [n]
    top_ids: np.ndarray  # int32 [n, k]
    top_values: np.ndarray  # float32 [n, k]


@dataclass(eq=False)  # not frozen: one is made a request, and freezing so many fields takes longer than filling them
class Completion:
    """The answer to one request, with the counts that its statistics are made of.

    The counts close: len(output_ids) = 1 + num_accepted_drafts + num_verify_steps - num_cut_tokens.
    """

    request: Request
    output_ids: np.ndarray  # int32 [completion_len], the end token included
    finish_reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None  # completed by the last token; then there is no stop_token_id
    error: str | None = None  # one sentence, only with finish_reason "error"
    num_verify_steps: int = 0
    num_accepted_drafts: int = 0  # before any cut
    num_proposed_drafts: int = 0  # tree nodes, the root not counted
    num_cut_tokens: int = 0
    accept_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))  # [num_verify_steps] drafts accepted by each step
    proposed_counts: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int16)
    )  # [num_verify_steps] 0 where it ran without the draft
    logprobs: TokenLogprobs | None = None  # None when the request asks for none
    queue_s: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0

    @property
    def stop_reason(self) -> int | str | None:
        """The stop id or stop string that ended the answer; None when neither did."""
        return self.stop_token_id if self.stop_string is None else self.stop_string
