"""A request on its way through the engine: waiting, prefilling, running, perhaps preempted and begun again. No tensors."""

import time
from dataclasses import dataclass, field

import numpy as np

from eaglecli.engine.request import Request


@dataclass(frozen=True, eq=False)
class EmittedOutput:
    """What a request had been given before it lost its row."""

    token_ids: np.ndarray  # int32 [n]
    accept_counts: np.ndarray  # int16 [verify steps]
    proposed_counts: np.ndarray  # int16 [verify steps]
    num_cut_tokens: int


_NO_STEPS = np.zeros(0, np.int16)
NOTHING_EMITTED = EmittedOutput(np.zeros(0, np.int32), _NO_STEPS, _NO_STEPS, 0)


@dataclass(eq=False)
class Sequence:
    """One admitted or waiting request and how far it has come."""

    request: Request
    row: int = -1  # -1 while waiting
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    arrival: int = -1  # how many were queued before it
    seniority: int = -1  # how many were admitted before it: kept when it is preempted
    emitted: EmittedOutput = NOTHING_EMITTED  # before the last preemption
    was_preempted: bool = False
    added_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0

    prompt_len: int = field(init=False)  # tokens of the prompt
    cap: int = field(init=False)  # tokens that the output may have
    limit: int = field(init=False)  # tokens the row may ever know: prompt and output cap
    never_stops: bool = field(init=False)  # nothing but its cap can end it

    def __post_init__(self) -> None:
        """What scheduling asks for again and again."""
        request, sampling = self.request, self.request.sampling
        self.prompt_len, self.cap = len(request.prompt_ids), sampling.max_new_tokens
        self.limit = self.prompt_len + self.cap
        self.never_stops = not sampling.stop_token_ids and request.make_stop_watch is None

    @property
    def is_resumed(self) -> bool:
        """Whether it had an output before it was admitted: its last token is known and not chosen again."""
        return len(self.emitted.token_ids) > 0

    @property
    def known_ids(self) -> np.ndarray:
        """int32: the tokens known at its admission."""
        return np.concatenate([self.request.prompt_ids, self.emitted.token_ids]) if self.is_resumed else self.request.prompt_ids

    @property
    def num_known(self) -> int:
        """Tokens known at its admission."""
        return self.prompt_len + len(self.emitted.token_ids)

    @property
    def num_to_prefill(self) -> int:
        """Tokens whose cache entries are computed before it runs. The last token of an output has none yet: the next tree's root."""
        return self.prompt_len + max(0, len(self.emitted.token_ids) - 1)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..end of what a sequence knows; `is_last` when it runs from here on."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to prefill."""
        return self.end == self.sequence.num_to_prefill

    @property
    def chooses_token(self) -> bool:
        """Whether the first token of the output comes out of it."""
        return self.is_last and not self.sequence.is_resumed
