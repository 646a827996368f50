"""`eaglecli generate`: prompts in, a run directory of answers out.

Order of work: settings, output and input are checked before a model is looked at, models are held against each other
before weights are read, and only then the run directory is opened.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eaglecli.commands._open_engine import ModelFinder, OpenedEngine, find_device, find_models, out_of_memory, speculation_of
from eaglecli.config import DEFAULT, DEFAULT_CONFIG, GenerateSettings, find_config, read_config, resolve_settings
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import LOW_ACCEPT_LENGTH, AcceptTotals, AnswerCounts
from eaglecli.io.console import Console
from eaglecli.io.prefetch import Prefetch
from eaglecli.io.progress import Progress
from eaglecli.io.prompts import InputSelection, read_prompts
from eaglecli.io.record_ids import request_seed
from eaglecli.io.records import PromptRecord, RecordError, RecordFault
from eaglecli.io.results import Answer, ResultWriter
from eaglecli.io.run_directory import MANIFEST, STATS, RunDirectory, check_output, default_run_directory
from eaglecli.io.run_report import RunReport, build_manifest, build_stats
from eaglecli.io.scan import InputScan, scan_input
from eaglecli.io.signals import Interrupted, interruptible
from eaglecli.io.tokenizer import PromptTokenizer


@dataclass(frozen=True)
class GenerateResult:
    """How a run ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


def resolve(given: Mapping[str, Any], config_name: str | None, console: Console) -> GenerateSettings:
    """Settings from the command line's `given` values and a config file. Raises UserError."""
    config_name = config_name or (None if "target" in given else DEFAULT_CONFIG)
    config = read_config(find_config(config_name)) if config_name else None
    if config_name == DEFAULT_CONFIG and "target" not in given:
        console.note(f"config {config.path}" if config else "")
    if isinstance(given.get("stop_token_ids"), list | tuple):  # an option that was repeated
        given = {**given, "stop_token_ids": ",".join(given["stop_token_ids"])}
    return resolve_settings(given, config, find_device)


def generate(settings: GenerateSettings, console: Console, command_line: list[str], find: ModelFinder = find_models) -> GenerateResult:
    """Runs the command. Raises UserError for what stops it before any record is generated."""
    started = time.perf_counter()
    selection, output = _check_paths(settings)
    speculation_of(settings)  # its rules are checked before anything is read
    scan = _scan(selection, settings, console)
    report = RunReport(command_line, settings, selection, scan, output)
    if scan.num_good == 0:
        return _finish_without_model(report, console)
    models = find(settings)
    settings = settings.with_generation_config(models.generation_config)
    _note_generation_config(settings, console)
    tokenizer = models.load_tokenizer()
    try:
        opened = models.open_engine(settings)
    except (MemoryError, RuntimeError) as error:
        memory_error = out_of_memory(error)
        if memory_error is None:
            raise
        raise memory_error from error
    for line in opened.summary:
        console.note(line)
    for line in opened.warnings:
        console.warning(line)
    report.settings = settings.with_derived(**opened.settled)
    report.models = opened.summary
    report.load_s = time.perf_counter() - started
    maker = RequestMaker(report.settings, tokenizer, opened)
    console.note(maker.describe(scan))
    with RunDirectory(output) as folder:
        console.attach_log(folder.log)
        try:
            return Run(report, folder, tokenizer, opened, maker, console).execute()
        finally:
            console.attach_log(None)


def _check_paths(settings: GenerateSettings) -> tuple[InputSelection, Path]:
    if settings.input is None:
        raise UserError("no input is named", "use -i FILE, with one JSON object holding `prompt` or `messages` on each line")
    path = Path(settings.input)
    if path.is_dir():
        raise UserError(f"--input {path} is a directory", "name a JSON-lines file")
    if not path.exists():
        raise UserError(f"--input {path} does not exist", "check the path")
    output = Path(settings.output) if settings.output else default_run_directory(settings.target or "target", path)
    check_output(output, path, settings.overwrite)
    return InputSelection(path, settings.input_format, settings.offset, settings.limit), output


