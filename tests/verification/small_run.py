"""A sample, smaller than the default one of `eaglecli verify` unless told otherwise, run and examined in process."""

from dataclasses import dataclass
from typing import Any

from eaglecli.engine.request import Completion, Request
from eaglecli.io.sample_prompts import PROMPTS
from eaglecli.verification.reference_run import RunRules
from eaglecli.verification.report import Findings, examine
from eaglecli.verification.text_pass import Models
from tests.engine.harness import LoadedPair, Triple, make_engine, requests_of

CONTEXT = 512


@dataclass(frozen=True)
class Size:
    """Of a sample."""

    num_prompts: int = 5
    new_tokens: int = 24


def sample(size: Size) -> list[Request]:
    """Greedy and sampled requests by turns."""
    prompts = [list(prompt.encode()) for prompt in PROMPTS[: size.num_prompts]]
    greedy = requests_of(prompts, size.new_tokens)
    sampled = requests_of(prompts, size.new_tokens, temperature=1.0, seed=7)
    both = [request for pair in zip(greedy, sampled, strict=True) for request in pair]
    return [Request(key, request.prompt_ids, request.sampling) for key, request in enumerate(both)]


def generate(pair: LoadedPair, triple: Triple | None, size: Size = Size()) -> dict[Any, Completion]:  # noqa: B008 - frozen
    engine = make_engine(pair.target, pair.draft, triple, context_length=CONTEXT, max_total_tokens=8192, chunked_prefill_size=64)
    return {completion.request.key: completion for completion in engine.generate(sample(size))}


def examined(pair: LoadedPair, triple: Triple, plain: dict[Any, Completion], drafted: dict[Any, Completion]) -> Findings:
    engine = make_engine(pair.target, pair.draft, triple, context_length=CONTEXT)
    rules = RunRules(engine.settings.speculation, CONTEXT, is_deterministic=False)
    return examine("sample", Models(pair.target.model, pair.draft.model, engine.attention.attend), rules, plain, drafted)
