"""Shared by the commands that run models: from the settings of a run and loaded models to the settings of an engine."""

import torch

from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import GenerateSettings
from eaglecli.engine.cache_size import cache_bytes_per_token
from eaglecli.engine.device_memory import available_host_bytes
from eaglecli.engine.logit_adjustments import BYTES_PER_ENTRY
from eaglecli.engine.settings import EngineSettings
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.sampling_options import SamplingNeeds
from eaglecli.models.config import TargetConfig
from eaglecli.models.draft_loader import LoadedDraft
from eaglecli.models.loader import LoadedTarget

CPU_CACHE_SHARE = 0.25  # of the memory that is free: the rest is for weights, the tokenizer and everyone else
MAX_STOP_IDS = 16


def engine_settings(
    settings: GenerateSettings,
    target: LoadedTarget,
    draft: LoadedDraft | None,
    plan: SpeculationPlan,
    needs: SamplingNeeds,
    graph_sizes: tuple[int, ...],
    longest: int | None = None,
    simulated_accept_length: float | None = None,
) -> EngineSettings:
    """An engine for requests of `longest` tokens, None: of any number, that ask for no more than `needs`.

    Unless the settings say how large its cache is, it takes what it can use and the device has left. Raises UserError when that is nothing.
    """
    tokens = settings.max_total_tokens or _cache_tokens(settings, target, draft, plan, needs, longest)
    return EngineSettings(
        context_length=context_length(settings, target.config),
        max_total_tokens=tokens,
        max_running_requests=settings.max_running_requests,
        page_size=settings.page_size,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_stop_ids=MAX_STOP_IDS,
        speculation=plan.first,
        alternatives=plan.alternatives,
        graph_sizes=graph_sizes,
        pads_to_graph_sizes=not settings.disable_cuda_graph_padding,
        adjusts_logits=needs.adjusts_logits,
        max_logprobs=None if needs.max_logprobs is None else min(needs.max_logprobs, target.config.vocab_size),
        is_deterministic=settings.enable_deterministic_inference,
        simulated_accept_length=simulated_accept_length,
    )


def context_length(settings: GenerateSettings, target: TargetConfig) -> int:
    """The context that was asked for, else the target's. Raises UserError when it is more than the target's."""
    limit = target.max_position_embeddings
    if settings.context_length and settings.context_length > limit:
        raise UserError(f"--context-length {settings.context_length} is more than the target's {limit}", f"use {limit} or less")
    return settings.context_length or limit


def wanted_cache_tokens(settings: GenerateSettings, plan: SpeculationPlan, longest: int) -> int:
    """KV slots for every row at `longest` tokens."""
    return settings.max_running_requests * _row_tokens(settings, plan, longest) + settings.page_size


def _row_tokens(settings: GenerateSettings, plan: SpeculationPlan, longest: int) -> int:
    return -(-(longest + plan.lookahead) // settings.page_size) * settings.page_size


def _cache_tokens(
    settings: GenerateSettings,
    target: LoadedTarget,
    draft: LoadedDraft | None,
    plan: SpeculationPlan,
    needs: SamplingNeeds,
    longest: int | None,
) -> int:
    """What is wanted, or as much as there is memory for beside the tables; at least for one request of `longest`."""
    num_rows, page = settings.max_running_requests, settings.page_size
    table_bytes = (num_rows + 1) * target.config.vocab_size * BYTES_PER_ENTRY if needs.adjusts_logits else 0
    bytes_per_token = cache_bytes_per_token(target.model.dtype, target.config, draft.model if draft else None)
    affordable = (_free_bytes(settings) - table_bytes) // bytes_per_token
    if affordable < (page if longest is None else _row_tokens(settings, plan, longest) + page):
        larger = " or a larger --mem-fraction-static" if settings.device == "cuda" else ""
        hint = f"use a smaller model or shorter lengths{larger}"
        raise UserError("no memory is left for the KV cache", hint, ExitCode.MEMORY)
    return min(affordable, wanted_cache_tokens(settings, plan, longest or context_length(settings, target.config)))


def _free_bytes(settings: GenerateSettings) -> int:
    """Bytes that the cache may take on the device now that the weights are there."""
    if settings.device == "cpu":
        return int(CPU_CACHE_SHARE * available_host_bytes())
    free, total = torch.cuda.mem_get_info()
    return int(free - (1 - settings.mem_fraction_static) * total)