def _scan(selection: InputSelection, settings: GenerateSettings, console: Console) -> InputScan:
    scan = scan_input(selection)
    kinds = ", ".join(f"{count} with `{kind}`" for kind, count in scan.kinds.items())
    console.note(
        f"{selection.path}: {scan.num_records} records"
        + (f" ({kinds})" if kinds else "")
        + (f", {scan.num_bad} bad" if scan.num_bad else "")
    )
    lines = ", ".join(map(str, scan.repeated_lines))
    if settings.on_error == "stop":
        if scan.first_error is not None:
            raise _stop_at(scan.first_error)
        if lines:
            raise UserError(f"{selection.path}: records share an id (lines {lines})", "give each its own, or use --on-error record")
    elif lines:
        console.warning(f"{selection.path}: records share an id (lines {lines}); all are generated, told apart by `index`")
    return scan


def _stop_at(error: RecordError) -> UserError:
    return UserError(
        f"{error.key.file}, line {error.key.line}: {error.message} ({error.code})", "mend the record, or use --on-error record"
    )


def _note_generation_config(settings: GenerateSettings, console: Console) -> None:
    names = [name for name in ("temperature", "top_p", "top_k", "min_p") if settings.origin(name) == "generation_config"]
    if names:
        values = ", ".join(f"{name} {getattr(settings, name):g}" for name in names)
        console.note(f"the model's generation_config samples: {values} (--temperature 0 is greedy)")


def _finish_without_model(report: RunReport, console: Console) -> GenerateResult:
    """Nothing to generate: valid files, no model loaded."""
    with RunDirectory(report.output) as folder:
        console.attach_log(folder.log)
        writer = ResultWriter(folder.path, None, None)
        for error in read_prompts(report.selection, report.scan.ids):
            assert isinstance(error, RecordError), "the scan found no good record"
            report.count_error(error)
            writer.put(error)
        writer.close(ordered=True)
        result = _write_reports(report, folder, None, ExitCode.NOTHING_DONE, "complete", {})
        what = "no record can be used" if report.scan.num_records else f"{report.selection.path} has no records"
        console.error(what, f"see {folder.path / 'errors.jsonl'}" if report.scan.num_records else "the model was not loaded")
        console.attach_log(None)
    return result


def _write_reports(
    report: RunReport, folder: RunDirectory, totals: AcceptTotals | None, code: ExitCode, status: str, engine_summary: dict[str, Any]
) -> GenerateResult:
    stats = build_stats(report, totals, engine_summary)
    folder.write_json(STATS, stats)
    folder.write_json(MANIFEST, build_manifest(report, status, code))
    return GenerateResult(code, {**stats, "status": status, "exit_code": int(code), "output": str(folder.path)})


