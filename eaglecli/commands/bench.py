"""`eaglecli bench`: throughput of configurations (batch size and triple, or a choice of triples) on one set of prompts, in one process.

Load, capture, warm-up and timed seconds are told apart. Every configuration warms up with its own shapes, is timed `--repeat` times
over all prompts, and is then run once more with clocks in its stages. Figures are about what was timed; nothing else runs meanwhile.
"""

import datetime
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from eaglecli.commands._bench_adaptive import describe_choosing, put_ratios_to_best, with_choosing
from eaglecli.commands._bench_checks import check_assertions, put_speedups, warn_of_losses, warn_of_simulation
from eaglecli.commands._bench_engine import BenchEngine, BenchModels, find_bench_models, load_bench_models, open_bench_engine
from eaglecli.commands._bench_measure import Measurement, measure
from eaglecli.commands._bench_output import write_generations, write_plot
from eaglecli.commands._bench_prompts import BenchData, read_prompts
from eaglecli.commands._bench_settings import (
    OPTION_NAMES,
    BenchConfiguration,
    BenchOptions,
    check_places,
    configurations,
    resolve_options,
    with_bench_defaults,
)
from eaglecli.commands._bench_stages import write_trace
from eaglecli.commands._environment import describe_environment
from eaglecli.commands._open_engine import find_device, has_draft, out_of_memory, speculation_of
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import DEFAULT_CONFIG, GenerateSettings, find_config, read_config, resolve_settings
from eaglecli.engine.device_memory import release_memory
from eaglecli.engine.settings import PLAIN
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import DEFINITIONS
from eaglecli.io.bench_results import (
    BENCH,
    RESULTS,
    SAMPLING_CONDITIONS,
    check_comparable,
    compare_benches,
    configuration_key,
    read_bench,
    to_lines,
    vllm_names,
)
from eaglecli.io.bench_table import choice_table, comparison_table, context_table, speed_table, stage_table
from eaglecli.io.console import Console
from eaglecli.io.line_file import replace_with
from eaglecli.io.run_directory import RunDirectory, check_output
from eaglecli.io.signals import FirstSignal, Interrupted, interruptible

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchTask:
    """What is to be done: a run's settings and those of bench alone."""

    settings: GenerateSettings
    options: BenchOptions


@dataclass(frozen=True)
class BenchResult:
    """How the command ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


def resolve(given: Mapping[str, Any], config_name: str | None) -> BenchTask:
    """A task from the command line's `given` values and a config file. Raises UserError."""
    options = resolve_options({name: value for name, value in given.items() if name in OPTION_NAMES})
    config_name = config_name or (None if "target" in given else DEFAULT_CONFIG)
    config = read_config(find_config(config_name)) if config_name else None
    settings = resolve_settings({name: value for name, value in given.items() if name not in OPTION_NAMES}, config, find_device)
    return BenchTask(with_bench_defaults(settings, options), options)


def bench(task: BenchTask, console: Console, command_line: list[str]) -> BenchResult:
    """Runs the command. Raises UserError for what stops it."""
    options = task.options
    if len(options.compare) == 2:
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        old, new = (read_bench(Path(name)) for name in options.compare)
        is_good = _compare(old, new, document, console)
        return BenchResult(ExitCode.OK if is_good else ExitCode.CHECK_FAILED, document)
    earlier = read_bench(Path(options.compare[0])) if options.compare else None  # before anything is loaded
    models, fit = find_bench_models(task.settings)
    can_draft = has_draft(task.settings)
    listed = with_choosing(configurations(options, speculation_of(task.settings), can_draft), options, task.settings, can_draft)
    check_places(options)
    if earlier is not None:
        check_comparable(earlier, [configuration_key(item.label, options.simulate_acc_len if item.has_drafts else None) for item in listed])
    data = read_prompts(options, task.settings, models, max(item.batch_size for item in listed), console)
    output = _output(task, data)
    with RunDirectory(output) as folder:
        if task.settings.overwrite:
            folder.clear()
        console.attach_log(folder.log)
        try:
            with interruptible() as signal:
                loaded = load_bench_models(models, fit, task.settings)
                return _Bench(task, listed, data, loaded, folder, console, command_line, signal).run(earlier)
        except (RuntimeError, MemoryError) as error:
            told = out_of_memory(error)
            if told is None:
                raise
            raise told from error
        finally:
            console.attach_log(None)


