"""The three stages of an iteration as functions of a size, over buffers that never move: what a graph can capture.

A stage works on the first `size` requests of the buffers. Real rows stand at the front; the rest name the dummy row.
Everything that passes from one stage to the next, or to the host, lives in `IterationBuffers`, which are allocated
once, for the largest batch, and shared by all sizes.

    rows -> draft -> live_rows, tree -> verify (accept, commit) -> run -> extend
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from eaglecli.engine.draft import EagleDrafter, PausedDrafter, RootOnlyDrafter
from eaglecli.engine.row_state import Batch, HostHints, RowState
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.engine.staging import to_device
from eaglecli.engine.verify import CommittedRun, accept_and_commit, verify_tree
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.commit_run import RunOutputs
from eaglecli.kernels.live_rows import live_rows
from eaglecli.kernels.simulate_accept import simulate_accept
from eaglecli.models.target import TargetModel

Drafter = EagleDrafter | RootOnlyDrafter | PausedDrafter
Record = TypeVar("Record", DraftTree, CommittedRun, RunOutputs)


@dataclass(frozen=True, eq=False)
class IterationBuffers:
    """Static tensors for up to Bmax requests."""

    rows: torch.Tensor  # int32 [Bmax] written by the host
    live_rows: torch.Tensor  # int32 [Bmax] the same, finished rows replaced by the dummy row
    tree: DraftTree
    run: CommittedRun


@dataclass(frozen=True)
class Stage:
    """One stage: its name, the tokens one request brings to it, and its function of (size, hints)."""

    name: str
    tokens_per_request: int
    run: Callable[[int, HostHints], None]

    def extent(self, size: int) -> tuple[int, int]:
        """Requests and tokens of a size."""
        return size, size * self.tokens_per_request


def allocate_buffers(
    max_requests: int,
    speculation: SpeculationSettings,
    feature_size: int,
    dummy_row: int,
    dtype: torch.dtype,
    device: torch.device,
    run_width: int | None = None,
    logprob_width: int = 0,
) -> IterationBuffers:
    """All rows the dummy row, all trees roots of token 0. Records are for runs of `run_width` tokens, None: of as many as there can be."""
    num_nodes, width = speculation.num_draft_tokens, speculation.num_steps + 1

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(max_requests, *shape, dtype=dtype, device=device)

    return IterationBuffers(
        rows=torch.full((max_requests,), dummy_row, dtype=torch.int32, device=device),
        live_rows=torch.full((max_requests,), dummy_row, dtype=torch.int32, device=device),
        tree=DraftTree(
            zeros(num_nodes, dtype=torch.int64), zeros(num_nodes), zeros(num_nodes), zeros(num_nodes, num_nodes, dtype=torch.bool)
        ),
        run=CommittedRun(
            tokens=zeros(width, dtype=torch.int64),
            path=zeros(width),
            features=zeros(num_nodes, feature_size, dtype=dtype),
            base_lengths=zeros(),
            extend_lens=zeros(),
            record=zeros((run_width or width) + 3),
            logprobs=zeros(logprob_width),
        ),
    )


class Iteration:
    """Binds models, state and buffers into the three stages."""

    def __init__(
        self,
        target: TargetModel,
        kv_cache: torch.Tensor,
        drafter: Drafter,
        state: RowState,
        buffers: IterationBuffers,
        speculation: SpeculationSettings,
        simulated_accept_length: float | None = None,
        label: str = "",
    ) -> None:
        """`label` tells the names of the stages of one iteration from those of another."""
        self.buffers = buffers
        self.vocab_size = target.config.vocab_size
        self._target = target
        self._kv_cache = kv_cache
        self._drafter = drafter
        self._state = state
        self._speculation = speculation
        self._simulated_accept_length = simulated_accept_length if speculation.num_steps else None
        self._loaded = np.zeros(0, np.int32)  # what stands at the front of buffers.rows
        draft = Stage(f"draft{label}", speculation.topk, self._draft)
        verify = Stage(f"verify{label}", speculation.num_draft_tokens, self._verify)
        extend = Stage(f"extend{label}", speculation.num_steps + 1, self._extend)
        self.stages = (draft, verify, extend) if drafter.has_extend else (draft, verify)

    def load_rows(self, rows: np.ndarray, size: int) -> None:
        """Name the rows of the next iteration, int64 [n], n <= size; what is left of `size` names the dummy row.

        All inputs of the stages follow from these rows, so with them no stale value of an earlier, larger batch can be read.
        Nothing is copied while rows and size stay the same.
        """
        padded = np.full(size, self._state.dummy_row, np.int32)
        padded[: len(rows)] = rows
        if not np.array_equal(padded, self._loaded):
            self.buffers.rows[:size].copy_(to_device(padded, self.buffers.rows.device), non_blocking=True)
            self._loaded = padded

    def load_padding(self, size: int) -> None:
        """Let all of `size` rows name the dummy row."""
        self.load_rows(np.zeros(0, np.int64), size)

    def _draft(self, size: int, hints: HostHints) -> None:
        buffers = self.buffers
        live_rows(buffers.rows[:size], self._state.finished, buffers.live_rows[:size])
        self._drafter.grow_tree(self._batch(size, hints), first_rows(buffers.tree, size))

    def _verify(self, size: int, hints: HostHints) -> None:
        batch, tree, run = self._batch(size, hints), first_rows(self.buffers.tree, size), first_rows(self.buffers.run, size)
        verified = verify_tree(self._target, self._kv_cache, self._state, batch, tree, self._drafter.tap_boundaries, run)
        if self._simulated_accept_length is not None:
            accept_length, num_steps = self._simulated_accept_length, self._speculation.num_steps
            simulate_accept(
                batch.rows, run.base_lengths, self._state.seed, tree, accept_length, num_steps, verified.chosen, verified.allowed
            )
        accept_and_commit(self._state, batch, tree, verified, run)

    def _extend(self, size: int, hints: HostHints) -> None:
        self._drafter.extend(self._batch(size, hints), first_rows(self.buffers.run, size))

    def _batch(self, size: int, hints: HostHints) -> Batch:
        return Batch(self.buffers.live_rows[:size], hints)


def first_rows(buffers: Record, size: int) -> Record:
    """The part of the first `size` requests."""
    return type(buffers)(**{field.name: getattr(buffers, field.name)[:size] for field in fields(buffers)})


def named_tensors(prefix: str, record: Any) -> dict[str, torch.Tensor]:
    """All tensors of a dataclass and of the dataclasses in it, named `prefix.field`."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(record):
        name, value = f"{prefix}.{field.name}", getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif is_dataclass(value):
            found |= named_tensors(name, value)
    return found