@dataclass
class RequestMaker:
    """Turns records into requests: tokens, sampling settings of this record, seed, room for the answer."""

    settings: GenerateSettings
    tokenizer: PromptTokenizer
    opened: OpenedEngine
    uses_template_for_prompts: bool = field(init=False)
    end_token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.uses_template_for_prompts = self.settings.apply_chat_template and self.tokenizer.has_chat_template
        own = self.tokenizer.eos_token_id
        self.end_token_ids = self.opened.end_token_ids or (() if own is None else (own,))

    def describe(self, scan: InputScan) -> str:
        """How prompts become tokens and where answers end, in one sentence."""
        settings = self.settings
        form = "one user message of the chat template" if self.uses_template_for_prompts else "raw text"
        cap = f"at most {settings.max_new_tokens} new tokens" + ("" if settings.origin("max_new_tokens") != DEFAULT else " (default)")
        prompts = f"a `prompt` becomes {form}; " if scan.kinds.get("prompt") else ""
        sampling = f"temperature {settings.temperature:g}, seed {settings.random_seed}"
        return f"{prompts}{cap}, context {self.opened.context_length} tokens, {sampling}"

    def prepare(self, record: PromptRecord | RecordError) -> Request | RecordError:
        """A request, or the error that this record ends as."""
        if isinstance(record, RecordError):
            return record
        try:
            request = self._request(record)
            reason = self.opened.engine.refusal(request)
            if reason:
                raise RecordFault("too_long", reason)
            return request
        except RecordFault as fault:
            return RecordError(record.key, fault.code, fault.message, record.raw)

    def _request(self, record: PromptRecord) -> Request:
        prompt_ids = self._encode(record)
        if not len(prompt_ids):
            raise RecordFault("empty_prompt", "empty prompt: the tokenizer makes no token of it")
        return Request(record.key, prompt_ids, self._sampling(record, len(prompt_ids)))

    def _encode(self, record: PromptRecord) -> np.ndarray:
        if record.messages is not None:
            if not self.tokenizer.has_chat_template:
                raise RecordFault("template", "`messages` need a chat template and the tokenizer has none")
            return self.tokenizer.encode_messages(record.messages)
        assert record.text is not None
        if self.uses_template_for_prompts:
            return self.tokenizer.encode_messages([{"role": "user", "content": record.text}])
        return self.tokenizer.encode_text(record.text)

    def _sampling(self, record: PromptRecord, prompt_len: int) -> SamplingParams:
        own, settings = record.options, self.settings
        ends = () if settings.ignore_eos else self.end_token_ids
        stop_ids = tuple(dict.fromkeys((*ends, *own.get("stop_token_ids", settings.stop_token_ids))))
        if len(stop_ids) > self.opened.max_stop_ids:
            raise RecordFault(
                "bad_option", f"{len(stop_ids)} stop token ids (end of text included) are more than the {self.opened.max_stop_ids} allowed"
            )
        return SamplingParams(
            temperature=own.get("temperature", settings.temperature),
            top_p=own.get("top_p", settings.top_p),
            top_k=own.get("top_k", settings.top_k),
            min_p=own.get("min_p", settings.min_p),
            seed=own["seed"] if "seed" in own else request_seed(settings.random_seed, record.key),
            max_new_tokens=self._max_new_tokens(record, prompt_len),
            stop_token_ids=stop_ids,
        )

    def _max_new_tokens(self, record: PromptRecord, prompt_len: int) -> int:
        """A cap that was given must fit; the default one shrinks to the room that is left."""
        wanted = record.options.get("max_new_tokens", self.settings.max_new_tokens)
        context = self.opened.context_length
        given = "max_new_tokens" in record.options or self.settings.origin("max_new_tokens") != DEFAULT
        if given and prompt_len + wanted > context:
            total = prompt_len + wanted
            raise RecordFault(
                "too_long", f"{prompt_len} prompt tokens and max_new_tokens {wanted} make {total}, the context is {context} tokens"
            )
        if prompt_len >= context:
            raise RecordFault("too_long", f"{prompt_len} prompt tokens leave no room in the context of {context} tokens")
        return min(wanted, context - prompt_len)


