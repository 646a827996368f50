"""One run with its directory open: models loaded, records generated, files put in order, reports written, whatever ends it."""

import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eaglecli.commands._answers import build_answer, counts_of
from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._dialogues import Dialogues, RequestSource
from eaglecli.commands._open_engine import ModelSource, OpenedEngine, out_of_memory
from eaglecli.commands._request_blocks import BLOCK, BlockReader, call_for_blocks, prepare_blocks
from eaglecli.commands._request_maker import Prepared, RequestMaker
from eaglecli.commands._samples import SamplePlan
from eaglecli.commands._speculation import describe_shares
from eaglecli.commands._workload import workload_of
from eaglecli.engine.adaptive_policy import AdaptivePolicy
from eaglecli.engine.modes import accept_length
from eaglecli.engine.request import Completion, Request
from eaglecli.engine.settings import PLAIN
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import LOW_ACCEPT_LENGTH, AcceptTotals
from eaglecli.io.console import Console
from eaglecli.io.earlier_run import KeptResults
from eaglecli.io.error_limit import ErrorLimit, TooManyErrors
from eaglecli.io.eta import Workload
from eaglecli.io.garbage_pauses import seldom_garbage_pauses
from eaglecli.io.helper_process import HelperProcess
from eaglecli.io.output_formats import write_output_format
from eaglecli.io.prefetch import Prefetch
from eaglecli.io.progress import Progress
from eaglecli.io.records import RecordError
from eaglecli.io.result_lines import Answer, LineMaker
from eaglecli.io.results import MakeLines, ResultWriter
from eaglecli.io.run_directory import ERRORS, MANIFEST, STATS, RunDirectory
from eaglecli.io.run_report import RunReport, build_manifest, build_stats
from eaglecli.io.signals import FirstSignal, Interrupted
from eaglecli.io.thread_switching import quick_thread_switches
from eaglecli.io.tokenizer import PromptTokenizer

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_AHEAD = 512  # requests made before the engine takes them; it holds its own window of them
FREE_SPACE = "free some space; finished lines are kept, the same command goes on"


