"""`eaglecli verify`: is the text with this draft the target's own, and does the draft accept what it should?

A sample is generated twice by the engine as it is configured, without and with the draft, and both are held against one pass over the
finished texts. Where the run may pause its draft (a table with `none`, adaptive speculation), a third time with pauses. What the
differences are called is in `verification/difference.py`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._graphs import capture_graphs, choose_backend, idle_graph_settings, wanted_graph_sizes, why_no_graphs
from eaglecli.commands._open_engine import (
    BuiltEngine,
    FoundModels,
    find_device,
    find_models,
    has_draft,
    out_of_memory,
    plan_of,
    speculation_of,
)
from eaglecli.commands._verify_sample import DEFAULT_NEW_TOKENS, Sample, make_sample, read_records
from eaglecli.config import (
    DEFAULT,
    DEFAULT_CONFIG,
    TRIPLE_SETTINGS,
    GenerateSettings,
    choose_speculation,
    find_config,
    read_config,
    resolve_settings,
)
from eaglecli.engine.device_memory import release_memory
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion
from eaglecli.engine.settings import PLAIN, Alternative
from eaglecli.engine.speculation_policy import ScriptedPolicy
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.console import Console
from eaglecli.verification.reference_run import RunRules
from eaglecli.verification.report import Findings, are_good, examine
from eaglecli.verification.text_pass import Models

SCHEMA_VERSION = 1
MAX_SHOWN_DIFFERENCES = 20
DEFAULT_TEMPERATURE = 1.0
PAUSED = ", with pauses of the draft"


@dataclass(frozen=True)
class VerifyResult:
    """How the command ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


def resolve(given: Mapping[str, Any], config_name: str | None) -> GenerateSettings:
    """Settings from the command line's `given` values and a config file. Raises UserError."""
    config_name = config_name or (None if "target" in given else DEFAULT_CONFIG)
    settings = resolve_settings(given, read_config(find_config(config_name)) if config_name else None, find_device)
    own = {"temperature": DEFAULT_TEMPERATURE, "max_new_tokens": DEFAULT_NEW_TOKENS}
    return dataclasses.replace(settings, **{name: value for name, value in own.items() if settings.origin(name) == DEFAULT})


def verify(settings: GenerateSettings, console: Console, find: Callable[[GenerateSettings], FoundModels] = find_models) -> VerifyResult:
    """Runs the command. Raises UserError for what stops it."""
    if not has_draft(settings):
        raise UserError("verify compares a run with a draft to one without, and no draft is named", "name one with --draft")
    plan, settings = plan_of(settings), _with_one_triple(settings)
    speculation_of(settings)
    records = read_records(settings, console)
    models = find(settings)
    tokenizer = prepare_tokenizer(models.load_tokenizer(), settings)
    own_end = tokenizer.eos_token_id
    end_ids = models.target_config.eos_token_ids or (() if own_end is None else (own_end,))
    sample = make_sample(records, settings, tokenizer, end_ids, models.context_length(settings), settings.temperature, console)
    if not sample.requests:
        console.error("no record could be used", "give prompts with -i, or leave it out for built-in ones")
        return VerifyResult(ExitCode.NOTHING_DONE, {"schema_version": SCHEMA_VERSION, "exit_code": int(ExitCode.NOTHING_DONE)})
    try:
        return _verify(models, _sized_for(sample, settings), sample, len(plan.all) > 1 and PLAIN in plan.all, console)
    except (MemoryError, RuntimeError) as error:
        memory_error = out_of_memory(error)
        if memory_error is None:
            raise
        raise memory_error from error


def _with_one_triple(settings: GenerateSettings) -> GenerateSettings:
    """Without a choice of triples: the first one, which every step is held against."""
    choice = choose_speculation(settings)
    one_triple = dict(zip(TRIPLE_SETTINGS, (choice.num_steps, choice.topk, choice.num_draft_tokens, None), strict=True))
    return dataclasses.replace(settings, **one_triple, speculative_adaptive=False, speculative_adaptive_config=None)


