"""Prompts that the target writes itself: what it says when it is given the opening of a user's turn.

A chat model has learnt its users' turns too, or can at least continue them. Kept are texts that ended by themselves, do not
repeat themselves, hold no control token and were not written before.
Source of the idea: Xu et al., "Magpie" (arXiv 2406.08464).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.training.answers import random_seed_of
from eaglecli.training.repetition import find_loop
from eaglecli.training.shards import ShardStore

_MAX_PROMPT_TOKENS = 256
_MIN_PROMPT_TOKENS = 4
_MOST_TRIES = 4  # per prompt wanted: a model that cannot write prompts must not be asked for ever


@dataclass
class SelfPromptCounts:
    """What became of the texts that were written."""

    num_written: int = 0
    num_kept: int = 0
    num_unfinished: int = 0
    num_loops: int = 0
    num_unfit: int = 0  # too short, with control tokens, or no text
    num_repeated: int = 0


class SelfPromptWriter:
    """Writes prompts until there are `num_wanted`. `texts` are those at hand; `counts` are of this run."""

    def __init__(
        self,
        prefix_ids: np.ndarray,
        end_ids: tuple[int, ...],
        control_ids: frozenset[int],
        decode: Callable[[np.ndarray], str],
        num_wanted: int,
        room: int,
        seed: int,
        store: ShardStore,
    ) -> None:
        """`prefix_ids` int32 [n]: the chat template up to where the user's words begin; `room`: the engine's context in tokens."""
        self._prefix_ids, self._end_ids, self._control_ids, self._decode = prefix_ids, end_ids, control_ids, decode
        self._num_wanted, self._seed, self._store = num_wanted, seed, store
        self._max_new_tokens = max(1, min(_MAX_PROMPT_TOKENS, room - len(prefix_ids)))
        records = list(store.read())
        self.texts: list[str] = [record["text"] for record in records][:num_wanted]
        self._seen = set(self.texts)
        self._first_try = 1 + max((record["try"] for record in records), default=-1)
        self.counts = SelfPromptCounts()

    @property
    def num_missing(self) -> int:
        """Prompts still to be written."""
        return max(0, self._num_wanted - len(self.texts))

    def run(self, engine: Engine, should_stop: Callable[[], bool]) -> Iterator[int]:
        """Write until there are enough, too many tries failed, or `should_stop`. Yields the number of prompts after each text."""
        try:
            for completion in engine.generate(self._requests(should_stop)):
                if self.num_missing:
                    self._take(completion)
                yield len(self.texts)
        finally:
            self._store.flush()

    def _requests(self, should_stop: Callable[[], bool]) -> Iterator[Request]:
        for number in range(self._first_try, self._first_try + _MOST_TRIES * self.num_missing):
            if should_stop() or not self.num_missing:
                return
            seed = random_seed_of("prompt", self._seed, number)
            sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=self._max_new_tokens, stop_token_ids=self._end_ids)
            yield Request(number, self._prefix_ids, sampling)

    def _take(self, completion: Completion) -> None:
        counts = self.counts
        counts.num_written += 1
        token_ids = completion.output_ids[:-1]
        if completion.finish_reason != "stop":
            counts.num_unfinished += 1
            return
        if find_loop(token_ids) is not None:
            counts.num_loops += 1
            return
        is_fit = len(token_ids) >= _MIN_PROMPT_TOKENS and self._control_ids.isdisjoint(token_ids.tolist())
        text = self._decode(token_ids).strip() if is_fit else ""
        if not text:
            counts.num_unfit += 1
            return
        if text in self._seen:
            counts.num_repeated += 1
            return
        self._seen.add(text)
        self.texts.append(text)
        counts.num_kept += 1
        self._store.add({"try": completion.request.key, "text": text})
