"""The modes of an engine: one iteration for each way to speculate, over the same rows, caches, pages and dummy row.

A mode has buffers and graphs of its own, so that changing from one to another costs nothing on the device; only the features of an
iteration, which nobody reads after it, lie in one place for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eaglecli.engine.backlog import Backlog
from eaglecli.engine.draft import EagleDrafter, PausedDrafter, RootOnlyDrafter
from eaglecli.engine.graph_capture import CapturePlan
from eaglecli.engine.graph_runner import GraphRunner, StaticTensors
from eaglecli.engine.graph_sizes import graph_lengths, reachable_sizes
from eaglecli.engine.iteration import Drafter, Iteration, IterationBuffers, allocate_buffers, named_tensors
from eaglecli.engine.row_state import RowState, pauses
from eaglecli.engine.settings import EngineSettings, SpeculationSettings
from eaglecli.engine.speculation_policy import SpeculationPolicy
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.target import TargetModel


@dataclass(eq=False)
class Mode:
    """One way to speculate, ready to run, and what it has done."""

    speculation: SpeculationSettings
    iteration: Iteration
    static: StaticTensors  # what its graphs rely on
    runners: list[GraphRunner]
    drafter: Drafter
    max_requests: int
    num_iterations: int = 0
    num_tokens: int = 0
    num_row_steps: int = 0
    num_accepted_drafts: int = 0

    @property
    def leaves_draft_behind(self) -> bool:
        """Its tokens are kept for the draft, which does not see them."""
        return isinstance(self.drafter, PausedDrafter)


@dataclass(frozen=True, eq=False)
class ModeParts:
    """What all modes share."""

    target: TargetModel
    kv_cache: torch.Tensor
    draft: DraftModel | None
    draft_cache: torch.Tensor | None
    state: RowState
    settings: EngineSettings
    feature_size: int
    logprob_width: int = 0

    @property
    def max_requests(self) -> int:
        """Requests that buffers are made for."""
        return max(self.settings.graph_sizes + (self.settings.max_running_requests,))


def allocate_backlog(parts: ModeParts) -> Backlog | None:
    """Rings for what the draft misses, where it may be left out for a while."""
    if parts.draft is None or not pauses(parts.settings):
        return None
    return Backlog(parts.state, parts.settings.max_backlog_tokens, parts.feature_size, parts.target.dtype)


def build_modes(parts: ModeParts, backlog: Backlog | None, shared: dict[str, torch.Tensor]) -> list[Mode]:
    """All modes, in the order of the settings. `shared`: tensors by name that all their graphs rely on."""
    settings = parts.settings
    limits = (parts.max_requests, *(alternative.max_requests for alternative in settings.alternatives))
    features = torch.zeros(
        parts.max_requests * max(speculation.num_draft_tokens for speculation in settings.all_speculation),
        parts.feature_size,
        dtype=parts.target.dtype,
        device=parts.state.lengths.device,
    )
    modes = []
    for speculation, limit in zip(settings.all_speculation, limits, strict=True):
        buffers = _buffers(parts, speculation, features)
        drafter = _drafter(parts, speculation, backlog)
        static = StaticTensors(shared | named_tensors("buffers", buffers))
        label = f" {speculation}" if settings.alternatives else ""
        simulated = settings.simulated_accept_length
        simulated = None if simulated is None else min(simulated, speculation.num_steps + 1.0)
        iteration = Iteration(parts.target, parts.kv_cache, drafter, parts.state, buffers, speculation, simulated, label)
        modes.append(Mode(speculation, iteration, static, [GraphRunner(stage, static) for stage in iteration.stages], drafter, limit))
    return modes


def eagle_drafter(modes: Sequence[Mode]) -> EagleDrafter | None:
    """One that can run prompts and backlogs through the draft, which is the same whatever the mode; None without a draft."""
    return next((mode.drafter for mode in modes if isinstance(mode.drafter, EagleDrafter)), None)


def capture_plans(modes: Sequence[Mode], settings: EngineSettings) -> list[CapturePlan]:
    """Every mode at the graph sizes that its batches are padded to, for short rows and for any."""
    lengths = graph_lengths(settings.context_length)
    return [
        CapturePlan(mode.iteration.load_padding, mode.runners, reachable_sizes(settings.graph_sizes, mode.max_requests), lengths)
        for mode in modes
    ]


def accept_length(num_accepted_drafts: int, num_row_steps: int) -> float | None:
    """Tokens of a row-step; None where there was none."""
    return 1 + num_accepted_drafts / num_row_steps if num_row_steps else None


def describe_modes(modes: Sequence[Mode], policy: SpeculationPolicy) -> dict[str, Any]:
    """What each mode had to do, and what the policy says."""
    num_iterations, num_tokens = sum(mode.num_iterations for mode in modes), sum(mode.num_tokens for mode in modes)
    return {
        **policy.describe(),
        "modes": {
            str(mode.speculation): {
                "iterations": mode.num_iterations,
                "share_of_iterations": mode.num_iterations / max(num_iterations, 1),
                "tokens": mode.num_tokens,
                "share_of_tokens": mode.num_tokens / max(num_tokens, 1),
                "row_steps": mode.num_row_steps,
                "accepted_drafts": mode.num_accepted_drafts,
                "accept_length": accept_length(mode.num_accepted_drafts, mode.num_row_steps),
            }
            for mode in modes
        },
    }


def _buffers(parts: ModeParts, speculation: SpeculationSettings, features: torch.Tensor) -> IterationBuffers:
    num_nodes = speculation.num_draft_tokens
    shared = features[: parts.max_requests * num_nodes].view(parts.max_requests, num_nodes, parts.feature_size)
    buffers = allocate_buffers(
        parts.max_requests,
        speculation,
        0,
        parts.state.dummy_row,
        parts.target.dtype,
        features.device,
        parts.settings.run_width,
        parts.logprob_width,
    )
    return replace(buffers, run=replace(buffers.run, features=shared))


def _drafter(parts: ModeParts, speculation: SpeculationSettings, backlog: Backlog | None) -> Drafter:
    if parts.draft is None or parts.draft_cache is None:
        return RootOnlyDrafter(parts.state)
    if speculation.num_steps == 0:
        return PausedDrafter(parts.draft, backlog, parts.state) if backlog is not None else RootOnlyDrafter(parts.state)
    return EagleDrafter(parts.draft, parts.draft_cache, parts.state, speculation, parts.settings.same_noise_drafting)