@dataclass
class _Bench:
    """One call, models loaded and directory open."""

    task: BenchTask
    listed: tuple[BenchConfiguration, ...]
    data: BenchData
    models: BenchModels
    folder: RunDirectory
    console: Console
    command_line: list[str]
    signal: FirstSignal
    found: list[dict[str, Any]] = field(default_factory=list)
    started_at: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def run(self, earlier: Mapping[str, Any] | None) -> BenchResult:
        """Measures everything; what is finished is on disk when a signal comes."""
        self._introduce()
        try:
            for plan, group in _by_plan(self.listed):
                self._measure_plan(plan, group)
        except Interrupted as interrupted:
            code = interrupted.take()
            what = f"what was measured is in {self.folder.path}" if self.found else "nothing was measured yet"
            self.console.warning(f"{interrupted}: stopped; {what}")
            document = self._document("interrupted", code)
            if self.found:  # a directory without results is no run, and the same command may begin there anew
                self._conclude()
                self._write(document)
            return BenchResult(code, document)
        self._conclude()
        return self._end(earlier)

    def _conclude(self) -> None:
        """What configurations say of one another."""
        self.found.sort(key=lambda item: self._place(item["label"]))
        put_speedups(self.found)
        put_ratios_to_best(self.found)
        self._say_tables()

    def _write(self, document: Mapping[str, Any]) -> None:
        replace_with(self.folder.path / RESULTS, [to_lines(self.found)])
        self.folder.write_json(BENCH, document)
        if self.task.options.output_json is not None:
            _copy(self.folder.path / BENCH, Path(self.task.options.output_json))

    def _measure_plan(self, plan: SpeculationPlan, group: Sequence[BenchConfiguration]) -> None:
        settings, options = self.task.settings, self.task.options
        sizes = [item.batch_size for item in group]
        opened = open_bench_engine(self.models, settings, plan, sizes, self.data.requests, options.simulate_acc_len)
        self.console.note(f"{group[0].mode}: engine ready in {opened.capture_s:.1f} s, {opened.graphs}")
        self._refuse_what_cannot_run(opened)
        for configuration in group:
            self.signal.check()  # what was imported and captured may have swallowed it
            measurement = measure(opened, self.models, self.data, configuration, options)
            self._keep(measurement)
            if options.profile is not None:
                name = f"trace-b{configuration.batch_size}-{configuration.mode.replace('/', '-')}.json.gz"
                file = Path(options.profile) / name
                write_trace(opened.engine, self.data.requests, configuration.batch_size, options.profile_steps, file)
                self.console.note(f"trace of {options.profile_steps} iterations in {file}")
        del opened
        release_memory()

    def _keep(self, measurement: Measurement) -> None:
        item = measurement.document
        if self.task.options.metric_names == "vllm" or self.task.options.compat == "vllm":
            item |= vllm_names(item)
        self.found.append(item)
        replace_with(self.folder.path / RESULTS, [to_lines(self.found)])
        if self._has_text:
            write_generations(self.folder.path, measurement, self.data, is_first=len(self.found) == 1)
        timing, warmth = item["timing"], item["warmup"]
        agreed = {True: "two windows agree", False: "windows do not agree", None: "windows as asked for"}[warmth["agreed"]]
        self.console.note(
            f"{item['label']}: {item['output_throughput']:.1f} token/s; warm-up {timing['warmup_s']:.1f} s "
            f"({len(warmth['windows'])}, {agreed}), timed {timing['timed_s']:.1f} s"
        )
        for line in describe_choosing(item) if "speculation" in item else ():
            self.console.note(line)
        if warmth["agreed"] is False:
            self.console.warning(f"{item['label']}: the speed had not settled when timing began; see `warmup` in {RESULTS}")

    @property
    def _has_text(self) -> bool:
        """Whether what comes out is text that means something."""
        is_dummy = self.task.settings.load_format == "dummy"
        return self.data.tokenizer is not None and self.task.options.simulate_acc_len is None and not is_dummy

    def _refuse_what_cannot_run(self, opened: BenchEngine) -> None:
        for request in self.data.requests:
            reason = opened.engine.refusal(request)
            if reason is not None:
                raise UserError(f"prompt {request.key} can never run: {reason}", "use shorter lengths, or more --max-total-tokens")

    def _introduce(self) -> None:
        settings, options, models, speed = self.task.settings, self.task.options, self.models, self.models.speed
        say = self.console.note
        say(f"target {_shown(settings.target)}: {', '.join(models.target.summary)}")
        say(f"draft {settings.draft}: {', '.join(models.draft.summary)}" if models.draft else "no draft: plain decoding")
        for warning in models.draft.warnings if models.draft else ():
            self.console.warning(warning)
        data = self.data.describe()
        lengths = "; ".join(
            f"{name} {data[key]['mean']:.1f} ({data[key]['min']}-{data[key]['max']})"
            for name, key in (("prompt tokens", "input_len"), ("most new tokens", "output_len"))
        )
        ends = "answers end where they end" if options.disable_ignore_eos else "end of text ignored"
        say(f"{data['num_prompts']} prompts of `{data['name']}`: {lengths}; temperature {settings.temperature:g}, {ends}")
        say(
            f"measured here: copy {speed.copy_bytes_per_s / 1e9:.0f} GB/s, weights x vector {speed.weight_bytes_per_s / 1e9:.0f} GB/s, "
            f"{speed.flops / 1e12:.2f} TFLOP/s; loaded in {models.load_s:.1f} s"
        )
        if options.simulate_acc_len is not None:
            self.console.warning(
                f"SIMULATED acceptance, {options.simulate_acc_len:g} tokens a step: the text means nothing and is not written"
            )
        elif options.is_random and models.draft is not None:
            self.console.warning("random prompts are noise: accept lengths on them say nothing about language")

    def _say_tables(self) -> None:
        tables: list[Iterator[str]] = [f(self.found) for f in (speed_table, choice_table, stage_table, context_table)]
        for table in tables:
            for line in table:
                self.console.note(line)
        if self.models.draft is not None:
            self.console.note(f"accept = {DEFINITIONS['accept_length']}")
        warn_of_losses(self.found, self.models.draft_limit, self.console)
        warn_of_simulation(self.found, self.console)

    def _end(self, earlier: Mapping[str, Any] | None) -> BenchResult:
        options = self.task.options
        checks = check_assertions(self.found, options, self.console)
        document = self._document("complete", ExitCode.OK)
        is_good = all(check["holds"] for check in checks)
        document["checks"] = checks
        if earlier is not None:
            is_good &= _compare(earlier, document, document, self.console)
        num_failed = sum(item["failed_requests"] for item in self.found)
        code = ExitCode.CHECK_FAILED if not is_good else ExitCode.PARTIAL if num_failed else ExitCode.OK
        document["exit_code"] = int(code)
        self._write(document)
        if options.plot:
            write_plot(self.folder.path, document, self.console)
        self.console.note(f"results in {self.folder.path}")
        return BenchResult(code, document)

    def _document(self, status: str, code: ExitCode) -> dict[str, Any]:
        settings, options, speed = self.task.settings, self.task.options, self.models.speed
        return {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "exit_code": int(code),
            "started_at": self.started_at,
            "command_line": self.command_line,
            "conditions": {
                "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
                "dtype": str(self.models.dtype).removeprefix("torch."),
                "weights": "dummy" if settings.load_format == "dummy" else "real",
                "target": _shown(settings.target),
                "draft": settings.draft if self.models.draft else None,
                "simulated_accept_length": options.simulate_acc_len,
                "is_deterministic": settings.enable_deterministic_inference,
                "context_length": self.models.context_length,
                **{name: getattr(settings, name) for name in SAMPLING_CONDITIONS},
                "draft_limit": self.models.draft_limit,
                "dataset": self.data.describe(),
            },
            "device_speed": vars(speed),
            "environment": describe_environment(),
            "settings": settings.described(),
            "options": vars(options),
            "configurations": self.found,
            "definitions": DEFINITIONS,
            "output": str(self.folder.path),
        }

    def _place(self, label: str) -> int:
        return next(place for place, item in enumerate(self.listed) if item.label == label)


