"""What `eaglecli bench` can be told beyond a run's settings, checked, and the configurations that it measures."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import COMMAND_LINE, GenerateSettings, shipped_shapes
from eaglecli.engine.settings import PLAIN, SpeculationSettings, check_simulated_length
from eaglecli.errors import UserError
from eaglecli.models.dummy_draft import DUMMY_DRAFT

EVALUATION_SETS = ("mt-bench", "gsm8k", "humaneval", "alpaca", "sum", "qa")
RANDOM, SHAREGPT, CUSTOM, EVALUATION = "random", "sharegpt", "custom", "eval"
DATASET_NAMES = (RANDOM, SHAREGPT, CUSTOM, EVALUATION, *EVALUATION_SETS)
CHOOSING_MODES = ADAPTIVE, TABLE = ("adaptive", "table")  # names of configurations whose engine holds several triples
Tool = Literal["sglang", "vllm"]
_CONFIGURATION = re.compile(r"\d+,\d+,\d+,\d+")


@dataclass(frozen=True)
class BenchConfiguration:
    """One line of the table."""

    batch_size: int
    plan: SpeculationPlan

    @property
    def fixed(self) -> SpeculationSettings | None:
        """The one triple; None where the engine chooses between several."""
        return None if self.plan.is_adaptive or self.plan.table is not None else self.plan.first

    @property
    def has_drafts(self) -> bool:
        """Whether anything but plain decoding may run."""
        return self.plan.deepest.num_steps > 0

    @property
    def mode(self) -> str:
        """steps/topk/draft tokens, plain, adaptive or table."""
        if self.fixed is None:
            return ADAPTIVE if self.plan.is_adaptive else TABLE
        return str(self.fixed) if self.has_drafts else "plain"

    @property
    def label(self) -> str:
        """Its name in files and messages."""
        return f"batch {self.batch_size}, {self.mode}"


@dataclass(frozen=True)
class BenchOptions:
    """Options of bench alone; names are the long options in snake_case."""

    dataset_name: str | None = None
    dataset_path: tuple[str, ...] = ()
    num_prompts: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float | None = None
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    batch_size: tuple[int, ...] = ()
    config_list: tuple[str, ...] = ()
    num_warmups: int | None = None
    skip_warmup: bool = False
    repeat: int = 3
    baseline: bool = False
    disable_ignore_eos: bool = False
    simulate_acc_len: float | None = None
    compat: Tool | None = None
    metric_names: Tool = "sglang"
    compare: tuple[str, ...] = ()
    assert_throughput: float | None = None
    assert_accept_length: float | None = None
    assert_speedup: float | None = None
    assert_adaptive_ratio: float | None = None
    profile: str | None = None
    profile_steps: int = 20
    output_json: str | None = None
    plot: bool = True

    @property
    def dataset(self) -> str:
        """The data set, `custom` where only files are named."""
        return self.dataset_name or (CUSTOM if self.dataset_path else RANDOM)

    @property
    def is_random(self) -> bool:
        """Whether prompts are noise."""
        return self.dataset == RANDOM

    @property
    def range_ratio(self) -> float:
        """Of random lengths: 0 is SGLang's and vLLM's default, with two meanings, see `_bench_prompts`."""
        return 0.0 if self.random_range_ratio is None else self.random_range_ratio


OPTION_NAMES = tuple(item.name for item in fields(BenchOptions))


def resolve_options(given: Mapping[str, Any]) -> BenchOptions:
    """Options from the command line's `given` values, checked against one another. Raises UserError."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name in ("batch_size", "config_list"):
        if isinstance(values.get(name), str):
            values[name] = tuple(values[name].split(";") if name == "config_list" else _sizes(values[name]))
    options = BenchOptions(**values)
    for name in ("num_prompts", "random_input_len", "random_output_len", "repeat", "profile_steps", "num_warmups"):
        value, least = getattr(options, name), int(name != "num_warmups")
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if options.dataset not in DATASET_NAMES:
        raise UserError(f"--dataset-name {options.dataset} is not known", f"use one of {', '.join(DATASET_NAMES)}")
    if options.is_random and options.dataset_path:
        raise UserError("--dataset-name random makes its prompts, --dataset-path names a file", "leave one of the two out")
    if not options.is_random and not options.dataset_path and len(options.compare) < 2:
        raise UserError(f"--dataset-name {options.dataset} needs its file", "name it with --dataset-path")
    if not 0 <= options.range_ratio <= 1:
        raise UserError(f"--random-range-ratio {options.range_ratio:g} must be between 0 and 1")
    if options.skip_warmup and options.num_warmups:
        raise UserError("--skip-warmup and --num-warmups contradict each other", "leave one of the two out")
    if len(options.compare) > 2:
        raise UserError("--compare takes one file (this run against it) or two (the second against the first)")
    if len(options.compare) == 2:
        _check_nothing_runs(options)
    _check_assertions(options)
    return options


def _check_nothing_runs(options: BenchOptions) -> None:
    of_a_run = ("output_json", "profile", "assert_throughput", "assert_accept_length", "assert_speedup", "assert_adaptive_ratio")
    for name in of_a_run:
        if getattr(options, name) is not None:
            raise UserError(f"--compare with two files runs nothing, --{name.replace('_', '-')} is about a run", "leave one of them out")


