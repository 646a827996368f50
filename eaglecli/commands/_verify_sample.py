"""What `eaglecli verify` generates: prompts of the user or built-in ones, each asked greedily and sampled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from eaglecli.commands._input import read_input, select_input
from eaglecli.config import GenerateSettings
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.io.console import Console
from eaglecli.io.prompt_encoder import PromptEncoder
from eaglecli.io.record_ids import request_seed
from eaglecli.io.records import PromptRecord, RecordError, RecordFault, RecordKey
from eaglecli.io.sample_prompts import SOURCE, sample_records
from eaglecli.io.tokenizer import PromptTokenizer

DEFAULT_PROMPTS = 16
DEFAULT_NEW_TOKENS = 64
MAX_NAMED_FAULTS = 3


@dataclass(frozen=True, eq=False)
class Sample:
    """Requests by mode; all modes run in one batch."""

    modes: dict[str, list[Request]]

    @property
    def requests(self) -> list[Request]:
        """Of all modes, side by side: greedy and sampled rows share every batch."""
        return [request for together in zip(*self.modes.values(), strict=True) for request in together]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(request.prompt_ids) + request.sampling.max_new_tokens for request in self.requests)


def read_records(settings: GenerateSettings, console: Console) -> list[PromptRecord | RecordError]:
    """The records of the input, or built-in prompts without one. Raises UserError when the input cannot be read."""
    limit = settings.limit or DEFAULT_PROMPTS
    if settings.input is None:
        return list(sample_records(limit))
    settings = replace(settings, limit=limit)
    return list(read_input(select_input(settings), settings, console).records())


def make_sample(
    records: list[PromptRecord | RecordError],
    settings: GenerateSettings,
    tokenizer: PromptTokenizer,
    end_token_ids: tuple[int, ...],
    context_length: int,
    temperature: float,
    console: Console,
) -> Sample:
    """Two requests of every record that can be asked, one if `temperature` is 0. Settings of a record have no part: verify has its own."""
    encoder = PromptEncoder(tokenizer, settings.apply_chat_template and tokenizer.has_chat_template, settings.system_prompt)
    temperatures = {"greedy": 0.0} | ({f"seeded, temperature {temperature:g}": temperature} if temperature else {})
    modes: dict[str, list[Request]] = {mode: [] for mode in temperatures}
    stop_token_ids = () if settings.ignore_eos else end_token_ids
    for key, prompt_ids in _encoded(records, encoder, context_length, console):
        cap = min(settings.max_new_tokens, context_length - len(prompt_ids))
        for mode, value in temperatures.items():
            sampling = SamplingParams(
                temperature=value, seed=request_seed(settings.random_seed, key), max_new_tokens=cap, stop_token_ids=stop_token_ids
            )
            modes[mode].append(Request(f"{_name(key)} ({mode})", prompt_ids, sampling))
    return Sample(modes)


def _encoded(
    records: list[PromptRecord | RecordError], encoder: PromptEncoder, context_length: int, console: Console
) -> Iterator[tuple[RecordKey, np.ndarray]]:
    """Prompts of the usable records; the others are told of."""
    faults = []
    for record in records:
        try:
            if isinstance(record, RecordError):
                raise RecordFault(record.code, record.message)
            prompt_ids = encoder.encode(encoder.opening(record))
            if len(prompt_ids) >= context_length:
                raise RecordFault("too_long", f"{len(prompt_ids)} prompt tokens leave no room in the context of {context_length} tokens")
            yield record.key, prompt_ids
        except RecordFault as fault:
            faults.append(f"{_name(record.key)}: {fault.message}")
    if faults:
        console.warning(f"{len(faults)} records cannot be used and are left out: {'; '.join(faults[:MAX_NAMED_FAULTS])}")


def _name(key: RecordKey) -> str:
    return f"{key.file} {key.line}" if key.file == SOURCE else f"{key.file}, line {key.line}"