@dataclass(frozen=True)
class GenerateResult:
    """How a run ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


@dataclass(eq=False)
class Run:
    """From the state in which a directory was found to the end. `models` None: no record that is left can be used."""

    report: RunReport
    folder: RunDirectory
    kept: KeptResults
    totals: AcceptTotals | None
    models: ModelSource | None
    console: Console
    signal: FirstSignal

    def __post_init__(self) -> None:
        self.limit = ErrorLimit(self.report.settings.max_errors, self.report.settings.max_error_rate)
        self.opened: OpenedEngine | None = None
        self.reading: HelperProcess | None = None
        self.writing: HelperProcess | None = None
        self.writer: ResultWriter | None = None
        self.progress: Progress | None = None
        self.prepared: Prefetch[Request | RecordError] | None = None
        self.source: RequestSource | None = None
        self.end_token_ids: tuple[int, ...] = ()

    def execute(self) -> GenerateResult:
        """Whatever ends the run, finished lines are on disk and both reports are written. Raises what made it fail."""
        status, code, failure = "failed", ExitCode.INTERNAL, None
        try:
            self._write_manifest("running", None)
            self._work()
            status, code = "complete", self._exit_code()
        except Interrupted as interrupted:
            status, code = "interrupted", interrupted.take()
            goes_on = "" if self.report.selection.is_read_once else ", the same command goes on"
            self.console.warning(f"{interrupted}: stopped; finished lines are kept in {self.folder.path}{goes_on}")
        except TooManyErrors as stop:
            status, code = "stopped", ExitCode.PARTIAL
            self.console.error(str(stop), f"see {self.folder.path / ERRORS}; the same command with a higher limit goes on")
        except Exception as error:
            failure = _as_user_error(error)
            code = failure.exit_code if isinstance(failure, UserError) else code
        failure = self._let_go(failure)
        if status == "interrupted" and failure is not None:  # how it ended stays what it was asked to be
            self.console.warning(str(failure))
            failure = None
        result = self._write_reports(status, code, failure)
        self._say_result()
        return result

    def _work(self) -> None:
        try:
            self._generate()
            self._finish()
        except Exception:
            self.signal.check()  # that it may have been, before something made another exception of it
            raise

    def _generate(self) -> None:
        started = time.perf_counter()
        if self.models is None or self.limit.is_passed(self.report.scan.num_bad, self._num_records()):
            self._set_bad_records_aside()
            return
        tokenizer = prepare_tokenizer(self.models.load_tokenizer(), self.report.settings)
        self._begin_helpers(tokenizer)
        self.opened = self._open(self.models)
        self.report.load_s = time.perf_counter() - started
        self.signal.check()
        maker = RequestMaker(self.report.settings, tokenizer, self.opened.rules)
        self.end_token_ids = maker.end_token_ids
        self.console.note(maker.describe(self.report.scan))
        self._open_files(self._line_maker(tokenizer))
        size = 1 if self.report.selection.is_read_once else BLOCK  # behind a record of a pipe there may be nothing for long
        blocks = self._blocks(maker, size)
        self.prepared = Prefetch(([maker.take(item) for item in block] for block in blocks), READ_AHEAD // size)
        enough = self.report.settings.max_running_requests
        source = self.source = RequestSource(self.prepared, self._take_error, enough, self.report.selection.is_read_once)
        started = time.perf_counter()
        try:
            with quick_thread_switches(), seldom_garbage_pauses():
                while source.has_more:
                    for completion in self.opened.engine.generate(source):
                        self.signal.check()
                        self._take(completion, maker.dialogues, source)
        finally:
            self.report.generate_s = time.perf_counter() - started

    def _begin_helpers(self, tokenizer: PromptTokenizer) -> None:
        """Where the engine's thread feeds a GPU, reading and writing take another process's time. They start while the models load."""
        if self.report.settings.device != "cuda":
            return
        self.writing = HelperProcess(LineMaker, tokenizer, self._num_steps())
        if not self.report.selection.is_read_once:
            self.reading = HelperProcess(BlockReader, tokenizer, self.report.selection, self.report.scan.ids, self._sample_plan())

    def _blocks(self, maker: RequestMaker, size: int) -> Iterator[list[Prepared]]:
        if self.reading is not None:
            return call_for_blocks(self.reading, self.report.settings, maker.rules, size)
        return prepare_blocks(self.report.reader.records(), maker, self._sample_plan(), size)

    def _line_maker(self, tokenizer: PromptTokenizer | None) -> MakeLines:
        writing = self.writing
        return LineMaker(tokenizer, self._num_steps()).lines if writing is None else lambda results: writing.call("lines", results)

    def _num_steps(self) -> int | None:
        return None if self.totals is None else self.totals.num_steps

    def _open(self, models: ModelSource) -> OpenedEngine:
        opened = models.open_engine(self.report.settings, self.report.scan.needs)
        for line in opened.summary:
            self.console.note(line)
        for line in opened.warnings:
            self.console.warning(line)
        if isinstance(opened.policy, AdaptivePolicy):
            opened.policy.watch = self.console.detail
        self.report.settings = self.report.settings.with_derived(**opened.settled)
        self.report.models = opened.summary
        self._write_manifest("running", None)
        return opened

    def _open_files(self, make_lines: MakeLines) -> None:
        self.writer = ResultWriter(self.folder.path, make_lines, self.kept.answers, self.kept.errors)
        already_done = self.kept.num_answers + self.kept.num_errors
        scan, settings = self.report.scan, self.report.settings
        total = scan.num_results(settings.num_samples)
        counted = "record" if total == scan.num_records else "answer"
        self.progress = Progress(self.console, settings.progress, total, already_done, look=self._workload, counted=counted)

    def _set_bad_records_aside(self) -> None:
        """All that can be done without a model."""
        self._open_files(self._line_maker(None))
        plan = self._sample_plan()
        for record in self.report.reader.records():
            if isinstance(record, RecordError) and not plan.is_done(record):
                self._take_error(record)

    def _sample_plan(self) -> SamplePlan:
        return SamplePlan(self.report.settings.num_samples, self.kept.done)

    def _take(self, completion: Completion, dialogues: Dialogues, source: RequestSource) -> None:
        source.finished()
        if completion.finish_reason == "error":
            dialogues.end(completion)
            key, sample = completion.request.key, completion.request.sample
            self._take_error(RecordError(key, "numeric", completion.error or "generation failed", "", sample=sample))  # type: ignore[arg-type]
            return
        follow_up = dialogues.next_turn(completion)
        if isinstance(follow_up, Request):
            source.put(follow_up)
        elif follow_up is not None:
            self._take_error(follow_up)
        else:
            self._take_answer(dialogues.end(completion))

    def _take_answer(self, turns: Sequence[Completion]) -> None:
        counts = None
        if self.totals is not None:
            counts = counts_of(turns, self.end_token_ids)
            self.totals.add(counts)
        answer = build_answer(turns, counts)
        self.report.count_answer(answer)
        self._write(answer, len(answer.token_ids))

    def _take_error(self, error: RecordError) -> None:
        self.report.count_error(error)
        self._write(error, 0)
        self.console.detail(f"{error.key.file}, line {error.key.line}: {error.message} ({error.code})")
        if error.is_skipped:
            return
        if self.report.settings.on_error == "stop":
            raise stop_at(error)
        if self.opened is not None:  # without a model all bad records are set aside before the limit is looked at
            self.limit.check(self.report.num_failed_records, self._num_records())

    def _write(self, result: Answer | RecordError, num_tokens: int) -> None:
        assert self.writer is not None and self.progress is not None, "files are opened before anything is generated"
        self.writer.put(result)
        self.progress.record_done(num_tokens, self.totals.accept_length if self.totals else None)

    def _finish(self) -> None:
        """Order and other formats: only of a run that has come to its end."""
        assert self.writer is not None
        self._stop_threads()
        self.writer.close(self.report.settings.ordered)
        self.limit.check(self.report.num_failed_records, self._num_records())
        write_output_format(self.report.settings.output_format, self.folder.path, self.report.settings.target or "")

    def _num_records(self) -> int | None:
        scan = self.report.scan
        return scan.num_records if scan.is_complete else None

    def _workload(self) -> Workload:
        """Where the run stands; called from the thread of the progress lines."""
        if self.opened is None or self.source is None:
            return Workload()
        scan, num_seen = self.report.scan, self.source.num_read
        if not scan.is_complete:
            return workload_of(self.opened.engine.outlook, None)
        num_results = scan.num_results(self.report.settings.num_samples)
        return workload_of(self.opened.engine.outlook, max(0, num_results - self.kept.num_answers - self.kept.num_errors - num_seen))

    def _exit_code(self) -> ExitCode:
        if not self.report.num_done:
            return ExitCode.NOTHING_DONE
        return ExitCode.PARTIAL if self.report.num_failed else ExitCode.OK

    def _stop_threads(self) -> None:
        if self.prepared is not None:
            self.prepared.close()
        if self.progress is not None:
            self.progress.close()

    def _let_go(self, failure: Exception | None) -> Exception | None:
        """Closes what is open and keeps the first failure. After a good end there is nothing left to close."""
        self._stop_threads()
        try:
            if self.writer is not None:
                self.writer.close(ordered=False)
        except Exception as error:
            failure = failure or error
        for helper in (self.reading, self.writing):
            if helper is not None:
                helper.close()
        return failure

    def _write_manifest(self, status: str, code: ExitCode | None) -> None:
        try:
            self.folder.write_json(MANIFEST, build_manifest(self.report, status, code))
        except OSError as error:
            raise _reports_failed(error) from error

    def _write_reports(self, status: str, code: ExitCode, failure: Exception | None) -> GenerateResult:
        """Raises `failure`, if there is one, after it has written them as far as that is possible."""
        summary = self.opened.engine.summary() if self.opened is not None else {}
        stats = build_stats(self.report, self.totals, summary)
        try:
            self.folder.write_json(STATS, stats)
            self._write_manifest(status, code)
        except (OSError, UserError) as error:
            raise failure or _reports_failed(error) from error
        if failure is not None:
            raise failure
        return GenerateResult(code, describe_run(stats, status, code, self.folder))

    def _say_result(self) -> None:
        report, say = self.report, self.console.note
        num_tokens = report.session.num_output_tokens
        rate = num_tokens / report.generate_s if report.generate_s else 0.0
        speed = f"{num_tokens} tokens in {report.generate_s:.1f} s, {rate:.1f} token/s"
        say(f"{report.num_done} done, {report.num_failed} failed; {speed}")
        if self.totals is not None and self.totals.accept_length is not None:
            self._say_accept_length(self.totals)
        shares = describe_shares(self.opened.engine.summary()) if self.opened is not None else None
        if shares:
            say(shares)
        if report.num_skipped:
            self.console.warning(f"{report.num_skipped} records were too long and skipped, see {self.folder.path / ERRORS}")
        if report.num_failed:
            self.console.warning(f"{report.num_failed} records failed, see {self.folder.path / ERRORS}")
        say(f"results in {self.folder.path}")

    def _say_accept_length(self, totals: AcceptTotals) -> None:
        length = totals.accept_length or 0.0
        engine = self.opened.engine if self.opened is not None else None
        modes = engine.modes if engine is not None else []
        has_plain = len(modes) > 1 and any(mode.speculation == PLAIN for mode in modes)
        plain = ", those without drafts among them" if has_plain else ""
        self.console.note(f"accept length {length:.3f} ((accepted + steps) / steps), {totals.num_verify_steps} verify steps{plain}")
        if has_plain:  # of the steps that had drafts; where there were none, nothing is said against them
            drafting = [mode for mode in modes if mode.speculation != PLAIN]
            counts = sum(mode.num_accepted_drafts for mode in drafting), sum(mode.num_row_steps for mode in drafting)
            length = accept_length(*counts) or LOW_ACCEPT_LENGTH
        has_adapted = engine is not None and isinstance(engine.policy, AdaptivePolicy)  # it has gone by what the draft is worth
        if length < LOW_ACCEPT_LENGTH and not has_adapted:
            self.console.warning(
                f"accept length below {LOW_ACCEPT_LENGTH}: this draft hardly ever guesses right here; plain decoding may be faster"
            )
        if totals.num_identity_violations:
            self.console.warning(
                f"the counts of {totals.num_identity_violations} records do not close (C = T + A + V - cut): please report this"
            )


def describe_run(stats: dict[str, Any], status: str, code: ExitCode, folder: RunDirectory) -> dict[str, Any]:
    """What --json prints."""
    return {**stats, "status": status, "exit_code": int(code), "output": str(folder.path)}


def stop_at(error: RecordError) -> UserError:
    """The sentence of `--on-error stop`."""
    return UserError(
        f"{error.key.file}, line {error.key.line}: {error.message} ({error.code})", "mend the record, or use --on-error record"
    )


def _as_user_error(error: Exception) -> Exception:
    """Lost memory and a full disk get their sentences; anything else stays what it is."""
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return UserError(f"a file of the run cannot be written: {error.strerror}", FREE_SPACE, ExitCode.INTERNAL)
    return out_of_memory(error) or error


def _reports_failed(error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    reason = getattr(error, "strerror", None) or error
    return UserError(f"the reports of the run cannot be written: {reason}", FREE_SPACE, ExitCode.INTERNAL)