def _check_assertions(options: BenchOptions) -> None:
    if options.assert_accept_length is not None and options.is_random:
        raise UserError(
            "--assert-accept-length means nothing on random prompts: they are noise, and drafts are trained on language",
            "name a data set with --dataset-path",
        )
    if options.assert_accept_length is not None and options.simulate_acc_len is not None:
        raise UserError("--assert-accept-length and --simulate-acc-len contradict each other", "leave one of the two out")
    if options.assert_speedup is not None and not options.baseline:
        raise UserError("--assert-speedup needs the plain run to compare with", "add --baseline")
    if options.simulate_acc_len is not None and options.disable_ignore_eos:
        raise UserError("with --simulate-acc-len the text means nothing, so it has no end", "leave --disable-ignore-eos out")


def check_places(options: BenchOptions) -> None:
    """Where results beside the run directory go must be writable before anything is measured. Raises UserError."""
    if options.output_json is not None:
        file = Path(options.output_json).absolute()
        can_write = os.access(file, os.W_OK) and not file.is_dir() if file.exists() else os.access(file.parent, os.W_OK | os.X_OK)
        if not can_write:
            raise UserError(f"--output-json {options.output_json} cannot be written", "name a file in a folder that is there")
    if options.profile is not None:
        with contextlib.suppress(OSError):
            Path(options.profile).mkdir(parents=True, exist_ok=True)
        if not os.access(options.profile, os.W_OK | os.X_OK):
            raise UserError(f"--profile {options.profile} cannot be written", "name another folder")


def with_bench_defaults(settings: GenerateSettings, options: BenchOptions) -> GenerateSettings:
    """A run's settings as the bench uses them: the peer's temperature and seed, end of text ignored, a named shape as its file."""
    derived: dict[str, Any] = {"ignore_eos": not options.disable_ignore_eos}
    if options.compat and settings.origin("temperature") != COMMAND_LINE:
        derived["temperature"] = 1.0 if options.compat == "vllm" else 0.0
    if options.compat == "sglang" and settings.origin("random_seed") != COMMAND_LINE:
        derived["random_seed"] = 42
    if options.dataset_path:
        derived["input"] = options.dataset_path
    shape = shipped_shapes().get(settings.target or "")
    if settings.load_format == "dummy" and shape is not None and not Path(settings.target or "").exists():
        derived["target"] = str(shape)
    return settings.with_derived(**derived)


def configurations(options: BenchOptions, chosen: SpeculationSettings, has_draft: bool) -> tuple[BenchConfiguration, ...]:
    """What is measured, in order: the listed ones, else every batch size with the chosen triple; with --baseline plain decoding first.

    `chosen` is the triple of the run's settings. Raises UserError.
    """
    if options.config_list:
        listed = tuple(map(_parse_configuration, options.config_list))
    else:
        listed = tuple(BenchConfiguration(size, SpeculationPlan(chosen)) for size in options.batch_size or (1,))
    if options.config_list and options.batch_size:
        raise UserError("--config-list and --batch-size both name batch sizes", "leave --batch-size out")
    if any(item.has_drafts for item in listed) and not has_draft:
        raise UserError("a configuration with steps needs a draft", f"name one with --draft (`{DUMMY_DRAFT}`: random weights)")
    if options.simulate_acc_len is not None and not any(item.has_drafts for item in listed):
        raise UserError("--simulate-acc-len needs a draft to simulate", f"name one with --draft (`{DUMMY_DRAFT}`: random weights)")
    for item in listed if options.simulate_acc_len is not None else ():
        if item.has_drafts:
            check_simulated_length(options.simulate_acc_len, item.plan.first.num_steps)
    plain = (BenchConfiguration(size, SpeculationPlan(PLAIN)) for size in dict.fromkeys(item.batch_size for item in listed))
    return tuple(dict.fromkeys((*(plain if options.baseline else ()), *listed)))


def _parse_configuration(text: str) -> BenchConfiguration:
    if not _CONFIGURATION.fullmatch(text):
        raise UserError(f"--config-list {text} must be batch,steps,topk,draft_tokens", "as in 8,5,1,6; 8,0,1,1 is plain decoding")
    batch_size, steps, topk, nodes = map(int, text.split(","))
    if batch_size < 1:
        raise UserError(f"--config-list {text}: the batch size must be at least 1")
    return BenchConfiguration(batch_size, SpeculationPlan(SpeculationSettings(steps, topk, nodes) if steps else PLAIN))


def _sizes(text: str) -> Sequence[int]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--batch-size {text} must be a list of batch sizes of at least 1", "as in 1 8 32, or 1,8,32")
    return tuple(dict.fromkeys(map(int, parts)))


def for_triple(settings: GenerateSettings, speculation: SpeculationSettings, batch_size: int) -> GenerateSettings:
    """Settings that name this triple and batch size: what graphs are chosen by."""
    triple = {
        "speculative_num_steps": speculation.num_steps or None,
        "speculative_eagle_topk": speculation.topk if speculation.num_steps else None,
        "speculative_num_draft_tokens": speculation.num_draft_tokens if speculation.num_steps else None,
        "num_speculative_tokens": None,
    }
    return replace(settings, max_running_requests=batch_size, **triple)
