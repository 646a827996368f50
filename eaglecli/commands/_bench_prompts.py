"""The prompts of a bench: random ids, a ShareGPT file, the evaluation sets, or any file that `generate` reads (first turns).

The rules of random lengths and of the ShareGPT filter are those of vLLM's bench, or with `--compat sglang` of SGLang's:
a range ratio r draws from (1 - r) .. (1 + r) times the length in vLLM, from r times the length .. the length in SGLang.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eaglecli.commands._bench_settings import EVALUATION, EVALUATION_SETS, RANDOM, SHAREGPT, BenchOptions
from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._dry_run import rules_without_engine
from eaglecli.commands._input import read_input, select_input
from eaglecli.commands._open_engine import FoundModels
from eaglecli.commands._request_maker import RequestMaker
from eaglecli.config import COMMAND_LINE, GenerateSettings
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.console import Console
from eaglecli.io.formats import open_rows
from eaglecli.io.prompts import InputSelection
from eaglecli.io.records import RecordError
from eaglecli.io.tokenizer import PromptTokenizer

_VLLM_SHORTEST, _VLLM_LONGEST_PROMPT, _VLLM_LONGEST = 4, 1024, 2048
_SGLANG_SHORTEST = 2


@dataclass(frozen=True, eq=False)
class BenchData:
    """What is run. Request keys count from 0; `tags` names the part of the data each one comes from."""

    name: str
    requests: tuple[Request, ...]
    tags: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    tokenizer: PromptTokenizer | None  # None: the prompts are noise, and so is the text
    num_set_aside: int = 0  # bad records

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer."""
        return max(len(request.prompt_ids) + request.sampling.max_new_tokens for request in self.requests)

    def describe(self) -> dict[str, Any]:
        """For the results: sizes, and enough to see whether two runs had the same prompts."""
        prompt_lens = [len(request.prompt_ids) for request in self.requests]
        caps = [request.sampling.max_new_tokens for request in self.requests]
        return {
            "name": self.name,
            "num_prompts": len(self.requests),
            "input_len": {"mean": float(np.mean(prompt_lens)), "min": min(prompt_lens), "max": max(prompt_lens)},
            "output_len": {"mean": float(np.mean(caps)), "min": min(caps), "max": max(caps)},
            "parts": {tag: self.tags.count(tag) for tag in dict.fromkeys(self.tags)},
            "num_set_aside": self.num_set_aside,
            "prompts_hash": _hash_of(self.requests),
        }


def read_prompts(options: BenchOptions, settings: GenerateSettings, models: FoundModels, largest_batch: int, console: Console) -> BenchData:
    """The requests of every configuration, in order. Raises UserError when there are none or one cannot run."""
    if options.is_random:
        requests = list(_random_requests(options, settings, models, options.num_prompts or largest_batch))
        data = BenchData(RANDOM, tuple(requests), (RANDOM,) * len(requests), models.target_config.eos_token_ids, None)
    else:
        data = _from_files(options, settings, models, console)
    context = models.context_length(settings)
    if data.longest > context:
        raise UserError(f"prompt and answer of up to {data.longest} tokens pass the context of {context}", "use shorter lengths")
    return data


def _random_requests(options: BenchOptions, settings: GenerateSettings, models: FoundModels, count: int) -> Iterator[Request]:
    """Ids drawn from the whole vocabulary; every prompt depends on the seed and its number alone."""
    vocab_size = models.target_config.vocab_size
    draw = np.random.default_rng([settings.random_seed, 0])
    lengths = [_random_lengths(draw, length, options, count) for length in (options.random_input_len, options.random_output_len)]
    for number, (num_prompt_tokens, cap) in enumerate(zip(*lengths, strict=True)):
        own = np.random.default_rng([settings.random_seed, 1, number])
        prompt = own.integers(0, vocab_size, num_prompt_tokens).astype(np.int32)
        yield Request(number, prompt, _sampling(settings, cap, number, models.target_config.eos_token_ids))


def _random_lengths(draw: np.random.Generator, length: int, options: BenchOptions, count: int) -> list[int]:
    ratio = options.range_ratio
    if options.compat == "sglang":
        low, high = max(int(length * ratio), 1), length
    else:
        low, high = max(int(np.floor(length * (1 - ratio))), 1), int(np.ceil(length * (1 + ratio)))
    return draw.integers(low, high + 1, count).tolist()


def _sampling(settings: GenerateSettings, cap: int, number: int, end_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=settings.random_seed * 1_000_003 + number,
        max_new_tokens=cap,
        stop_token_ids=() if settings.ignore_eos else end_token_ids,
    )


# ---- files --------------------------------------------------------------------------------------------------------


