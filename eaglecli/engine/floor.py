"""The least time that one iteration can take: bytes that must be read and products that must be made, over measured rates.

    verify        max((W_T + B L kappa_T) / BW, 2 P_T B N / FLOPS)
    draft step    max((W_D + B L kappa_D) / BW, 2 P_D B K / FLOPS)                     num_steps - 1 of them
    extend        max((W_D + W_fc + B L kappa_D) / BW, products of what was emitted / FLOPS)

W are weight bytes of a pass (all matrices and the head; the embedding is looked up, not read), P their number of values, kappa the cache
bytes of a token, L the mean context, B the batch. An EAGLE-1/2 draft's fc runs in every step, an EAGLE-3 draft's once an iteration.
Source: project file perf-anchors.md 4.1, after the EAGLE loop of SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eaglecli.engine.cache_size import cache_bytes_per_token
from eaglecli.engine.device_speed import DeviceSpeed
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.target import TargetModel

_EMBEDDING, _HEAD, _FC = "model.embed_tokens.weight", "lm_head.weight", "fc.weight"


@dataclass(frozen=True)
class PassWork:
    """What one forward pass reads: values of its layers, its head and its fc (0: none in this pass), cache bytes of a token."""

    num_layer_values: int
    num_head_values: int
    num_fc_values: int
    bytes_per_value: int
    cache_bytes_per_token: int

    @property
    def weight_bytes(self) -> int:
        """All weights of the pass, each read once."""
        return (self.num_layer_values + self.num_head_values + self.num_fc_values) * self.bytes_per_value

    def seconds(self, speed: DeviceSpeed, num_rows: int, context: float, num_tokens: float, num_head_rows: float) -> float:
        """At best, for `num_tokens` tokens of `num_rows` rows with `context` tokens each in the cache."""
        num_bytes = self.weight_bytes + num_rows * context * self.cache_bytes_per_token
        products = (self.num_layer_values + self.num_fc_values) * num_tokens + self.num_head_values * num_head_rows
        return max(num_bytes / speed.weight_bytes_per_s, 2 * products / speed.flops)


@dataclass(frozen=True)
class IterationWork:
    """The passes of one iteration. `draft` is None for plain decoding; its fc is in `extend` alone when it runs once an iteration."""

    speculation: SpeculationSettings
    target: PassWork
    draft: PassWork | None
    extend: PassWork | None

    def floor_s(self, speed: DeviceSpeed, num_rows: int, context: float, accept_length: float) -> float:
        """Seconds of an iteration at best."""
        triple = self.speculation
        num_nodes = num_rows * triple.num_draft_tokens
        seconds = self.target.seconds(speed, num_rows, context, num_nodes, num_nodes)
        if self.draft is None or self.extend is None:
            return seconds
        num_beams = num_rows * triple.topk
        seconds += (triple.num_steps - 1) * self.draft.seconds(speed, num_rows, context, num_beams, num_beams)
        return seconds + self.extend.seconds(speed, num_rows, context, num_rows * accept_length, num_rows)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read in an iteration."""
        draft = 0 if self.draft is None else (self.speculation.num_steps - 1) * self.draft.weight_bytes
        return self.target.weight_bytes + draft + (0 if self.extend is None else self.extend.weight_bytes)


def iteration_work(target: TargetModel, draft: DraftModel | None, speculation: SpeculationSettings) -> IterationWork:
    """What an iteration of `speculation` reads; the draft is left out when it is plain decoding."""
    views = target.checkpoint_views()
    head = views.get(_HEAD, target.embed_weight).numel()
    layers = _num_values(views, without=(_EMBEDDING, _HEAD))
    size = target.dtype.itemsize
    target_pass = PassWork(layers, head, 0, size, cache_bytes_per_token(target.dtype, target.config))
    if draft is None or not speculation.num_steps:
        return IterationWork(speculation, target_pass, None, None)
    draft_views = draft.checkpoint_views()
    fc = draft_views[_FC].numel() if _FC in draft_views else 0
    runs_every_step = draft.config.algorithm == "EAGLE"
    draft_head = draft.vocab_size * draft.config.layer.hidden_size
    cache = cache_bytes_per_token(target.dtype, draft)
    draft_layers = _num_values(draft_views, without=(_FC,))
    step = PassWork(draft_layers, draft_head, fc if runs_every_step else 0, size, cache)
    return IterationWork(speculation, target_pass, step, PassWork(draft_layers, draft_head, fc, size, cache))


def _num_values(views: Mapping[str, torch.Tensor], without: tuple[str, ...]) -> int:
    return sum(view.numel() for name, view in views.items() if name not in without)