def _by_plan(listed: Sequence[BenchConfiguration]) -> Iterator[tuple[SpeculationPlan, list[BenchConfiguration]]]:
    """Configurations that share an engine; plain decoding first, while the device is as cold as the others will find it warm."""
    order = list(dict.fromkeys(item.plan for item in listed))
    order.sort(key=lambda plan: plan.deepest != PLAIN)
    ranked = sorted(listed, key=lambda item: order.index(item.plan))
    for plan, group in groupby(ranked, key=lambda item: item.plan):
        yield plan, list(group)


def _shown(target: str | None) -> str | None:
    """A shape is known by its name, wherever its file lies."""
    return Path(target).stem if target and target.endswith(".json") else target


def _output(task: BenchTask, data: BenchData) -> Path:
    """The run directory, checked. The default one bears the time: benches are not taken up again."""
    settings = task.settings
    name = f"bench-{Path(settings.target or 'target').stem}-{data.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(settings.output) if settings.output else Path("runs") / name
    for path in map(Path, task.options.dataset_path or ("",)):
        check_output(output, path, settings.overwrite, takes_up=False)
    return output


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], document: dict[str, Any], console: Console) -> bool:
    """Say and note what became of each configuration; whether none is slower."""
    comparison = compare_benches(old, new)
    for line in comparison_table(comparison):
        console.note(line)
    for line in comparison.changed_conditions:
        console.warning(f"not the same conditions: {line}")
    document["compare"] = comparison.describe()
    if not comparison.is_good:
        console.error("something became slower", "see the ratios above")
    return comparison.is_good


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise UserError(f"--output-json {target} cannot be written: {error.strerror or error}", "name another file") from error
