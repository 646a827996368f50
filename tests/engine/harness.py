"""Runs the engine on fixture pairs, with every invariant checked after every completion."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from tests.fixtures import VOCAB_SIZE, Pair
from tests.oracle import OracleResult, generate_eagle, generate_plain
from tests.oracle_models import OracleDraft, OracleTarget

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT = 2048
Triple = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class LoadedPair:
    """A pair for the engine and the same pair for the oracle."""

    target: LoadedTarget
    draft: LoadedDraft
    oracle_target: OracleTarget
    oracle_draft: OracleDraft


def load_pair(pair: Pair, tap_boundaries: tuple[int, ...] | None = None) -> LoadedPair:
    target = load_target(pair.target_dir, torch.float32, DEVICE, CONTEXT)
    draft = load_draft(pair.draft_dir, target, torch.float32, DEVICE, CONTEXT)
    oracle_target = OracleTarget.from_dir(pair.target_dir)
    return LoadedPair(target, draft, oracle_target, OracleDraft.from_dir(pair.draft_dir, oracle_target, tap_boundaries))


def load_engine_pair(target_dir: Path, draft_dir: Path, **draft_options: object) -> tuple[LoadedTarget, LoadedDraft]:
    target = load_target(target_dir, torch.float32, DEVICE, CONTEXT)
    return target, load_draft(draft_dir, target, torch.float32, DEVICE, CONTEXT, **draft_options)


def make_engine(target: LoadedTarget, draft: LoadedDraft | None, triple: Triple | None = None, **settings: object) -> Engine:
    """An engine with small defaults; `triple` None is plain decoding."""
    speculation = SpeculationSettings(*triple) if triple else PLAIN
    options = {"context_length": CONTEXT, "max_total_tokens": 32768, **settings}
    return Engine(target.model, draft.model if draft and triple else None, EngineSettings(speculation=speculation, **options))


def run(engine: Engine, requests: Iterable[Request]) -> dict[object, Completion]:
    """All completions by key. Checks pages, rows and slots on the way, that counts close, and that all pages come back."""
    completions = {}
    for completion in engine.generate(requests):
        engine.check()
        assert completion.request.key not in completions, "a request was answered twice"
        completions[completion.request.key] = completion
        closes = 1 + completion.num_accepted_drafts + completion.num_verify_steps - completion.num_cut_tokens
        assert len(completion.output_ids) == closes or completion.finish_reason == "error"
    summary = engine.summary()
    assert summary["num_free_pages"] == summary["num_pages"], "pages were lost"
    return completions


def run_watched(engine: Engine, requests: Iterable[Request], watch: Callable[[Engine], None]) -> dict[object, Completion]:
    """All completions by key, with all requests queued at the start and `watch` called between steps."""
    completions = {}
    for request in requests:
        engine.add(request)
    while not engine.is_idle:
        completions |= {completion.request.key: completion for completion in engine.step()}
        engine.check()
        watch(engine)
    return completions


def texts(completions: dict[object, Completion]) -> dict[object, tuple[list[int], str]]:
    return {key: (completion.output_ids.tolist(), completion.finish_reason) for key, completion in completions.items()}


def accept_lists(completions: dict[object, Completion]) -> dict[object, list[int]]:
    return {key: completion.accept_counts.tolist() for key, completion in completions.items()}


def outcomes(completions: dict[object, Completion]) -> dict[object, tuple[list[int], str, list[int]]]:
    """Tokens, finish reason and accept list."""
    return {key: (c.output_ids.tolist(), c.finish_reason, c.accept_counts.tolist()) for key, c in completions.items()}


def accept_length(completions: dict[object, Completion]) -> float:
    """Mean tokens of a verify step: accepted drafts and one more."""
    return 1 + sum(c.num_accepted_drafts for c in completions.values()) / sum(c.num_verify_steps for c in completions.values())


def draft_dir(pair: LoadedPair) -> Path:
    return pair.draft.fit.description.path


def requests_of(prompts: Iterable[Sequence[int] | np.ndarray], max_new_tokens: int, **sampling: object) -> list[Request]:
    """A request for each prompt, keyed by its number, all with the same settings."""
    settings = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return [Request(key, np.asarray(prompt, np.int32), settings) for key, prompt in enumerate(prompts)]


def random_prompts(lengths: Iterable[int], seed: int = 0) -> list[np.ndarray]:
    return [random_prompt(length, seed + number) for number, length in enumerate(lengths)]


def mixed_requests(
    count: int = 16,
    seed: int = 0,
    greedy: bool | None = None,
    stop_token_ids: tuple[int, ...] = (),
    max_prompt: int = 60,
    max_cap: int = 40,
) -> list[Request]:
    """Requests of mixed prompt lengths, caps and settings; `greedy` None alternates greedy and sampled ones."""
    random = np.random.default_rng(seed)
    settings = ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01})
    requests = []
    for key in range(count):
        is_greedy = key % 2 == 0 if greedy is None else greedy
        sampling = SamplingParams(
            temperature=0.0 if is_greedy else float(random.uniform(0.3, 1.5)),
            seed=int(random.integers(2**62)),
            max_new_tokens=int(random.integers(1, max_cap)),
            stop_token_ids=stop_token_ids,
            **({} if is_greedy else settings[key // 2 % len(settings)]),
        )
        prompt = random.integers(0, 256, int(random.integers(1, max_prompt))).astype(np.int32)
        requests.append(Request(key, prompt, sampling, sample=key % 3))
    return requests


def oracle_plain(pair: LoadedPair, requests: Sequence[Request]) -> dict[object, tuple[list[int], str]]:
    results = (
        (request.key, generate_plain(pair.oracle_target, request.prompt_ids, request.sampling, request.sample)) for request in requests
    )
    return {key: (result.output_ids, result.finish_reason) for key, result in results}


def oracle_eagle(pair: LoadedPair, requests: Sequence[Request], triple: Triple) -> dict[object, OracleResult]:
    return {
        request.key: generate_eagle(
            pair.oracle_target, pair.oracle_draft, request.prompt_ids, request.sampling, *triple, sample=request.sample
        )
        for request in requests
    }


def random_prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 64, length).astype(np.int32)
