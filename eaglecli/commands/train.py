"""`eaglecli train`: prompts in, an EAGLE-3 draft for the target out.

Four stages, each taken up where an earlier call left it: prompts that the target writes itself, its answers to all prompts,
the training, and a last measurement. The output directory holds `answers/` (shards of token ids), `checkpoint/`, `draft/` (the
draft in the published layout), `curve.jsonl`, `stats.json` and `log.txt`.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eaglecli.commands._open_engine import find_device, out_of_memory
from eaglecli.commands._stage_bar import StageBar
from eaglecli.commands._training_prompts import encode_prompts, encode_text, hash_files, user_turn_prefix
from eaglecli.engine.device_memory import release_memory
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.console import Console
from eaglecli.io.fingerprint import fingerprint_model
from eaglecli.io.run_directory import STATS, RunDirectory, holds_run
from eaglecli.io.signals import FirstSignal, Interrupted, interruptible
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer
from eaglecli.models.loader import LoadedTarget, load_target, read_target_description
from eaglecli.models.model_path import resolve_model_path
from eaglecli.training.answer_engine import open_answer_engine
from eaglecli.training.answers import AnswerMaker, has_room, random_seed_of, read_answers
from eaglecli.training.documents import make_documents
from eaglecli.training.self_prompts import SelfPromptWriter
from eaglecli.training.session import CHECKPOINT, CURVE, DRAFT, Measurement, TrainingSession, draft_shape
from eaglecli.training.settings import TrainSettings
from eaglecli.training.shards import ShardStore

SCHEMA_VERSION = 1
ANSWERS, PLAN = "answers", "plan.json"
_HELD_OUT_SHARE = 10  # at most one prompt in so many is held out


@dataclass(frozen=True)
class TrainTask:
    """What is trained, on what, into which directory; how it is done is in `settings`."""

    target: str
    prompts: tuple[Path, ...]
    output: Path
    settings: TrainSettings
    revision: str | None = None
    local_files_only: bool = False
    tokenizer_path: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    overwrite: bool = False
    retrain: bool = False
    progress: str = "auto"


@dataclass(frozen=True)
class TrainResult:
    """How the command ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


def resolve(given: Mapping[str, Any]) -> TrainTask:
    """A task from the command line's `given` values. Raises UserError."""
    for name, option in (("target", "--target"), ("output", "--output")):
        if not given.get(name):
            raise UserError(f"{option} is missing", f"name one with {option}")
    names = {item.name for item in fields(TrainSettings)}
    chosen = {name: value for name, value in given.items() if name in names}
    if isinstance(chosen.get("tap_boundaries"), str):
        chosen["tap_boundaries"] = _integers(chosen["tap_boundaries"], "--tap-boundaries")
    rest = {name: value for name, value in given.items() if name not in names}
    prompts = tuple(Path(name) for name in rest.pop("prompts", None) or ())
    task = TrainTask(settings=TrainSettings(**chosen), prompts=prompts, output=Path(rest.pop("output")), **rest)
    if not task.prompts and not task.settings.self_prompts:
        raise UserError(
            "there is nothing to answer", "give prompts with --prompts FILE, or let the target write some with --self-prompts N"
        )
    if task.output.is_file():
        raise UserError(f"--output {task.output} is a file, a training writes a directory", "name another directory")
    if holds_run(task.output) and not (task.output / ANSWERS / PLAN).exists():
        raise UserError(f"--output {task.output} holds a run of generate or bench, no training", "name another directory")
    return task


def train(task: TrainTask, console: Console) -> TrainResult:
    """Runs the command. Raises UserError for what stops it."""
    hashes = hash_files(task.prompts)  # what cannot be read is told before a model is loaded
    with RunDirectory(task.output) as folder:
        console.attach_log(folder.log)
        try:
            with interruptible() as signal:
                return _Training(task, folder, console, hashes, signal).run()
        except Interrupted as interrupted:
            console.warning(f"{interrupted}: stopped; the same command goes on from what was kept")
            return TrainResult(interrupted.exit_code, {"schema_version": SCHEMA_VERSION, "status": "interrupted"})
        except (RuntimeError, MemoryError) as error:
            told = out_of_memory(error)
            if told is None:
                raise
            hint = "use a smaller --micro-batch-size or fewer --max-running-requests"
            raise UserError(told.message, hint, ExitCode.MEMORY) from error
        finally:
            console.attach_log(None)


