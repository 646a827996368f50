"""The target's own answers to the training prompts, made by our engine and kept in shards with their token ids.

Of every prompt the first answer is greedy, the others are sampled at temperatures spread evenly over a range. Answers are made in a
shuffled order, so that a run cut short has seen a fair sample. Whatever is in the shards is not made again.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.training.repetition import find_loop
from eaglecli.training.settings import TrainSettings
from eaglecli.training.shards import ShardStore

_GOLDEN_RATIO = 0.6180339887498949  # its multiples are spread evenly over [0, 1)
_MIN_ROOM_TOKENS = 16  # a prompt that leaves less room in a packed sequence is not answered


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer. `loop_start` is where it begins to repeat itself, see `repetition`; the end token is part of `answer_ids`."""

    prompt: int  # number of the prompt
    sample: int
    temperature: float
    prompt_ids: np.ndarray  # int32 [prompt_len]
    answer_ids: np.ndarray  # int32 [answer_len]
    is_finished: bool  # ended by itself, with an end token
    loop_start: int | None


@dataclass(frozen=True)
class AnswerTotals:
    """What the shards hold."""

    num_answers: int
    num_tokens: int


def random_seed_of(*parts: object) -> int:
    """63 bits that depend on the parts alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def temperature_of(prompt: int, sample: int, settings: TrainSettings) -> float:
    """0 for the first answer of a prompt, else a value between the two temperatures of the settings."""
    if sample == 0:
        return 0.0
    place = ((prompt * settings.num_samples + sample) * _GOLDEN_RATIO) % 1.0
    return settings.low_temperature + place * (settings.high_temperature - settings.low_temperature)


def answer_request(prompt: int, sample: int, prompt_ids: np.ndarray, end_ids: tuple[int, ...], settings: TrainSettings) -> Request:
    """The request for one answer; prompt and answer together fit into a packed sequence."""
    sampling = SamplingParams(
        temperature=temperature_of(prompt, sample, settings),
        seed=random_seed_of("answer", settings.random_seed, prompt, sample),
        max_new_tokens=min(settings.max_new_tokens, settings.sequence_length - len(prompt_ids)),
        stop_token_ids=end_ids,
    )
    return Request((prompt, sample), prompt_ids, sampling)


def has_room(prompt_ids: np.ndarray, settings: TrainSettings) -> bool:
    """Whether a prompt is short enough to be answered within a packed sequence."""
    return 0 < len(prompt_ids) <= settings.sequence_length - _MIN_ROOM_TOKENS


def read_answers(store: ShardStore) -> Iterator[Answer]:
    """All answers that were made, each once."""
    seen: set[tuple[int, int]] = set()
    for record in store.read():
        key = (record["prompt"], record["sample"])
        if key not in seen:
            seen.add(key)
            ids = {name: np.array(record[name], np.int32) for name in ("prompt_ids", "answer_ids")}
            yield Answer(*key, record["temperature"], **ids, is_finished=record["finish_reason"] == "stop", loop_start=record["loop_start"])


class AnswerMaker:
    """Makes the answers that are missing. `totals` counts those that were there and those made."""

    def __init__(
        self, prompts: Sequence[np.ndarray], held_out: frozenset[int], end_ids: tuple[int, ...], settings: TrainSettings, store: ShardStore
    ) -> None:
        """`held_out` prompts are answered greedily alone, and first: the measurements need them whatever the budget."""
        self._prompts, self._end_ids, self._settings, self._store = prompts, end_ids, settings, store
        made = {(answer.prompt, answer.sample): len(answer.answer_ids) for answer in read_answers(store)}
        wanted = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(settings.num_samples) if prompt not in held_out]
        order = np.random.default_rng(settings.random_seed).permutation(len(wanted))
        ordered = [*((prompt, 0) for prompt in sorted(held_out)), *(wanted[place] for place in order)]
        self._missing = [key for key in ordered if key not in made and has_room(prompts[key[0]], settings)]
        self.totals = AnswerTotals(len(made), sum(made.values()))
        self._num_done = 0

    @property
    def num_missing(self) -> int:
        """Answers still to be made, 0 when the token budget is used up."""
        return 0 if self._budget_is_used() else len(self._missing) - self._num_done

    def run(self, engine: Engine, should_stop: Callable[[], bool]) -> Iterator[AnswerTotals]:
        """Answer until all is done or `should_stop`; what is running then is still finished. Yields the totals after each answer."""
        try:
            for completion in engine.generate(self._requests(should_stop)):
                self._keep(completion)
                yield self.totals
        finally:
            self._store.flush()

    def _requests(self, should_stop: Callable[[], bool]) -> Iterator[Request]:
        for prompt, sample in self._missing:
            if should_stop() or self._budget_is_used():
                return
            yield answer_request(prompt, sample, self._prompts[prompt], self._end_ids, self._settings)

    def _budget_is_used(self) -> bool:
        limit = self._settings.max_answer_tokens
        return limit is not None and self.totals.num_tokens >= limit

    def _keep(self, completion: Completion) -> None:
        prompt, sample = completion.request.key  # type: ignore[misc]
        self._num_done += 1
        if completion.finish_reason == "error":
            return
        self._store.add(
            {
                "prompt": prompt,
                "sample": sample,
                "temperature": round(completion.request.sampling.temperature, 4),
                "finish_reason": completion.finish_reason,
                "loop_start": find_loop(completion.output_ids),
                "prompt_ids": completion.request.prompt_ids.tolist(),
                "answer_ids": completion.output_ids.tolist(),
            }
        )
        self.totals = AnswerTotals(self.totals.num_answers + 1, self.totals.num_tokens + len(completion.output_ids))
