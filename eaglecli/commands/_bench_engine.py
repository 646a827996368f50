"""Models loaded once, and for every triple, or plan of several, an engine large enough for all its batch sizes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eaglecli.commands._bench_settings import for_triple
from eaglecli.commands._engine_settings import engine_settings
from eaglecli.commands._graphs import capture_graphs, choose_backend, describe_graphs, wanted_graph_sizes, why_no_graphs
from eaglecli.commands._open_engine import FoundModels, choose_kernels, find_models, has_draft, run_dtype
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import GenerateSettings
from eaglecli.engine.device_memory import release_memory
from eaglecli.engine.device_speed import DeviceSpeed, measure_device
from eaglecli.engine.engine import Engine
from eaglecli.engine.floor import IterationWork, iteration_work
from eaglecli.engine.request import Request
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.io.sampling_options import SamplingNeeds
from eaglecli.models.draft_fit import DraftFit
from eaglecli.models.draft_loader import LoadedDraft, build_draft
from eaglecli.models.dummy_draft import DUMMY_DRAFT, build_dummy_draft, dummy_draft_fit
from eaglecli.models.loader import LoadedTarget, load_target


@dataclass(frozen=True, eq=False)
class BenchModels:
    """Both models on the device, and what the device can do."""

    target: LoadedTarget
    draft: LoadedDraft | None
    device: torch.device
    dtype: torch.dtype
    context_length: int
    speed: DeviceSpeed
    load_s: float

    @property
    def draft_limit(self) -> int | None:
        """Positions that the draft was made for."""
        return None if self.draft is None else self.draft.fit.config.max_position_embeddings

    def work(self, speculation: SpeculationSettings) -> IterationWork:
        """What an iteration reads and computes."""
        return iteration_work(self.target.model, self.draft.model if self.draft else None, speculation)


@dataclass(frozen=True, eq=False)
class BenchEngine:
    """An engine with its graphs. `capture_s` holds first runs and compilation too."""

    engine: Engine
    capture_s: float
    graphs: str  # a sentence for people


def find_bench_models(settings: GenerateSettings) -> tuple[FoundModels, DraftFit | None]:
    """The pair, checked from headers; `--draft dummy` fits any target. Raises ModelError and UserError."""
    if settings.draft != DUMMY_DRAFT:
        models = find_models(settings)
        return models, models.draft_fit
    models = find_models(settings.with_derived(draft="none", speculative_algorithm=None))
    return models, dummy_draft_fit(models.target_config) if has_draft(settings) else None


def load_bench_models(models: FoundModels, fit: DraftFit | None, settings: GenerateSettings) -> BenchModels:
    """Read or make all weights. Raises ModelError."""
    started = time.perf_counter()
    device, dtype, context = torch.device(settings.device), run_dtype(settings), models.context_length(settings)
    target = load_target(models.target_path, dtype, device, context, settings.load_format)  # type: ignore[arg-type]
    build = build_dummy_draft if settings.draft == DUMMY_DRAFT else build_draft
    draft = None if fit is None else build(fit, target, dtype, device, context)
    choose_kernels(settings, target, draft)
    synchronize(device)
    load_s = time.perf_counter() - started
    speed = measure_device(device, dtype)
    release_memory()
    return BenchModels(target, draft, device, dtype, context, speed, load_s)


def open_bench_engine(
    models: BenchModels,
    settings: GenerateSettings,
    plan: SpeculationPlan,
    batch_sizes: Sequence[int],
    requests: Sequence[Request],
    simulated_accept_length: float | None = None,
) -> BenchEngine:
    """An engine for up to the largest batch of the longest of `requests`, able to do what they ask for, captured. Raises UserError."""
    started = time.perf_counter()
    settings = for_triple(settings, plan.first, max(batch_sizes))
    backend = choose_backend(settings)
    graph_sizes = () if why_no_graphs(settings, backend) else wanted_graph_sizes(settings)
    draft = models.draft if plan.deepest.num_steps else None
    longest = max(len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests)
    simulated = simulated_accept_length if plan.deepest.num_steps else None
    own_settings = engine_settings(settings, models.target, draft, plan, _needs(requests), graph_sizes, longest, simulated)
    engine = Engine(models.target.model, draft.model if draft else None, own_settings, backend)
    graphs = "no graphs"
    if engine.can_capture and graph_sizes:
        capture_started = time.perf_counter()
        reports = capture_graphs(engine, settings)
        graphs = describe_graphs(reports, time.perf_counter() - capture_started, engine.lacks_prefill_graphs)
    synchronize(models.device)
    return BenchEngine(engine, time.perf_counter() - started, graphs)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _needs(requests: Sequence[Request]) -> SamplingNeeds:
    logprobs = [request.sampling.logprobs for request in requests if request.sampling.logprobs is not None]
    return SamplingNeeds(any(request.sampling.adjusts_logits for request in requests), max(logprobs, default=None))