class Run:
    """One run with everything opened: the reader thread feeds the engine, the writer thread takes what it finishes."""

    def __init__(
        self,
        report: RunReport,
        folder: RunDirectory,
        tokenizer: PromptTokenizer,
        opened: OpenedEngine,
        maker: RequestMaker,
        console: Console,
    ) -> None:
        self.report, self.folder, self.opened, self.maker, self.console = report, folder, opened, maker, console
        num_steps = opened.speculation.num_steps
        self.totals = AcceptTotals(num_steps) if num_steps else None
        self.writer = ResultWriter(folder.path, tokenizer, num_steps or None)
        self.progress = Progress(console, report.settings.progress, report.scan.num_records)
        records = read_prompts(report.selection, report.scan.ids)
        self.prepared: Prefetch[Request | RecordError] = Prefetch(map(maker.prepare, records))

    def execute(self) -> GenerateResult:
        """Generates all records. Whatever ends it, finished lines are on disk and both reports are written."""
        self.folder.write_json(MANIFEST, build_manifest(self.report, "running", None))
        started = time.perf_counter()
        status, code, failure = "failed", ExitCode.INTERNAL, None
        try:
            with interruptible():
                for completion in self.opened.engine.generate(self._requests()):
                    self._take(completion)
            status, code = "complete", self._exit_code()
        except Interrupted as interrupted:
            status, code = "interrupted", interrupted.exit_code
            self.console.warning(f"{interrupted}: stopped; finished lines are kept in {self.folder.path}")
        except Exception as error:
            failure = out_of_memory(error) or error
            code = failure.exit_code if isinstance(failure, UserError) else code
        self.report.generate_s = time.perf_counter() - started
        failure = self._close(ordered=status == "complete" and self.report.settings.ordered) or failure
        if failure is not None and status == "complete":
            status, code = "failed", failure.exit_code if isinstance(failure, UserError) else ExitCode.INTERNAL
        result = self._write_reports(status, code)
        if failure is not None:
            raise failure
        self._say_result(result)
        return result

    def _requests(self) -> Iterator[Request]:
        for item in self.prepared:
            if isinstance(item, Request):
                yield item
            else:
                self._take_error(item)

    def _take(self, completion: Completion) -> None:
        request = completion.request
        if completion.finish_reason == "error":
            self._take_error(RecordError(request.key, "numeric", completion.error or "generation failed", ""))  # type: ignore[arg-type]
            return
        counts = _counts_of(completion, self.maker.end_token_ids)
        if self.totals is not None:
            self.totals.add(counts)
        answer = Answer(
            key=request.key,  # type: ignore[arg-type]
            token_ids=completion.output_ids,
            finish_reason=completion.finish_reason,
            stop_token_id=completion.stop_token_id,
            num_prompt_tokens=len(request.prompt_ids),
            counts=counts,
            seed=request.sampling.seed,
            sample=request.sample,
            queue_s=completion.queue_s,
            ttft_s=completion.ttft_s,
            e2e_s=completion.e2e_s,
        )
        self.report.count_answer(answer)
        self.writer.put(answer)
        self.progress.record_done(len(completion.output_ids), self.totals.accept_length if self.totals else None)

    def _take_error(self, error: RecordError) -> None:
        self.report.count_error(error)
        self.writer.put(error)
        self.progress.record_done(0, self.totals.accept_length if self.totals else None)
        if self.report.settings.on_error == "stop":
            raise _stop_at(error)

    def _exit_code(self) -> ExitCode:
        if not self.report.num_done:
            return ExitCode.NOTHING_DONE
        return ExitCode.PARTIAL if self.report.num_failed else ExitCode.OK

    def _close(self, ordered: bool) -> Exception | None:
        self.prepared.close()
        self.progress.close()
        try:
            self.writer.close(ordered)
        except Exception as error:
            return error
        return None

    def _write_reports(self, status: str, code: ExitCode) -> GenerateResult:
        try:
            return _write_reports(self.report, self.folder, self.totals, code, status, self.opened.engine.summary())
        except OSError as error:
            message = f"the reports of the run cannot be written: {error.strerror or error}"
            raise UserError(message, "free some space; finished lines are kept", ExitCode.INTERNAL) from error

    def _say_result(self, result: GenerateResult) -> None:
        report, say = self.report, self.console.note
        rate = report.num_output_tokens / report.generate_s if report.generate_s else 0.0
        speed = f"{report.num_output_tokens} tokens in {report.generate_s:.1f} s, {rate:.1f} token/s"
        say(f"{report.num_done} done, {report.num_failed} failed; {speed}")
        if self.totals is not None and self.totals.accept_length is not None:
            self._say_accept_length(self.totals)
        if report.num_failed:
            self.console.warning(f"{report.num_failed} records failed, see {self.folder.path / 'errors.jsonl'}")
        say(f"results in {self.folder.path}")

    def _say_accept_length(self, totals: AcceptTotals) -> None:
        length = totals.accept_length or 0.0
        self.console.note(f"accept length {length:.3f} ((accepted + steps) / steps), {totals.num_verify_steps} verify steps")
        if length < LOW_ACCEPT_LENGTH:
            self.console.warning(
                f"accept length below {LOW_ACCEPT_LENGTH}: this draft hardly ever guesses right here; plain decoding may be faster"
            )
        if totals.num_identity_violations:
            self.console.warning(
                f"the counts of {totals.num_identity_violations} records do not close (C = T + A + V - cut): please report this"
            )


def _counts_of(completion: Completion, end_token_ids: tuple[int, ...]) -> AnswerCounts:
    ends = np.flatnonzero(np.isin(completion.output_ids, end_token_ids))
    return AnswerCounts(
        num_completion_tokens=len(completion.output_ids),
        num_verify_steps=completion.num_verify_steps,
        num_accepted_drafts=completion.num_accepted_drafts,
        num_proposed_drafts=completion.num_proposed_drafts,
        num_cut_tokens=completion.num_cut_tokens,
        accept_counts=completion.accept_counts,
        first_end_position=int(ends[0]) if len(ends) else None,
    )
