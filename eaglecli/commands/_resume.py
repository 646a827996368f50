"""Taking up the run that a directory holds: is it the same run, what of it stays, what is left to do."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from eaglecli.commands._open_engine import whole_plan_of
from eaglecli.config import GenerateSettings
from eaglecli.errors import UserError
from eaglecli.io.accept_statistics import AcceptTotals
from eaglecli.io.console import Console
from eaglecli.io.earlier_run import EarlierRun, KeptResults, find_earlier_run, no_results, read_results
from eaglecli.io.run_directory import RunDirectory
from eaglecli.io.run_identity import (
    START_ANEW,
    RunIdentity,
    compare_runs,
    look_at_input,
    refuse_other_run,
    settings_that_change_text,
)
from eaglecli.io.run_report import RunReport

VERSIONS_THAT_MATTER = ("torch", "triton", "transformers", "tokenizers")


def identify(
    settings: GenerateSettings, sources: Sequence[str], models: Mapping[str, str | None], earlier: EarlierRun | None
) -> tuple[RunIdentity, list[str]]:
    """The identity of the run as it is asked for now, and in what it differs from the earlier one."""
    files, continues = look_at_input(sources, earlier.identity.input if earlier else ())
    speculation = str(whole_plan_of(settings))
    now = RunIdentity(files, settings_that_change_text(settings, speculation), models)
    return now, compare_runs(earlier.identity, now, continues) if earlier else []


def find_run_to_take_up(path: Path, settings: GenerateSettings) -> EarlierRun | None:
    """The earlier run that counts, or None when the run starts anew. One without any result is not worth a question.

    Raises UserError when there is one that must be neither taken up nor overwritten.
    """
    if settings.overwrite:
        return None
    earlier = find_earlier_run(path)
    if earlier is None or not earlier.has_results:
        return None
    if not settings.resume:
        raise UserError(f"--output {path} holds an earlier run, and --no-resume was given", START_ANEW)
    return earlier


def take_up(
    folder: RunDirectory,
    report: RunReport,
    models: Mapping[str, str | None],
    totals: AcceptTotals | None,
    console: Console,
) -> tuple[EarlierRun | None, KeptResults]:
    """The earlier run and its results that stay, counted in `report` and `totals`; clears the directory when there is none.

    Raises UserError when the directory holds another run, with the differences.
    """
    settings = report.settings
    earlier = find_run_to_take_up(folder.path, settings)
    report.identity, differences = identify(settings, report.selection.sources, models, earlier)
    if differences:
        raise refuse_other_run(folder.path, differences)
    if earlier is None:
        folder.clear()
        return None, no_results()
    kept = _read_kept(folder, report, settings, totals)
    report.earlier_sessions = list(earlier.manifest.get("sessions", []))
    _say(kept, report, earlier, console)
    return earlier, kept


def _read_kept(folder: RunDirectory, report: RunReport, settings: GenerateSettings, totals: AcceptTotals | None) -> KeptResults:
    def visit_answer(line: Mapping[str, object]) -> None:
        report.count_answer_line(line)
        if totals is not None:
            totals.add_line(line)

    try:
        return read_results(folder.path, settings.retry_failed, visit_answer, report.count_error_line)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the results in {folder.path} were not written by this version: {error!r}", START_ANEW) from error


def _say(kept: KeptResults, report: RunReport, earlier: EarlierRun, console: Console) -> None:
    errors = f", {kept.num_errors} failed" if kept.num_errors else ""
    console.note(f"{report.output} holds {kept.num_answers} answers{errors}: they are kept")
    dropped = kept.answers.num_dropped + kept.errors.num_dropped
    if dropped:
        console.warning(f"{dropped} lines in {report.output} are damaged or appear twice: they are left out")
    before, now = earlier.manifest.get("versions", {}), report.versions
    changed = [f"{name} {before[name]} -> {now[name]}" for name in VERSIONS_THAT_MATTER if before.get(name) != now.get(name)]
    if changed:
        console.warning(f"the answers that are kept were made with other versions: {', '.join(changed)}")