def _sized_for(sample: Sample, settings: GenerateSettings) -> GenerateSettings:
    """Rows and cache as the sample needs them: engines share the device. Rows are used again and prompts cut, as in long runs.

    An odd number of rows: greedy and sampled requests take turns, so that a row sees both.
    """
    rows = min(settings.max_running_requests, len(sample.requests) // 3 | 1)
    rows -= rows % 2 == 0
    first_prompts = sum(len(request.prompt_ids) for request in sample.requests[:rows])
    chunk = min(settings.chunked_prefill_size, max(first_prompts // 3, 1))
    row_tokens = sample.longest + speculation_of(settings).lookahead
    tokens = rows * -(-row_tokens // settings.page_size) * settings.page_size
    tokens = min(settings.max_total_tokens or tokens, tokens)
    return settings.with_derived(max_running_requests=rows, max_total_tokens=tokens, chunked_prefill_size=chunk)


def _verify(models: FoundModels, settings: GenerateSettings, sample: Sample, has_pauses: bool, console: Console) -> VerifyResult:
    backend = choose_backend(settings)
    no_graphs = why_no_graphs(settings, backend)
    built = models.build_engine(settings, backend, () if no_graphs else wanted_graph_sizes(settings))
    assert built.draft is not None
    _introduce(built, settings, sample, console)
    for warning in (*built.draft.warnings, *idle_graph_settings(settings, backend)):
        console.warning(warning)
    drafting = built.engine
    plain = _generate(_without_draft(built), settings, sample, "without the draft", console)
    runs = {"": _generate(drafting, settings, sample, "with the draft", console)}
    release_memory()
    if has_pauses:
        runs[PAUSED] = _generate(_with_pauses(built), settings, sample, "with pauses of the draft", console)
    rules = RunRules(drafting.settings.speculation, drafting.settings.context_length, drafting.settings.is_deterministic)
    pair = Models(built.target.model, built.draft.model, drafting.attention.attend)
    started = time.perf_counter()
    findings = []
    for (paused, drafted), (mode, requests) in itertools.product(runs.items(), sample.modes.items()):
        keys = [request.key for request in requests]
        findings.append(examine(mode + paused, pair, rules, {key: plain[key] for key in keys}, {key: drafted[key] for key in keys}))
    console.note(f"every answer was computed again in {time.perf_counter() - started:.1f} s")
    for line in _report(findings, drafting.dtype):
        console.note(line)
    exit_code = ExitCode.OK if are_good(findings) else ExitCode.CHECK_FAILED
    _say_verdict(findings, console)
    return VerifyResult(exit_code, _document(built, settings, sample, findings, exit_code))


def _without_draft(built: BuiltEngine) -> Engine:
    settings = dataclasses.replace(built.engine.settings, speculation=PLAIN)
    return Engine(built.target.model, None, settings, built.engine.attention)


def _with_pauses(built: BuiltEngine) -> Engine:
    """With the draft, but for spells of plain decoding that it has to catch up with: one token, a few, more, none past its backlog."""
    settings = built.engine.settings
    plain = Alternative(PLAIN, settings.max_running_requests)
    assert built.draft is not None
    engine = Engine(built.target.model, built.draft.model, dataclasses.replace(settings, alternatives=(plain,)), built.engine.attention)
    spells = itertools.cycle([0] * 2 + [1] + [0] * 2 + [1] * 9 + [0] * 2 + [1] * 33)
    engine.policy = ScriptedPolicy(lambda num_requests: next(spells))
    return engine


def _introduce(built: BuiltEngine, settings: GenerateSettings, sample: Sample, console: Console) -> None:
    console.note(f"target {settings.target} on {settings.device}: {', '.join(built.target.summary)}")
    console.note(f"draft {settings.draft}: {', '.join(built.draft.summary if built.draft else ())}")
    triple = built.engine.settings.speculation
    mode = "; deterministic inference" if built.engine.settings.is_deterministic else ""
    console.note(f"speculation {triple.num_steps}/{triple.topk}/{triple.num_draft_tokens} (steps/topk/draft tokens){mode}")
    num_prompts = len(next(iter(sample.modes.values())))
    console.note(f"{num_prompts} prompts, at most {settings.max_new_tokens} new tokens, {' and '.join(sample.modes)}")


def _generate(engine: Engine, settings: GenerateSettings, sample: Sample, name: str, console: Console) -> dict[Any, Completion]:
    """Completions by key."""
    if engine.can_capture and engine.settings.graph_sizes:
        capture_graphs(engine, settings)
    started = time.perf_counter()
    completions = {completion.request.key: completion for completion in engine.generate(sample.requests)}
    seconds = time.perf_counter() - started
    tokens = sum(len(completion.output_ids) for completion in completions.values())
    hit_rate = engine.summary()["graph_hit_rate"]
    graphs = f", {hit_rate:.0%} of the stages by graph" if hit_rate else ""
    console.note(f"{name}: {len(completions)} answers, {tokens} tokens in {seconds:.1f} s{graphs}")
    return completions


def _report(findings: list[Findings], dtype: torch.dtype) -> Iterator[str]:
    """What people read."""
    for item in findings:
        counts = ", ".join(f"{item.count(kind, 'text')} {word}" for kind, word in (("tie", "tie"), ("numeric", "numeric"), ("bug", "bug")))
        yield f"{item.name}: {item.num_equal} of {item.num_texts} texts equal ({counts}); {item.num_tokens} tokens"
        others = [f"{item.count(kind, 'choice')} {kind}" for kind in ("tie", "numeric", "bug") if item.count(kind, "choice")]
        yield f"  tokens against the target's own choice: {', '.join(others) or 'all equal'}"
        yield from _acceptance_lines(item)
        yield from _difference_lines(item)
    if not any(item.found_by_depth[0] or item.expected_by_depth[0] for item in findings):
        yield "no draft was accepted anywhere: a draft that is fed wrongly could not be told from a bad one here"
    if dtype != torch.float32 and any(item.num_equal < item.num_texts for item in findings):
        yield f"{str(dtype).removeprefix('torch.')}: texts are the same up to near-ties, which are counted above; they are not equal"


def _acceptance_lines(item: Findings) -> Iterator[str]:
    if not item.num_steps:
        return
    others = [f"{item.count(kind, 'acceptance')} {kind}" for kind in ("tie", "numeric", "bug") if item.count(kind, "acceptance")]
    yield (
        f"  accept length {1 + item.num_accepted / item.num_steps:.3f} over {item.num_steps} steps; "
        f"steps that accept other drafts than expected: {', '.join(others) or 'none'}"
    )
    yield "  depth     " + "".join(f"{depth:8}" for depth in range(1, len(item.found_by_depth) + 1))
    for name, counts in (("accepted", item.found_by_depth), ("expected", item.expected_by_depth)):
        yield f"  {name:10}" + "".join(f"{count / item.num_steps:8.1%}" for count in counts)


def _difference_lines(item: Findings) -> Iterator[str]:
    ranked = sorted(item.differences, key=lambda difference: difference.kind != "bug")  # what matters first
    for difference in ranked[:MAX_SHOWN_DIFFERENCES]:
        unit = "step" if difference.check == "acceptance" else "output token"
        place = "" if difference.check == "balance" else f", {unit} {difference.place}"
        gap = "" if difference.gap is None else f"; gap {difference.gap:.2e}, limit {difference.limit:.2e}"
        yield f"  {difference.kind}: {difference.key}{place}: {difference.sentence}{gap}"
    if len(ranked) > MAX_SHOWN_DIFFERENCES:
        yield f"  and {len(ranked) - MAX_SHOWN_DIFFERENCES} more: --json has all of them"
    for error in item.errors:
        yield f"  not verified: {error}"


def _say_verdict(findings: list[Findings], console: Console) -> None:
    bugs, errors = sum(item.count("bug") for item in findings), sum(len(item.errors) for item in findings)
    if bugs or errors:
        what = f"{bugs} differences that numbers do not excuse" if bugs else f"{errors} answers that could not be verified"
        console.error(f"verify found {what}", "please report this with the lines above")
    else:
        excused = sum(len(item.differences) for item in findings)
        console.note("verified" + (f"; {excused} differences are excused as ties or numeric" if excused else ": no difference at all"))


def _document(
    built: BuiltEngine, settings: GenerateSettings, sample: Sample, findings: list[Findings], exit_code: ExitCode
) -> dict[str, Any]:
    engine = built.engine
    triple = engine.settings.speculation
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": int(exit_code),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "target": settings.target,
        "draft": settings.draft,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "attention_backend": engine.attention.name,
        "is_deterministic": engine.settings.is_deterministic,
        "speculation": {"num_steps": triple.num_steps, "topk": triple.topk, "num_draft_tokens": triple.num_draft_tokens},
        "num_prompts": len(next(iter(sample.modes.values()))),
        "max_new_tokens": settings.max_new_tokens,
        "graph_hit_rate": engine.summary()["graph_hit_rate"],
        "modes": [item.to_json() for item in findings],
    }
