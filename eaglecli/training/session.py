"""One training from its first call to its last: what it starts from, where it is kept, how it is watched.

Folder: `checkpoint/` to go on from, `draft/` the draft as it is now in the published layout, `curve.jsonl` a line per measurement.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from eaglecli.engine.device_memory import release_memory
from eaglecli.errors import UserError
from eaglecli.models.loader import LoadedTarget
from eaglecli.models.tap_layers import default_boundaries
from eaglecli.training.checkpoint import Checkpoint, load_checkpoint, restore, save_checkpoint
from eaglecli.training.documents import DocumentSet
from eaglecli.training.draft_module import DraftModule, DraftShape, draft_layer
from eaglecli.training.evaluation import AcceptLength, TeacherForced, measure_accept_length, measure_teacher_forced
from eaglecli.training.export import check_tap_boundaries, export_draft
from eaglecli.training.schedule import TrainProgress
from eaglecli.training.settings import TrainSettings
from eaglecli.training.target_states import FrozenTarget
from eaglecli.training.trainer import StepReport, Trainer, TrainWindow
from eaglecli.training.vocabulary import DraftVocabulary, choose_vocabulary, count_answer_tokens

CHECKPOINT, DRAFT, CURVE = "checkpoint", "draft", "curve.jsonl"
_ANSWERS = "answers"  # in the identity: may change, and is told
_CHAIN_STEPS = 5
_SAMPLE_SEQUENCES = 8  # from which the size of the features is measured


@dataclass(frozen=True)
class Measurement:
    """A look at the held-out prompts; parts are None when there are none."""

    step: int
    accept: AcceptLength | None
    teacher_forced: TeacherForced | None


@dataclass(frozen=True)
class SessionEvent:
    """After a step: what was read of the training and what was measured, if it was time."""

    report: StepReport
    measurement: Measurement | None


def draft_shape(target: LoadedTarget, settings: TrainSettings) -> DraftShape:
    """The draft that the settings ask for. Raises UserError for boundaries that the target does not have."""
    boundaries = settings.tap_boundaries or default_boundaries(target.config.num_layers)
    check_tap_boundaries(boundaries, target.config.num_layers)
    return DraftShape(
        layer=draft_layer(target.config.layer, settings.intermediate_size),
        tap_boundaries=boundaries,
        draft_vocab_size=min(settings.draft_vocab_size, target.config.vocab_size),
        rope_theta=settings.rope_theta,
        max_position_embeddings=settings.sequence_length,
    )


class TrainingSession:
    """Opened on what the folder holds, or anew.

    For reports: `vocabulary`, `trainer`, `resumed_from` (a step, or None), and whether the optimizer's state was not there
    (`has_lost_optimizer`) or the answers are not those of the earlier calls (`has_other_answers`: another walk through others).
    """

    def __init__(
        self,
        folder: Path,
        target: LoadedTarget,
        documents: DocumentSet,
        held_out_prompts: Sequence[np.ndarray],
        end_ids: tuple[int, ...],
        settings: TrainSettings,
    ) -> None:
        """Raises UserError when the folder's checkpoint belongs to another training or there is nothing to train on."""
        if not documents.training:
            raise UserError("no answer is left to train on", "use more prompts, or a larger --max-new-tokens")
        self._folder, self._target, self._documents, self._settings = folder, target, documents, settings
        self._held_out_prompts, self._end_ids = held_out_prompts, end_ids
        shape, device = draft_shape(target, settings), target.model.embed_weight.device
        checkpoint = load_checkpoint(folder / CHECKPOINT)
        self._identity = _identity(shape, settings)
        self._digest = _digest(documents)
        self.resumed_from = None if checkpoint is None else checkpoint.progress.step
        self.has_other_answers = checkpoint is not None and checkpoint.identity.get(_ANSWERS) != self._digest
        self.has_lost_optimizer = checkpoint is not None and checkpoint.optimizer is None
        self.vocabulary = self._vocabulary(shape, checkpoint)
        self.module = DraftModule(shape).to(device)
        self._frozen = FrozenTarget(target.model, shape.tap_boundaries)
        self._token_ids = self.vocabulary.token_ids.to(device)
        progress = TrainProgress() if checkpoint is None else checkpoint.progress
        self.trainer = Trainer(self.module, self._frozen, documents.training, self._token_ids, settings, progress)
        if checkpoint is None:
            sample = self.trainer.sample_batch(_SAMPLE_SEQUENCES)
            self.module.initialise(target.model, self.vocabulary.token_ids, self._frozen.feature_rms(sample), settings.random_seed)
        else:
            restore(checkpoint, self.module, self.trainer.optimizer)

    @property
    def progress(self) -> TrainProgress:
        """Where the training is."""
        return self.trainer.progress

    @property
    def is_done(self) -> bool:
        """Whether the schedule has come to its end."""
        return self.trainer.schedule.is_done(self.progress)

    def run(self, should_stop: Callable[[], bool]) -> Iterator[SessionEvent]:
        """Train until the end or `should_stop`, keeping the state now and then and at the end, and measuring on the way."""
        kept_s = monotonic()
        for report in self.trainer.run(should_stop):
            measurement = self.measure() if report.step % self._settings.evaluate_every == 0 and not self.is_done else None
            if report.window is not None or measurement is not None:
                self._note(report.window, measurement)
            if monotonic() - kept_s >= self._settings.checkpoint_every_s:
                self.keep()
                kept_s = monotonic()
            yield SessionEvent(report, measurement)
        self.keep()

    def keep(self) -> None:
        """Write checkpoint and draft."""
        trainer, limit = self.trainer, self._settings.max_shard_bytes
        identity = {**self._identity, _ANSWERS: self._digest}
        save_checkpoint(self._folder / CHECKPOINT, self.module, trainer.optimizer, self._token_ids, self.progress, identity, limit)
        export_draft(self._folder / DRAFT, self.module, self.vocabulary, self._target.config)

    def measure(self) -> Measurement:
        """The draft as it is now on the held-out prompts."""
        export_draft(self._folder / DRAFT, self.module, self.vocabulary, self._target.config)
        settings, accept, teacher_forced = self._settings, None, None
        if self._held_out_prompts:
            prompts, num_tokens = self._held_out_prompts, settings.held_out_new_tokens
            accept = measure_accept_length(self._target, self._folder / DRAFT, prompts, self._end_ids, num_tokens, _CHAIN_STEPS)
            release_memory()
        if self._documents.held_out:
            parts = (self.module, self._frozen, self._documents.held_out, self._token_ids)
            teacher_forced = measure_teacher_forced(*parts, settings.num_unroll_steps, settings.sequence_length)
        return Measurement(self.progress.step, accept, teacher_forced)

    def finish(self) -> Measurement:
        """The last measurement, noted in the curve."""
        measurement = self.measure()
        self._note(None, measurement)
        return measurement

    def _note(self, window: TrainWindow | None, measurement: Measurement | None) -> None:
        line: dict[str, Any] = {"step": self.progress.step, "num_tokens": self.progress.num_tokens, "seconds": self.progress.seconds}
        if window is not None:
            line |= asdict(window)
        if measurement is not None:
            line["held_out"] = {name: value for name, value in asdict(measurement).items() if name != "step" and value is not None}
        with (self._folder / CURVE).open("a", encoding="utf-8") as curve:
            curve.write(json.dumps(line) + "\n")

    def _vocabulary(self, shape: DraftShape, checkpoint: Checkpoint | None) -> DraftVocabulary:
        counts = count_answer_tokens(self._documents.training, self._target.config.vocab_size)
        if checkpoint is None:
            return choose_vocabulary(counts, shape.draft_vocab_size)
        differing = sorted(name for name, value in self._identity.items() if checkpoint.identity.get(name) != value)
        if differing:
            raise UserError(
                f"{self._folder / CHECKPOINT} belongs to a training with another {', another '.join(differing)}",
                "give the same settings, or start the training anew with --retrain",
            )
        coverage = float(counts[checkpoint.token_ids].sum() / max(counts.sum(), 1))
        return DraftVocabulary(checkpoint.token_ids, len(counts), coverage)


def _identity(shape: DraftShape, settings: TrainSettings) -> dict[str, Any]:
    """What must not change between the calls of one training: by name in the words of the user."""
    return {
        "draft vocabulary size": shape.draft_vocab_size,
        "width of the MLP": shape.layer.intermediate_size,
        "list of tapped boundaries": list(shape.tap_boundaries),
        "rotary base": shape.rope_theta,
        "sequence length": settings.sequence_length,
        "batch size": settings.batch_size,
        "number of unrolled steps": settings.num_unroll_steps,
        "random seed": settings.random_seed,
    }


def _digest(documents: DocumentSet) -> str:
    """Of the training documents, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents.training:
        digest.update(document.token_ids.tobytes())
        digest.update(document.answer_start.to_bytes(4, "little"))
    return digest.hexdigest()
