"""`eaglecli generate`: prompts in, a run directory of answers out.

Order of work: settings, output and input are checked before a model is looked at, models are held against each other
before the run directory is opened and compared with them, and only then weights are read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eaglecli.commands._dry_run import DryRunResult, dry_run
from eaglecli.commands._input import read_input, select_input
from eaglecli.commands._open_engine import ModelFinder, find_device, find_models, name_device, plan_of, whole_plan_of
from eaglecli.commands._resume import take_up
from eaglecli.commands._run import GenerateResult, Run, describe_run
from eaglecli.commands._samples import SamplePlan
from eaglecli.config import DEFAULT_CONFIG, MODELS_OWN_SAMPLING, GenerateSettings, find_config, read_config, resolve_settings
from eaglecli.errors import ExitCode
from eaglecli.io.accept_statistics import AcceptTotals
from eaglecli.io.console import Console
from eaglecli.io.earlier_run import EarlierRun, KeptResults
from eaglecli.io.output_formats import check_output_format, write_output_format
from eaglecli.io.prompts import InputSelection
from eaglecli.io.records import PromptRecord
from eaglecli.io.run_directory import ERRORS, RunDirectory, check_output, default_run_directory
from eaglecli.io.run_report import SCHEMA_VERSION, RunReport
from eaglecli.io.signals import FirstSignal, Interrupted, interruptible


def resolve(given: Mapping[str, Any], config_name: str | None, console: Console, needs_device: bool = True) -> GenerateSettings:
    """Settings from the command line's `given` values and a config file. Raises UserError.

    Without `needs_device` a device that is asked for need not be there: nothing will run on it.
    """
    config_name = config_name or (None if "target" in given else DEFAULT_CONFIG)
    config = read_config(find_config(config_name)) if config_name else None
    if config_name == DEFAULT_CONFIG and "target" not in given:
        console.note(f"config {config.path}" if config else "")
    if isinstance(given.get("stop_token_ids"), list | tuple):  # an option that was repeated
        given = {**given, "stop_token_ids": ",".join(given["stop_token_ids"])}
    return resolve_settings(given, config, find_device if needs_device else name_device)


def generate(settings: GenerateSettings, console: Console, command_line: list[str], find: ModelFinder = find_models) -> GenerateResult:
    """Runs the command. Raises UserError for what stops it before any record is generated."""
    try:
        with interruptible() as signal:
            return _generate(settings, console, command_line, find, signal)
    except Interrupted as interrupted:
        console.warning(f"{interrupted}: stopped")
        document = {"schema_version": SCHEMA_VERSION, "status": "interrupted", "exit_code": int(interrupted.exit_code)}
        return GenerateResult(interrupted.exit_code, document)


def _generate(
    settings: GenerateSettings, console: Console, command_line: list[str], find: ModelFinder, signal: FirstSignal
) -> GenerateResult:
    selection, output = _select(settings)
    speculation = whole_plan_of(settings).deepest  # its rules are checked before anything is read
    check_output_format(settings.output_format)
    reader = read_input(selection, settings, console)
    report = RunReport(command_line, settings, reader, output)
    totals = AcceptTotals(speculation.num_steps) if speculation.num_steps else None
    models = find(settings) if reader.scan.num_good or not reader.scan.is_complete else None
    with RunDirectory(output) as folder:
        fingerprints = models.fingerprints() if models else {}
        earlier, kept = take_up(folder, report, fingerprints, totals, console)
        console.attach_log(folder.log)
        try:
            left = _what_is_left(report, kept)
            if earlier is not None and earlier.exit_code is not None and (left == "nothing" or report.selection.is_read_once):
                return _already_complete(report, folder, earlier, console)
            run = Run(report, folder, kept, totals, models if left == "good records" else None, console, signal)
            if models is not None and left == "good records":
                report.settings = settings.with_generation_config(models.generation_config)
                _note_generation_config(report.settings, console)
            result = run.execute()
            if result.exit_code == ExitCode.NOTHING_DONE:
                _say_nothing_done(report, folder, console)
            return result
        finally:
            console.attach_log(None)


def preview(settings: GenerateSettings, console: Console) -> DryRunResult:
    """Everything about a run that can be known without doing it. Raises UserError as the run would."""
    selection, output = _select(settings)
    plan_of(settings)
    check_output_format(settings.output_format)
    reader = read_input(selection, settings, console)
    models = find_models(settings) if reader.scan.num_good or not reader.scan.is_complete else None
    return dry_run(RunReport([], settings, reader, output), models)


def _what_is_left(report: RunReport, kept: KeptResults) -> Literal["nothing", "bad records", "good records"]:
    """What the run still has to do. Reads the input up to the first good record that is not done; of a stream nobody knows."""
    if report.selection.is_read_once:
        return "good records" if report.scan.num_good or not report.scan.is_complete else "bad records"
    left, plan = "nothing", SamplePlan(report.settings.num_samples, kept.done)
    for record in report.reader.records():
        if plan.is_done(record):
            continue
        if isinstance(record, PromptRecord):
            return "good records"
        left = "bad records"
    return left  # type: ignore[return-value]


def _already_complete(report: RunReport, folder: RunDirectory, earlier: EarlierRun, console: Console) -> GenerateResult:
    """Ends at once with the first code; only a format that was not made then is made now."""
    code = ExitCode(earlier.exit_code or 0)
    write_output_format(report.settings.output_format, folder.path, report.settings.target or "")
    console.note(f"{folder.path} is complete: {report.num_done} done, {report.num_failed} failed; nothing is left to do")
    if report.num_failed:
        console.note(f"--retry-failed does the failed ones again; why they failed is in {folder.path / ERRORS}")
    return GenerateResult(code, describe_run(earlier.read_stats(), "complete", code, folder))


def _say_nothing_done(report: RunReport, folder: RunDirectory, console: Console) -> None:
    if report.scan.num_records == 0:
        console.error(f"{report.selection.name} has no records", "the model was not loaded")
    else:
        console.error("no record could be used", f"see {folder.path / ERRORS}")


def _select(settings: GenerateSettings) -> tuple[InputSelection, Path]:
    """The input and the run directory, held against each other."""
    selection = select_input(settings)
    output = Path(settings.output) if settings.output else default_run_directory(settings.target or "target", selection.path)
    for path in selection.paths or (selection.path,):
        check_output(output, path, settings.overwrite)
    return selection, output


def _note_generation_config(settings: GenerateSettings, console: Console) -> None:
    names = [name for name in MODELS_OWN_SAMPLING if settings.origin(name) == "generation_config"]
    if names:
        values = ", ".join(f"{name} {getattr(settings, name):g}" for name in names)
        console.note(f"the model's generation_config samples: {values} (--temperature 0 is greedy)")
