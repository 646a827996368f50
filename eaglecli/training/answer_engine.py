"""The engine as the trainer uses it: plain decoding of many rows at a time for answers, a chain of drafts for measuring."""

import torch

from eaglecli.engine.cache_size import cache_bytes_per_token
from eaglecli.engine.engine import Engine
from eaglecli.engine.settings import PLAIN, EngineSettings, SchedulingSettings, SpeculationSettings
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.target import TargetModel

_PAGE_SIZE = 16
_CACHE_SHARE = 0.6  # of the GPU memory that is free
_CACHE_ROWS_ON_CPU = 8  # rows of full length that the cache is sized for without a GPU
_MAX_STOP_IDS = 16


def open_answer_engine(target: TargetModel, context_length: int, max_running_requests: int) -> Engine:
    """Plain decoding in the order of arrival, through graphs where there is a GPU.

    No more than the next group waits: what was taken is finished, even when the time or the budget of tokens is over.
    """
    is_cuda = target.embed_weight.is_cuda
    sizes = tuple(size for size in (8, 16, 32, 64, 128, 192, 256, 384, 512, 768) if size < max_running_requests)
    window = SchedulingSettings().group_size(max_running_requests)
    settings = EngineSettings(
        context_length=context_length,
        max_total_tokens=_cache_tokens(target, context_length, max_running_requests),
        max_running_requests=max_running_requests,
        page_size=_PAGE_SIZE,
        chunked_prefill_size=8192 if is_cuda else 512,
        max_stop_ids=_MAX_STOP_IDS,
        speculation=PLAIN,
        scheduling=SchedulingSettings(window=window, longest_first=False),
        graph_sizes=(*sizes, max_running_requests) if is_cuda else (),
    )
    engine = Engine(target, None, settings)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    return engine


def open_chain_engine(target: TargetModel, draft: DraftModel, context_length: int, num_requests: int, num_steps: int) -> Engine:
    """An eager engine that drafts a chain of `num_steps` for `num_requests` rows."""
    speculation = SpeculationSettings(num_steps, 1, num_steps + 1)
    row_tokens = context_length + speculation.lookahead + _PAGE_SIZE
    settings = EngineSettings(
        context_length=context_length,
        max_total_tokens=num_requests * -(-row_tokens // _PAGE_SIZE) * _PAGE_SIZE,
        max_running_requests=num_requests,
        page_size=_PAGE_SIZE,
        chunked_prefill_size=8192,
        max_stop_ids=_MAX_STOP_IDS,
        speculation=speculation,
    )
    return Engine(target, draft, settings)


def _cache_tokens(target: TargetModel, context_length: int, max_running_requests: int) -> int:
    """KV slots for all rows at full length, or as many as there is memory for."""
    row_tokens = -(-(context_length + 1 + _PAGE_SIZE) // _PAGE_SIZE) * _PAGE_SIZE
    if not target.embed_weight.is_cuda:
        return min(max_running_requests, _CACHE_ROWS_ON_CPU) * row_tokens
    affordable = int(_CACHE_SHARE * torch.cuda.mem_get_info()[0] / cache_bytes_per_token(target.dtype, target.config))
    return max(row_tokens, min(max_running_requests * row_tokens, affordable))
