"""The engine as the trainer uses it: plain decoding of many rows at a time for answers, a chain of drafts for measuring.

For short texts of a small model a prefill costs more than many steps, so requests are admitted by the group: rows that come
free stay empty until there is a group of them.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch

from eaglecli.engine.cache_size import cache_bytes_per_token
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.target import TargetModel

_PAGE_SIZE = 16
_GROUPS = 8  # a group is this part of all rows
_CACHE_SHARE = 0.6  # of the GPU memory that is free
_CACHE_ROWS_ON_CPU = 8  # rows of full length that the cache is sized for without a GPU
_MAX_STOP_IDS = 16


class GroupingEngine:
    """An engine whose `generate` admits requests by the group; otherwise that of `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_rows = engine.settings.max_running_requests

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish; a request that can never run comes back with finish reason "error"."""
        engine, source, num_running, is_exhausted = self._engine, iter(requests), 0, False
        group_size = max(1, self._num_rows // _GROUPS)
        while True:
            if not is_exhausted and (num_running == 0 or self._num_rows - num_running >= group_size):
                wanted = self._num_rows - num_running
                group = list(islice(source, wanted))
                is_exhausted = len(group) < wanted
                for request in group:
                    reason = engine.refusal(request)
                    if reason is None:
                        engine.add(request)
                        num_running += 1
                    else:
                        yield Completion(request, np.zeros(0, np.int32), "error", error=reason)
            if engine.is_idle and is_exhausted:
                return
            for completion in engine.step():
                num_running -= 1
                yield completion


def open_answer_engine(target: TargetModel, context_length: int, max_running_requests: int) -> GroupingEngine:
    """Plain decoding, through graphs where there is a GPU."""
    is_cuda = target.embed_weight.is_cuda
    sizes = tuple(size for size in (8, 16, 32, 64, 128, 192, 256, 384, 512, 768) if size < max_running_requests)
    settings = EngineSettings(
        context_length=context_length,
        max_total_tokens=_cache_tokens(target, context_length, max_running_requests),
        max_running_requests=max_running_requests,
        page_size=_PAGE_SIZE,
        chunked_prefill_size=8192 if is_cuda else 512,
        max_stop_ids=_MAX_STOP_IDS,
        speculation=PLAIN,
        graph_sizes=(*sizes, max_running_requests) if is_cuda else (),
    )
    engine = Engine(target, None, settings)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    return GroupingEngine(engine)


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