@dataclass
class _Training:
    """One call. `document` collects what there is to report."""

    task: TrainTask
    folder: RunDirectory
    console: Console
    hashes: Sequence[str]
    signal: FirstSignal
    document: dict[str, Any] = field(default_factory=lambda: {"schema_version": SCHEMA_VERSION})
    started_s: float = field(default_factory=time.monotonic)

    def run(self) -> TrainResult:
        task, settings = self.task, self.task.settings
        self._clear()
        target = self._load_target()
        draft_shape(target, settings)  # wrong boundaries are told before anything is generated
        tokenizer = self._load_tokenizer(target)
        own_end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        end_ids = target.config.eos_token_ids or own_end
        self._check_plan(target)
        self.signal.check()  # what was loaded may have swallowed it
        prompts = self._prompts(target, tokenizer, end_ids)
        if prompts is None:
            return self._end("prompts unfinished")
        held_out = _hold_out(prompts, len(prompts) - settings.self_prompts if task.prompts else len(prompts), settings)
        if not self._answer(target, prompts, held_out, end_ids):
            return self._end("answers unfinished")
        release_memory()
        documents = make_documents(read_answers(self._store("answers")), held_out)
        self.document["documents"] = asdict(documents.counts)
        held_out_prompts = [prompts[number] for number in sorted(held_out)]
        session = TrainingSession(self.folder.path, target, documents, held_out_prompts, end_ids, settings)
        return self._end(*self._train(session))

    def _train(self, session: TrainingSession) -> tuple[str, Measurement]:
        settings, trainer, counts = self.task.settings, session.trainer, self.document["documents"]
        coverage, size = session.vocabulary.coverage, len(session.vocabulary.token_ids)
        self.document["vocabulary"] = {"size": size, "coverage": coverage}
        self.console.note(
            f"{counts['num_answer_tokens']:,} answer tokens in {trainer.num_sequences:,} sequences of {settings.sequence_length}; "
            f"repetition loops: {counts['num_loops_cut']} answers cut, {counts['num_loops_dropped']} dropped; "
            f"draft vocabulary {size:,} tokens, {coverage:.2%} of the answers"
        )
        if session.resumed_from is not None:
            lost = "; the optimizer's state is not there: it warms up again" if session.has_lost_optimizer else ""
            self.console.note(f"the training goes on after step {session.resumed_from}{lost}")
        if session.has_other_answers:
            self.console.warning("the answers are not those that the training began with; the draft vocabulary stays as it is")
        last = trainer.schedule.num_steps
        total = None if last == float("inf") else int(last) - session.progress.step
        with StageBar(self.console, self.task.progress, "training", total, "step") as bar:
            text = ""
            for event in session.run(self._should_stop):
                window = event.report.window
                if window is not None:
                    accuracy = " ".join(f"{share:.2f}" for share in window.accuracy)
                    text = f"loss {window.loss:.3f}, accuracy {accuracy}, {window.tokens_per_s:,.0f} token/s"
                if event.measurement is not None:
                    self._tell(event.measurement)
                bar.advance(1, text)
        measurement = session.finish()
        self._tell(measurement)
        self.document["training"] = asdict(session.progress)
        self.document["draft"] = str(self.folder.path / DRAFT)
        return ("complete" if session.is_done else "training unfinished"), measurement

    def _tell(self, measurement: Measurement) -> None:
        parts = []
        if measurement.accept is not None:
            shares = " ".join(f"{share:.2f}" for share in measurement.accept.by_position)
            parts.append(f"accept length {measurement.accept.accept_length:.3f} (by position {shares})")
        if measurement.teacher_forced is not None:
            parts.append(f"{measurement.teacher_forced.chain_length:.3f} when told the text")
        self.console.note(f"step {measurement.step}, held-out prompts: {', '.join(parts) or 'there are none'}")

    def _end(self, status: str, measurement: Measurement | None = None) -> TrainResult:
        self.document["status"] = status
        self.document["seconds"] = time.monotonic() - self.started_s
        if measurement is not None:
            self.document["held_out"] = asdict(measurement)
        self.folder.write_json(STATS, self.document)
        if status == "complete":
            self.console.note(f"the draft is in {self.folder.path / DRAFT}")
        else:
            self.console.note(f"{status}: the same command goes on from here")
        return TrainResult(ExitCode.OK, self.document)

    # ---- stages before the training -------------------------------------------------------------------------------

    def _prompts(self, target: LoadedTarget, tokenizer: PromptTokenizer, end_ids: tuple[int, ...]) -> list[np.ndarray] | None:
        """Ids of all prompts, those of the files first; None when the time was too short to write the others."""
        store = self._store("prompts")
        if not store.paths and self.task.prompts:
            for ids in encode_prompts(self.task.prompts, tokenizer, self.console):
                store.add({"ids": ids.tolist()})
            store.flush()
        prompts = [np.array(record["ids"], np.int32) for record in store.read()]
        wanted = self.task.settings.self_prompts
        if wanted:
            texts = self._write_prompts(target, tokenizer, end_ids, wanted)
            if texts is None:
                return None
            prompts += [encode_text(text, tokenizer) for text in texts]
        num_usable = sum(has_room(ids, self.task.settings) for ids in prompts)
        self.document["prompts"] = {**self.document.get("prompts", {}), "total": len(prompts), "too_long": len(prompts) - num_usable}
        if not num_usable:
            raise UserError("no prompt can be answered", "give prompts that fit into --sequence-length", ExitCode.NOTHING_DONE)
        return prompts

    def _write_prompts(self, target: LoadedTarget, tokenizer: PromptTokenizer, end_ids: tuple[int, ...], wanted: int) -> list[str] | None:
        control_ids = frozenset(tokenizer.control_tokens.values())
        seed, store = self.task.settings.random_seed, self._store("self-prompts")
        writer = SelfPromptWriter(
            user_turn_prefix(tokenizer), end_ids, control_ids, tokenizer.decode, wanted, self._context_length(), seed, store
        )
        if writer.num_missing:
            engine = open_answer_engine(target.model, self._context_length(), self.task.settings.max_running_requests)
            with StageBar(self.console, self.task.progress, "own prompts", wanted, "prompt") as bar:
                before = len(writer.texts)
                for num_texts in writer.run(engine, self._should_stop):
                    bar.advance(num_texts - before, f"{writer.counts.num_written} texts written")
                    before = num_texts
        self.document["prompts"] = {"self_written": len(writer.texts), "this_call": asdict(writer.counts)}
        if not writer.num_missing:
            return writer.texts
        if self._should_stop():
            return None
        raise UserError(
            f"the target wrote {len(writer.texts)} usable prompts in {writer.counts.num_written} tries, not {wanted}",
            f"use --self-prompts {len(writer.texts)}" if writer.texts else "give prompts with --prompts",
        )

    def _answer(self, target: LoadedTarget, prompts: list[np.ndarray], held_out: frozenset[int], end_ids: tuple[int, ...]) -> bool:
        """Whether all answers are there."""
        settings, started = self.task.settings, time.monotonic()
        maker = AnswerMaker(prompts, held_out, end_ids, settings, self._store("answers"))
        if maker.num_missing:
            engine, before = open_answer_engine(target.model, self._context_length(), settings.max_running_requests), maker.totals
            with StageBar(self.console, self.task.progress, "answers", maker.num_missing, "answer") as bar:
                for totals in maker.run(engine, self._should_stop):
                    rate = (totals.num_tokens - before.num_tokens) / max(time.monotonic() - started, 1e-9)
                    bar.advance(1, f"{totals.num_tokens:,} tokens, {rate:,.0f} token/s")
        self.document["answers"] = {**asdict(maker.totals), "seconds": time.monotonic() - started}
        return not maker.num_missing

    # ---- the directory --------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Remove what --overwrite or --retrain gives up."""
        names = (ANSWERS, CHECKPOINT, DRAFT) if self.task.overwrite else (CHECKPOINT, DRAFT) if self.task.retrain else ()
        for name in names:
            shutil.rmtree(self.folder.path / name, ignore_errors=True)
        if names:
            (self.folder.path / CURVE).unlink(missing_ok=True)

    def _check_plan(self, target: LoadedTarget) -> None:
        """Answers of an earlier call count only if they answer the same prompts of the same target in the same way."""
        settings = self.task.settings
        plan = {
            "target": fingerprint_model(target.path),
            "prompt files": list(self.hashes),
            "number of samples": settings.num_samples,
            "temperatures": [settings.low_temperature, settings.high_temperature],
            "max new tokens": settings.max_new_tokens,
            "sequence length": settings.sequence_length,
            "random seed": settings.random_seed,
        }
        path = self.folder.path / ANSWERS / PLAN
        if path.is_file():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            differing = [name for name, value in plan.items() if earlier.get(name) != value]
            if differing:
                raise UserError(
                    f"the answers in {path.parent} were made with another {', another '.join(differing)}",
                    "use --overwrite to start anew, or name another --output",
                )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan, indent=1), encoding="utf-8")

    def _store(self, name: str) -> ShardStore:
        return ShardStore(self.folder.path / ANSWERS, name)

    # ---- models and time ------------------------------------------------------------------------------------------

    def _load_target(self) -> LoadedTarget:
        task = self.task
        device = find_device(task.device)
        path = resolve_model_path(task.target, task.revision, task.local_files_only)
        limit = read_target_description(path).max_position_embeddings
        if task.settings.sequence_length > limit:
            raise UserError(f"--sequence-length {task.settings.sequence_length} is more than the target's {limit}", f"use {limit} or less")
        default = "float32" if device == "cpu" else "bfloat16"
        dtype = getattr(torch, default if task.dtype == "auto" else task.dtype)
        target = load_target(path, dtype, device, self._context_length())
        self.console.note(f"target {task.target} on {device}: {', '.join(target.summary)}")
        return target

    def _load_tokenizer(self, target: LoadedTarget) -> PromptTokenizer:
        name = self.task.tokenizer_path
        return load_tokenizer(target.path if name is None else Path(name), None, self.task.local_files_only)

    def _context_length(self) -> int:
        return self.task.settings.sequence_length

    def _should_stop(self) -> bool:
        self.signal.check()
        limit = self.task.settings.stop_after_s
        return limit is not None and time.monotonic() - self.started_s >= limit


def _hold_out(prompts: Sequence[np.ndarray], num_candidates: int, settings: TrainSettings) -> frozenset[int]:
    """Numbers of prompts that are never trained on: a few of the first `num_candidates`, chosen by the seed."""
    numbers = [number for number in range(num_candidates) if has_room(prompts[number], settings)]
    count = min(settings.held_out, -(-len(numbers) // _HELD_OUT_SHARE)) if len(numbers) > 1 else 0
    return frozenset(sorted(numbers, key=lambda number: random_seed_of("held out", settings.random_seed, number))[:count])


def _integers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text} must be whole numbers with commas between") from None
