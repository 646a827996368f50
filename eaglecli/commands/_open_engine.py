"""Shared by the commands that run models: from settings to an engine, the cheap checks first.

`find_models` reads configs and headers only, so a pair that does not fit is refused in seconds; `open_engine` loads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from eaglecli.commands._engine_settings import MAX_STOP_IDS, context_length, engine_settings
from eaglecli.commands._graphs import capture_for_run, choose_backend, idle_graph_settings, wanted_graph_sizes, why_no_graphs
from eaglecli.commands._request_maker import RequestRules
from eaglecli.commands._speculation import SpeculationPlan, describe_costs, make_policy, plan_speculation
from eaglecli.config import CHOOSER_SETTINGS, COMMAND_LINE, TRIPLE_SETTINGS, GenerateSettings, choose_speculation
from eaglecli.engine.attention_backend import AttentionBackend
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from eaglecli.engine.speculation_policy import SpeculationPolicy
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.fingerprint import fingerprint_model
from eaglecli.io.sampling_options import SamplingNeeds
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer
from eaglecli.kernels.model_kernels import ROW_INVARIANT
from eaglecli.models.checkpoint import read_json
from eaglecli.models.config import TargetConfig
from eaglecli.models.draft_fit import DraftFit, check_draft_fit
from eaglecli.models.draft_loader import LoadedDraft, build_draft
from eaglecli.models.kernel_choice import use_kernels
from eaglecli.models.loader import LoadedTarget, load_target, read_target_description
from eaglecli.models.model_path import resolve_draft_path, resolve_model_path

NO_NEEDS = SamplingNeeds()


class RunningEngine(Protocol):
    """What a command asks of an engine."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]: ...

    def refusal(self, request: Request) -> str | None: ...

    def summary(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class OpenedEngine:
    """An engine ready to run, and what its user needs to know about it."""

    engine: RunningEngine
    context_length: int
    end_token_ids: tuple[int, ...]
    speculation: SpeculationSettings
    max_stop_ids: int
    settled: Mapping[str, Any]  # settings that were left open and are now decided (dtype, sizes)
    summary: tuple[str, ...]  # sentences for people
    warnings: tuple[str, ...] = ()
    vocab_size: int | None = None  # tokens that a logit bias may name; None: it is not known
    policy: SpeculationPolicy | None = None  # who chooses how to speculate

    @property
    def rules(self) -> RequestRules:
        """What it asks of requests."""
        return RequestRules(self.context_length, self.end_token_ids, self.max_stop_ids, self.vocab_size, self.engine.refusal)


@dataclass(frozen=True, eq=False)
class BuiltEngine:
    """An engine over loaded models, nothing captured yet."""

    engine: Engine
    target: LoadedTarget
    draft: LoadedDraft | None
    plan: SpeculationPlan


class ModelSource(Protocol):
    """The models of a run before their weights are read."""

    generation_config: Mapping[str, Any]

    def fingerprints(self) -> Mapping[str, str | None]: ...

    def load_tokenizer(self) -> PromptTokenizer: ...

    def open_engine(self, settings: GenerateSettings, needs: SamplingNeeds) -> OpenedEngine: ...


ModelFinder = Callable[[GenerateSettings], ModelSource]


def find_device(requested: str) -> str:
    """ "auto" to "cuda" where there is one, else "cpu". Raises UserError for a device that is not there."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is there", "use --device cpu")
    return "cuda" if requested == "auto" and torch.cuda.is_available() else requested.replace("auto", "cpu")


def name_device(requested: str) -> str:
    """As `find_device`, for a command that will not use it: one that is asked for counts as there."""
    return requested if requested == "cuda" else find_device(requested)


def speculation_of(settings: GenerateSettings) -> SpeculationSettings:
    """The checked triple, or plain decoding when there is no draft. Raises UserError with the rule that is broken."""
    choice = choose_speculation(settings)
    checked = SpeculationSettings(choice.num_steps, choice.topk, choice.num_draft_tokens)
    return checked if has_draft(settings) else PLAIN


def plan_of(settings: GenerateSettings) -> SpeculationPlan:
    """All ways to speculate that a run may use. Raises UserError with the rule that is broken."""
    return plan_speculation(settings, has_draft(settings))


def whole_plan_of(settings: GenerateSettings) -> SpeculationPlan:
    """The plan of an engine with rows for all of its table: what makes a run the same run, however many requests run at a time."""
    sizes = map(int, settings.speculative_adaptive_config or ())
    return plan_of(replace(settings, max_running_requests=max(settings.max_running_requests, *sizes, 1)))


def has_draft(settings: GenerateSettings) -> bool:
    """Whether a draft is wanted. Raises UserError when the algorithm and the draft contradict each other."""
    named = settings.draft is not None and settings.draft != "none"
    algorithm = settings.speculative_algorithm
    if algorithm == "NONE" and named and settings.origin("draft") == settings.origin("speculative_algorithm"):
        raise UserError(f"--speculative-algorithm NONE contradicts --draft {settings.draft}", "use --draft none for plain decoding")
    if algorithm in ("EAGLE", "EAGLE3") and not named:
        raise UserError(f"--speculative-algorithm {algorithm} needs a draft", "name one with --draft")
    return named and algorithm != "NONE"


@dataclass(frozen=True, eq=False)
class FoundModels:
    """A ModelSource for real checkpoints: paths resolved, draft held against target, nothing loaded."""

    settings: GenerateSettings
    target_path: Path
    target_config: TargetConfig
    draft_fit: DraftFit | None
    generation_config: Mapping[str, Any]

    def fingerprints(self) -> Mapping[str, str | None]:
        """Hashes by role: what a run that is taken up again is compared by. None where there is no model of that role."""
        tokenizer = self.settings.tokenizer_path
        return {
            "target": fingerprint_model(self.target_path),
            "draft": None if self.draft_fit is None else fingerprint_model(self.draft_fit.description.path),
            "tokenizer": fingerprint_model(Path(tokenizer)) if tokenizer and Path(tokenizer).exists() else tokenizer,
        }

    def load_tokenizer(self) -> PromptTokenizer:
        name = self.settings.tokenizer_path
        path = self.target_path if name is None else Path(name)
        folder = path.parent if path.suffix == ".json" else path
        return load_tokenizer(folder, self.settings.revision if name else None, self.settings.local_files_only)

    def open_engine(self, settings: GenerateSettings, needs: SamplingNeeds = NO_NEEDS) -> OpenedEngine:
        """Loads the models, captures graphs. The engine can do what `settings` and `needs`, those of the records, ask for."""
        backend = choose_backend(settings)
        no_graphs = why_no_graphs(settings, backend)
        built = self.build_engine(settings, backend, () if no_graphs else wanted_graph_sizes(settings), needs)
        engine, draft, plan = built.engine, built.draft, built.plan
        summary = _summary(settings, built)
        if engine.can_capture and engine.settings.graph_sizes:
            summary = (*summary, capture_for_run(engine, settings))
        elif no_graphs and settings.device == "cuda":
            summary = (*summary, no_graphs)
        engine.policy = make_policy(engine, plan)
        costs = describe_costs(engine.policy, plan, engine.settings.max_running_requests)
        return OpenedEngine(
            engine=engine,
            context_length=engine.settings.context_length,
            end_token_ids=built.target.config.eos_token_ids,
            speculation=plan.deepest,
            max_stop_ids=MAX_STOP_IDS,
            settled=_settled(engine, built.target.model.dtype),
            summary=(*summary, costs) if costs else summary,
            policy=engine.policy,
            warnings=(*(draft.warnings if draft else _idle_speculation(settings)), *idle_graph_settings(settings, backend)),
            vocab_size=engine.vocab_size,
        )

    def build_engine(
        self, settings: GenerateSettings, backend: AttentionBackend, graph_sizes: tuple[int, ...], needs: SamplingNeeds = NO_NEEDS
    ) -> BuiltEngine:
        """Load the models and make the engine; batches are padded to `graph_sizes`. Raises ModelError and UserError."""
        device, dtype, context, plan = torch.device(settings.device), run_dtype(settings), self.context_length(settings), plan_of(settings)
        target = load_target(self.target_path, dtype, device, context, settings.load_format)  # type: ignore[arg-type]
        draft = None if self.draft_fit is None else build_draft(self.draft_fit, target, dtype, device, context)
        choose_kernels(settings, target, draft)
        own_settings = engine_settings(settings, target, draft, plan, needs.and_of(vars(settings)), graph_sizes)
        engine = Engine(target.model, draft.model if draft else None, own_settings, backend)
        return BuiltEngine(engine, target, draft, plan)

    def context_length(self, settings: GenerateSettings) -> int:
        return context_length(settings, self.target_config)


def find_models(settings: GenerateSettings) -> FoundModels:
    """Resolves paths and checks the draft against the target from headers. Raises ModelError and UserError."""
    if settings.target is None:
        raise UserError("no target model is named", "use --target, or a --config that names one")
    plan = plan_of(settings)
    path = resolve_model_path(settings.target, settings.revision, settings.local_files_only)
    config = read_target_description(path)
    _check_logit_bias(settings, config)
    fit = _check_draft(settings, plan, path, config) if has_draft(settings) else None
    generation_file = (path.parent if path.is_file() else path) / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() and path.suffix != ".gguf" else {}
    return FoundModels(settings, path, config, fit, generation)


def _check_logit_bias(settings: GenerateSettings, config: TargetConfig) -> None:
    unknown = next((token for token, _ in settings.logit_bias if token >= config.vocab_size), None)
    if unknown is not None:
        raise UserError(f"--logit-bias names token {unknown}, the target has {config.vocab_size} tokens", "ids count from 0")


def _check_draft(settings: GenerateSettings, plan: SpeculationPlan, target_path: Path, config: TargetConfig) -> DraftFit:
    path = resolve_draft_path(str(settings.draft), settings.local_files_only)
    token_map = Path(settings.speculative_token_map) if settings.speculative_token_map else None
    fit = check_draft_fit(path, target_path, config, settings.speculative_algorithm, settings.draft_config_overrides, token_map)
    topk = plan.most_branches
    if topk > fit.num_head_rows:
        raise UserError(
            f"a tree of {topk} branches (--speculative-eagle-topk) is more than the draft's vocabulary of {fit.num_head_rows} tokens",
            f"use {fit.num_head_rows} or less",
        )
    return fit


def choose_kernels(settings: GenerateSettings, target: LoadedTarget, draft: LoadedDraft | None) -> None:
    """Give freshly loaded models the kernels that the run needs."""
    if settings.enable_deterministic_inference:
        for loaded in (target, draft) if draft else (target,):
            use_kernels(loaded.model, ROW_INVARIANT)  # type: ignore[arg-type]


def run_dtype(settings: GenerateSettings) -> torch.dtype:
    """The number format of weights and cache: `auto` depends on the device."""
    default = "float32" if settings.device == "cpu" else "bfloat16"
    return getattr(torch, default if settings.dtype == "auto" else settings.dtype)


def _settled(engine: Engine, dtype: torch.dtype) -> dict[str, Any]:
    settings, triple = engine.settings, engine.settings.speculation
    parts = (triple.num_steps, triple.topk, triple.num_draft_tokens) if triple.num_steps else (None, None, None)
    has_choice = len(settings.all_speculation) > 1
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": settings.context_length,
        "max_total_tokens": settings.max_total_tokens,
        "cuda_graph_bs": settings.graph_sizes if engine.can_capture else (),
        "attention_backend": engine.attention.name,
        **({} if has_choice else dict(zip(TRIPLE_SETTINGS[:3], parts, strict=True))),
    }


def _idle_speculation(settings: GenerateSettings) -> tuple[str, ...]:
    """A warning when the command line tunes a draft that is not there."""
    names = (*TRIPLE_SETTINGS, *CHOOSER_SETTINGS)
    given = [name for name in names if settings.origin(name) == COMMAND_LINE]
    return (f"no draft is used: --{given[0].replace('_', '-')} changes nothing",) if given else ()


def _summary(settings: GenerateSettings, built: BuiltEngine) -> tuple[str, ...]:
    device = f"cuda ({torch.cuda.get_device_name()})" if settings.device == "cuda" else "cpu"
    lines = [f"target {settings.target} on {device}: {', '.join(built.target.summary)}"]
    if built.draft is None:
        return (*lines, "no draft: plain decoding")
    choice = choose_speculation(settings)
    triple = f"steps {choice.num_steps}, topk {choice.topk}, draft tokens {choice.num_draft_tokens} ({choice.explanation})"
    triple = triple if len(built.plan.all) == 1 else str(built.plan)
    return (*lines, f"draft {settings.draft}: {', '.join(built.draft.summary)}", f"speculation: {triple}")


def out_of_memory(error: BaseException) -> UserError | None:
    """The user's sentence for an allocation that failed, or None for any other error."""
    on_the_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if on_the_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError):
        hint = "use fewer --max-running-requests, a smaller --max-total-tokens, or a smaller --context-length"
        return UserError(f"out of memory: {' '.join(str(error).split())[:200]}", hint, ExitCode.MEMORY)
    return None