def _from_files(options: BenchOptions, settings: GenerateSettings, models: FoundModels, console: Console) -> BenchData:
    tokenizer = prepare_tokenizer(models.load_tokenizer(), settings)
    own = tokenizer.eos_token_id
    end_token_ids = models.target_config.eos_token_ids or (() if own is None else (own,))
    if options.dataset == SHAREGPT:
        found = list(_sharegpt_requests(options, settings, tokenizer, end_token_ids))
        num_bad = 0
    else:
        files = settings.with_derived(input=evaluation_files(options) if options.dataset != "custom" else options.dataset_path)
        found, num_bad = _record_requests(files, models, tokenizer, console)
    if not found:
        raise UserError(f"no record of {options.dataset_path[0]} can be used", "look at it with generate --dry-run", ExitCode.NOTHING_DONE)
    if settings.shuffle_seed is not None:
        random.Random(settings.shuffle_seed).shuffle(found)
    count = options.num_prompts or len(found)
    if count > len(found):
        console.note(f"{len(found)} prompts are there, {count} are wanted: they come round again")
    chosen = [found[number % len(found)] for number in range(count)]
    requests = tuple(replace(request, key=number) for number, (request, _) in enumerate(chosen))
    return BenchData(options.dataset, requests, tuple(tag for _, tag in chosen), end_token_ids, tokenizer, num_bad)


def evaluation_files(options: BenchOptions) -> tuple[str, ...]:
    """The files of an evaluation set, or of all six: in a folder by their names. Raises UserError."""
    wanted = EVALUATION_SETS if options.dataset == EVALUATION else (options.dataset,)
    path = Path(options.dataset_path[0])
    if not path.is_dir():
        return options.dataset_path
    files = [path / f"{name.replace('-', '_')}.jsonl" for name in wanted]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"--dataset-path {path} holds no {', '.join(missing)}", "name the file itself")
    return tuple(map(str, files))


def _record_requests(
    settings: GenerateSettings, models: FoundModels, tokenizer: PromptTokenizer, console: Console
) -> tuple[list[tuple[Request, str]], int]:
    """First turns of all good records, and the number of bad ones."""
    reader = read_input(select_input(settings, "--dataset-path"), settings, console)
    maker = RequestMaker(settings, tokenizer, rules_without_engine(models, settings))
    found: list[tuple[Request, str]] = []
    num_bad = 0
    for record in reader.records():
        request = maker.prepare(record)
        if isinstance(request, RecordError):
            num_bad += 1
        else:
            found.append((request, Path(record.key.file).stem))
    if num_bad:
        console.warning(f"{num_bad} records cannot be used and are left out; generate --dry-run looks closer")
    return found, num_bad


def _sharegpt_requests(
    options: BenchOptions, settings: GenerateSettings, tokenizer: PromptTokenizer, end_token_ids: tuple[int, ...]
) -> Iterator[tuple[Request, str]]:
    """The first question of each conversation, with the length of its answer as the cap; shuffled by the seed, then filtered."""
    pairs = list(_first_pairs(options.dataset_path))
    random.Random(settings.random_seed).shuffle(pairs)
    encode = _encoder(settings, tokenizer)
    number = 0
    for question, answer in pairs:
        if number == options.num_prompts:
            return
        prompt = encode(question)
        cap = options.sharegpt_output_len or len(tokenizer.encode_text(answer))
        if _is_kept(len(prompt), cap, options):
            yield Request(number, prompt, _sampling(settings, cap, number, end_token_ids)), SHAREGPT
            number += 1


def _encoder(settings: GenerateSettings, tokenizer: PromptTokenizer) -> Callable[[str], np.ndarray]:
    """Raw text, as the peers' benches have it, unless the template was asked for."""
    wanted = settings.apply_chat_template and settings.origin("apply_chat_template") == COMMAND_LINE
    if not wanted:
        return tokenizer.encode_text
    return lambda text: tokenizer.encode_messages([{"role": "user", "content": text}])


def _is_kept(num_prompt_tokens: int, cap: int, options: BenchOptions) -> bool:
    longest = options.sharegpt_context_len
    if longest is not None and num_prompt_tokens + cap > longest:
        return False
    if options.compat == "sglang":
        return min(num_prompt_tokens, cap) >= _SGLANG_SHORTEST
    is_long = num_prompt_tokens > _VLLM_LONGEST_PROMPT or num_prompt_tokens + cap > _VLLM_LONGEST
    is_short = num_prompt_tokens < _VLLM_SHORTEST or (cap < _VLLM_SHORTEST and options.sharegpt_output_len is None)
    return not (is_short or is_long)


def _first_pairs(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(first turn, second turn) of conversations that have both as text."""
    for path in paths:
        if not Path(path).is_file():
            raise UserError(f"--dataset-path {path} does not exist", "check the path")
        rules = InputSelection((path,), "sharegpt").text_rules
        with open_rows(path, rules, None) as (_, rows):
            for row in rows:
                turns = _turns(row.fields or {})
                if len(turns) >= 2:
                    yield turns[0], turns[1]


def _turns(fields: Mapping[str, Any]) -> list[str]:
    turns = fields.get("conversations")
    values = [turn.get("value") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return values if all(isinstance(value, str) for value in values[:2]) else []


def _hash_of(requests: Iterable[Request]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        digest.update(np.asarray(request.prompt_ids, np.int32).tobytes() + b"|%d;" % request.sampling.max_new_tokens)
    return digest.hexdigest()[:16]
