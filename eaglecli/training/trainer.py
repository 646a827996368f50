"""The optimizer's loop: batches of packed sequences, the unrolled draft, the loss, AdamW. It knows nothing of files."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from eaglecli.training.documents import Document
from eaglecli.training.draft_loss import DraftLoss, Labels, draft_loss
from eaglecli.training.draft_module import DraftModule
from eaglecli.training.packed_attention import Documents
from eaglecli.training.packing import PackedBatch, make_batch, pack
from eaglecli.training.schedule import TrainProgress, make_schedule
from eaglecli.training.settings import TrainSettings
from eaglecli.training.target_states import FrozenTarget

_BETAS = (0.9, 0.95)
_WINDOW_STEPS = 10  # the device is waited for once in so many steps


@dataclass(frozen=True)
class TrainWindow:
    """Means over the last steps. `accuracy`: by unrolled step, how often the draft's first choice is the target's."""

    step: int
    num_tokens: int
    seconds: float  # of training so far
    loss: float
    accuracy: tuple[float, ...]
    learning_rate: float
    gradient_norm: float
    tokens_per_s: float


@dataclass(frozen=True)
class StepReport:
    """After a step. `window` comes once in a while, and after the last step."""

    step: int
    window: TrainWindow | None


def run_draft(
    module: DraftModule,
    target: FrozenTarget,
    batch: PackedBatch,
    token_ids: torch.Tensor,
    decay: float,
    num_positions: int,
    label_temperature: float = 1.0,
) -> DraftLoss:
    """All unrolled steps of one batch and their loss; `num_positions` is the loss's denominator."""
    states = target.run(batch)
    documents = Documents(batch.starts, batch.max_document_len)
    embedding = target.model.embed_weight
    unrolled = module.unroll(states.features, batch.input_ids, batch.positions, documents, embedding, len(batch.is_drafted))
    labels = Labels(states.hidden, target.model.head_weight, token_ids, batch.label_rows, batch.is_drafted, label_temperature)
    return draft_loss(unrolled.normed, module.head, labels, decay, num_positions)


class Trainer:
    """Trains `module` on documents. `progress` says where it is; steps come in an order that the seed alone decides."""

    def __init__(
        self,
        module: DraftModule,
        target: FrozenTarget,
        documents: Sequence[Document],
        token_ids: torch.Tensor,
        settings: TrainSettings,
        progress: TrainProgress,
    ) -> None:
        """`token_ids` int64 [Vd] on the target's device."""
        self.module, self.progress = module, progress
        self._target, self._documents, self._token_ids, self._settings = target, documents, token_ids, settings
        self._device = token_ids.device
        self._packs = pack(documents, settings.sequence_length)
        self.schedule = make_schedule(settings, len(self._packs))
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0, fused=self._device.type == "cuda"
        )
        self._order = (-1, np.zeros(0, np.int64))  # epoch, and the order of its sequences

    @property
    def num_sequences(self) -> int:
        """Packed sequences of one epoch."""
        return len(self._packs)

    def sample_batch(self, num_sequences: int) -> PackedBatch:
        """A few sequences of the first epoch."""
        packs = [self._sequence(place) for place in range(min(num_sequences, len(self._packs)))]
        return self._batch(packs)

    def run(self, should_stop: Callable[[], bool]) -> Iterator[StepReport]:
        """Step until the schedule is done or `should_stop`."""
        started, seconds_before = perf_counter(), self.progress.seconds
        window = _Window(self._settings.num_unroll_steps, self._device)
        while not self.schedule.is_done(self.progress) and not should_stop():
            self._step(window)
            is_full = window.num_steps == _WINDOW_STEPS or self.schedule.is_done(self.progress)
            means = window.read() if is_full else None
            self.progress.seconds = seconds_before + perf_counter() - started
            report = None if means is None else self._describe(means, window)
            if is_full:
                window = _Window(self._settings.num_unroll_steps, self._device)
            yield StepReport(self.progress.step, report)
            paused = perf_counter() - started - (self.progress.seconds - seconds_before)
            started += paused  # what the caller does between steps is not training
            window.started += paused

    def _step(self, window: "_Window") -> None:
        settings, progress = self._settings, self.progress
        rate = self.schedule.learning_rate_of(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for packs in self._micro_batches():
            batch = self._batch(packs)
            weights = (settings.step_decay, settings.tokens_per_step, settings.label_temperature)
            result = run_draft(self.module, self._target, batch, self._token_ids, *weights)
            result.loss.backward()
            window.add(result, batch)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        window.end_step(norm, rate, settings.tokens_per_step)
        progress.step += 1
        progress.optimizer_steps += 1
        progress.num_tokens += settings.tokens_per_step

    def _micro_batches(self) -> Iterator[list[list[int]]]:
        """The sequences of the next step, a forward's worth at a time: an endless walk through shuffled epochs."""
        first, size = self.progress.step * self._settings.batch_size, self._settings.sequences_per_forward
        for start in range(first, first + self._settings.batch_size, size):
            yield [self._sequence(place) for place in range(start, start + size)]

    def _batch(self, packs: list[list[int]]) -> PackedBatch:
        settings = self._settings
        return make_batch(self._documents, packs, settings.sequence_length, settings.num_unroll_steps, self._device)

    def _sequence(self, place: int) -> list[int]:
        epoch, index = divmod(place, len(self._packs))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._settings.random_seed, epoch)).permutation(len(self._packs)))
        return self._packs[self._order[1][index]]

    def _describe(self, means: "_Means", window: "_Window") -> TrainWindow:
        progress = self.progress
        return TrainWindow(
            step=progress.step,
            num_tokens=progress.num_tokens,
            seconds=progress.seconds,
            loss=means.loss,
            accuracy=means.accuracy,
            learning_rate=window.learning_rate,
            gradient_norm=means.gradient_norm,
            tokens_per_s=window.num_tokens / max(perf_counter() - window.started, 1e-9),
        )


@dataclass(frozen=True)
class _Means:
    loss: float
    accuracy: tuple[float, ...]
    gradient_norm: float


class _Window:
    """Sums over some steps, kept on the device until they are read."""

    def __init__(self, num_unroll_steps: int, device: torch.device) -> None:
        self.num_steps, self.num_tokens, self.learning_rate, self.started = 0, 0, 0.0, perf_counter()
        self._loss, self._norm = torch.zeros((), device=device), torch.zeros((), device=device)
        self._hits, self._drafted = (torch.zeros(num_unroll_steps, dtype=torch.int64, device=device) for _ in range(2))

    def add(self, result: DraftLoss, batch: PackedBatch) -> None:
        self._loss += result.loss.detach()
        self._hits += result.is_hit.sum(1)
        self._drafted += batch.is_drafted.sum(1)

    def end_step(self, gradient_norm: torch.Tensor, learning_rate: float, num_tokens: int) -> None:
        self._norm += gradient_norm.detach()
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.learning_rate = learning_rate

    def read(self) -> _Means:
        accuracy = (self._hits / self._drafted.clamp(min=1)).tolist()
        return _Means(float(self._loss) / self.num_steps, tuple(accuracy), float(self._norm) / self.num_steps)
