"""Models loaded once, and for every triple, or plan of several, an engine large enough for all its batch sizes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eaglecli.commands._bench_settings import for_triple
from eaglecli.commands._graphs import capture_graphs, choose_backend, describe_graphs, wanted_graph_sizes, why_no_graphs
from eaglecli.commands._open_engine import MAX_STOP_IDS, FoundModels, cache_bytes, choose_kernels, find_models, has_draft, run_dtype
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import GenerateSettings
from eaglecli.engine.cache_size import cache_bytes_per_token
from eaglecli.engine.device_memory import release_memory
from eaglecli.engine.device_speed import DeviceSpeed, measure_device
from eaglecli.engine.engine import Engine
from eaglecli.engine.floor import IterationWork, iteration_work
from eaglecli.engine.logit_adjustments import BYTES_PER_ENTRY
from eaglecli.engine.request import Request
from eaglecli.engine.settings import EngineSettings, SpeculationSettings
from eaglecli.errors import ExitCode, UserError
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
    adjusts_logits = any(request.sampling.adjusts_logits for request in requests)
    table_bytes = (max(batch_sizes) + 1) * models.target.config.vocab_size * BYTES_PER_ENTRY if adjusts_logits else 0
    logprobs = [request.sampling.logprobs for request in requests if request.sampling.logprobs is not None]
    engine_settings = EngineSettings(
        context_length=models.context_length,
        max_total_tokens=settings.max_total_tokens or _cache_tokens(models, draft, settings, plan, longest, table_bytes),
        max_running_requests=max(batch_sizes),
        page_size=settings.page_size,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_stop_ids=MAX_STOP_IDS,
        speculation=plan.first,
        alternatives=plan.alternatives,
        graph_sizes=graph_sizes,
        pads_to_graph_sizes=not settings.disable_cuda_graph_padding,
        adjusts_logits=adjusts_logits,
        is_deterministic=settings.enable_deterministic_inference,
        max_logprobs=max(logprobs, default=None),
        simulated_accept_length=simulated_accept_length if plan.deepest.num_steps else None,
    )
    engine = Engine(models.target.model, draft.model if draft else None, engine_settings, backend)
    graphs = "no graphs"
    if engine.can_capture and graph_sizes:
        capture_started = time.perf_counter()
        reports = capture_graphs(engine, settings)
        graphs = describe_graphs(reports, time.perf_counter() - capture_started)
    synchronize(models.device)
    return BenchEngine(engine, time.perf_counter() - started, graphs)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cache_tokens(
    models: BenchModels,
    draft: LoadedDraft | None,
    settings: GenerateSettings,
    plan: SpeculationPlan,
    longest: int,
    table_bytes: int,
) -> int:
    """Slots for a full batch of the longest request, beside tables that take `table_bytes`. Raises UserError when not even one has room."""
    page = settings.page_size
    row = -(-(longest + plan.lookahead) // page) * page
    bytes_per_token = cache_bytes_per_token(models.dtype, models.target.config, draft.model if draft else None)
    affordable = (cache_bytes(settings) - table_bytes) // bytes_per_token
    if affordable < row + page:
        raise UserError("no memory is left for the KV cache", "use shorter lengths or a larger --mem-fraction-static", ExitCode.MEMORY)
    return min(settings.max_running_requests * row + page, affordable)
