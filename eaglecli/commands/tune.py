"""`eaglecli tune`: which triple, or none, is fastest on a sample of the user's data at each batch size; writes a config for `generate`.

One engine holds all candidates and races them batch size by batch size, see `engine/mode_race.py`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._input import read_input, select_input
from eaglecli.commands._open_engine import FoundModels, find_device, find_models, has_draft, out_of_memory
from eaglecli.commands._request_maker import RequestMaker
from eaglecli.commands._speculation import DEFAULT_CANDIDATES, MOST_VERIFIED_TOKENS
from eaglecli.config import (
    CHOOSER_SETTINGS,
    DEFAULT,
    DEFAULT_CONFIG,
    DERIVED,
    MODEL_SETTINGS,
    PATH_SETTINGS,
    SETTINGS,
    TRIPLE_SETTINGS,
    GenerateSettings,
    find_config,
    read_config,
    resolve_settings,
)
from eaglecli.engine.engine import Engine
from eaglecli.engine.mode_race import ModeRace, ModeTime, run_race
from eaglecli.engine.request import Request
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.console import Console
from eaglecli.io.line_file import replace_with
from eaglecli.io.records import RecordError
from eaglecli.io.signals import FirstSignal, Interrupted, interruptible
from eaglecli.models.model_path import BUILT_IN_NAME

SCHEMA_VERSION = 1
DEFAULT_BATCH_SIZES = (1, 4, 16, 64)
DEFAULT_NUM_PROMPTS, DEFAULT_NEW_TOKENS = 256, 256
WORTH_KEEPING = 0.9  # of the fastest's rate: so good, a mode stays a candidate for --speculative-adaptive
_OF_ONE_RUN = (  # what it reads, writes and shows, and what tune decides itself: no part of the config that is written
    *("input", "input_format", "encoding", "delimiter", "prompt_field", "id_field", "map", "prompt_template", "allow_blank", "keep_fields"),
    *("too_long", "samples", "shard", "shuffle_seed", "limit", "offset", "min_new_tokens", "max_new_tokens"),
    *("output", "overwrite", "resume", "retry_failed", "output_format", "ordered"),
    *("on_error", "max_errors", "max_error_rate", "progress"),
    *("cuda_graph_bs", "cuda_graph_max_bs", *TRIPLE_SETTINGS, *CHOOSER_SETTINGS),
)


@dataclass(frozen=True)
class TuneOptions:
    """Options of tune alone."""

    output: str
    batch_size: str | None = None  # 1,4,16
    config_list: str | None = None  # steps,topk,draft_tokens or batch,steps,topk,draft_tokens; one after the other, divided by ;
    seconds: float = 20.0  # at most, for each batch size
    first_round: int | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class TuneResult:
    """How the command ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


Candidates = dict[int, tuple[SpeculationSettings, ...]]  # by batch size, ascending
Races = dict[int, tuple[list[ModeTime], Sequence[SpeculationSettings]]]  # by batch size: what was measured, fastest first; names of modes


def resolve(given: Mapping[str, Any], config_name: str | None) -> GenerateSettings:
    """Settings from the command line's `given` values and a config file, with tune's own defaults. Raises UserError."""
    config_name = config_name or (None if "target" in given else DEFAULT_CONFIG)
    settings = resolve_settings(given, read_config(find_config(config_name)) if config_name else None, find_device)
    own = {"limit": DEFAULT_NUM_PROMPTS, "max_new_tokens": DEFAULT_NEW_TOKENS}
    return settings.with_derived(**{name: value for name, value in own.items() if settings.origin(name) == DEFAULT})


def tune(
    settings: GenerateSettings, options: TuneOptions, console: Console, find: Callable[[GenerateSettings], FoundModels] = find_models
) -> TuneResult:
    """Runs the command. Raises UserError for what stops it, Interrupted where nothing was measured yet."""
    output = _check_output(options.output, options.overwrite)
    if not 0 < options.seconds < math.inf:
        raise UserError(f"--seconds {options.seconds:g} must be a number above 0", f"as in {TuneOptions.seconds:g}")
    if options.first_round is not None and options.first_round < 1:
        raise UserError(f"--num-iters {options.first_round} must be at least 1")
    if not has_draft(settings):
        raise UserError("tune needs a draft: without one there is nothing to choose", "name one with --draft")
    if not settings.input:
        raise UserError("tune needs prompts like those that will be generated for", "name them with --input")
    candidates = choose_candidates(options)
    settings = _with_candidates(settings, candidates)
    races: Races = {}
    stopped = None
    try:
        with interruptible() as signal:
            _measure(settings, options, candidates, console, find, races, signal)
    except Interrupted as interrupted:
        if not races:
            raise
        stopped = interrupted
    except (MemoryError, RuntimeError) as error:
        raise out_of_memory(error) or error from error
    if not races:
        raise UserError("no batch size could be measured", f"give more than --seconds {options.seconds:g}")
    table = {str(size): _worth_keeping(times, names, size) for size, (times, names) in races.items()}
    _write_config(output, settings, table, races)
    if stopped is not None:
        console.warning(f"{stopped}: stopped; what was measured is in {output}")
        return TuneResult(stopped.exit_code, _document(settings, races, table, output, "interrupted", stopped.exit_code))
    console.note(f"{output} holds the table: eaglecli generate --config {output}")
    console.note("it is followed as it stands; with --speculative-adaptive its entries are what is chosen from while running")
    return TuneResult(ExitCode.OK, _document(settings, races, table, output, "complete", ExitCode.OK))


def choose_candidates(options: TuneOptions) -> Candidates:
    """What is tried at each batch size: the list given, else the defaults that verify few enough tokens; plain decoding always."""
    sizes = _batch_sizes(options.batch_size)
    listed = [tuple(map(int, item.split(","))) for item in _checked_list(options.config_list)]
    if any(len(item) == 4 for item in listed) and options.batch_size is None:
        sizes = tuple(sorted({item[0] for item in listed if len(item) == 4}))
    chosen: Candidates = {}
    for size in sizes:
        triples = [item[-3:] for item in listed if len(item) == 3 or item[0] == size] or [
            triple for triple in DEFAULT_CANDIDATES if triple[2] * size <= MOST_VERIFIED_TOKENS
        ]
        speculation = [SpeculationSettings(*triple) if triple[0] else PLAIN for triple in triples]
        chosen[size] = tuple(dict.fromkeys((PLAIN, *speculation)))
    return chosen


def _batch_sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return DEFAULT_BATCH_SIZES
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--batch-size {text} must be a list of batch sizes of at least 1", "as in 1 8 32, or 1,8,32")
    return tuple(sorted(set(map(int, parts))))


def _checked_list(text: str | None) -> Iterator[str]:
    for item in text.split(";") if text else ():
        parts = item.split(",")
        if len(parts) not in (3, 4) or not all(part.isdecimal() for part in parts) or (len(parts) == 4 and not int(parts[0])):
            raise UserError(
                f"--config-list {item} must be steps,topk,draft_tokens or batch,steps,topk,draft_tokens", "as in 5,1,6 or 8,5,1,6"
            )
        yield item


def _with_candidates(settings: GenerateSettings, candidates: Candidates) -> GenerateSettings:
    """Settings of an engine that holds all candidates and captures graphs for the measured batch sizes alone."""
    largest = max(candidates)
    names = {str(size): list(map(str, speculation)) for size, speculation in candidates.items()}
    engine = {"max_running_requests": largest, "cuda_graph_bs": tuple(candidates), "cuda_graph_max_bs": None}
    triple = dict.fromkeys(("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "num_speculative_tokens"))
    origins = {name: origin for name, origin in settings.origins.items() if name not in triple}
    cleared = replace(settings, **triple, origins=origins)
    return cleared.with_derived(**engine, speculative_adaptive=True, speculative_adaptive_config=names)


def _measure(
    settings: GenerateSettings,
    options: TuneOptions,
    candidates: Candidates,
    console: Console,
    find: Callable[..., FoundModels],
    races: Races,
    signal: FirstSignal,
) -> None:
    """Fills `races` batch size by batch size, so that what is finished is there when a signal comes."""
    reader = read_input(select_input(settings), settings, console)
    models = find(settings)
    settings = settings.with_generation_config(models.generation_config)
    tokenizer = prepare_tokenizer(models.load_tokenizer(), settings)
    opened = models.open_engine(settings)
    for line in opened.summary:
        console.note(line)
    requests = _requests(settings, RequestMaker(settings, tokenizer, opened.rules), reader.records(), console)
    assert isinstance(opened.engine, Engine)
    names = opened.engine.settings.all_speculation
    console.note(f"{'batch':>6}  {'triple':10}{'token/s':>10}{'accept':>8}{'ms':>9}{'steps':>7}")
    for size, speculation in candidates.items():
        signal.check()
        console.note(f"batch {size}: {len(speculation)} candidates take turns, for {options.seconds:g} s at most")
        started = time.perf_counter()
        race = ModeRace([names.index(item) for item in speculation], size, options.first_round)
        run_race(opened.engine, requests, race, options.seconds)
        measured = [item for item in race.ranking() if item.step_s]
        if not race.is_done:
            missing = "to be sure" if measured else "to measure anything, it is left out"
            console.warning(f"batch {size}: {time.perf_counter() - started:.0f} s were too short {missing}; --seconds gives more")
        if measured:
            races[size] = (measured, names)
            for line in _lines(races[size], size):
                console.note(line)


def _requests(settings: GenerateSettings, maker: RequestMaker, records: Iterator[Any], console: Console) -> list[Request]:
    """The sample: first turns of the records that can be used."""
    prepared = [maker.prepare(record) for record in islice(records, settings.limit)]
    requests = [item for item in prepared if not isinstance(item, RecordError)]
    if not requests:
        raise UserError("no record of the input can be used", "see what generate says of it", ExitCode.NOTHING_DONE)
    if len(requests) < len(prepared):
        console.warning(f"{len(prepared) - len(requests)} of {len(prepared)} records cannot be used and are left out")
    return requests


def _lines(race: tuple[list[ModeTime], Sequence[SpeculationSettings]], size: int) -> Iterator[str]:
    times, names = race
    for place, item in enumerate(times):
        mark = "  <- fastest" if place == 0 else ""
        step_ms = item.median_step_s * 1e3
        yield (
            f"{size:6}  {str(names[item.mode]):10}{item.tokens_per_second(size):10.1f}{item.tokens_per_row_step:8.2f}"
            f"{step_ms:9.2f}{len(item.step_s):7}{mark}"
        )


def _worth_keeping(times: Sequence[ModeTime], names: Sequence[SpeculationSettings], size: int) -> list[str]:
    """The fastest first, then those that come near it."""
    best = times[0].tokens_per_second(size)
    return [str(names[item.mode]) for item in times if item is times[0] or item.tokens_per_second(size) >= WORTH_KEEPING * best]


def _check_output(name: str, overwrite: bool) -> Path:
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--output {name} must be a YAML file", f"use {name}.yaml")
    if not path.parent.is_dir():
        raise UserError(f"--output {name}: there is no folder {path.parent}", "make it first")
    if path.is_dir():
        raise UserError(f"--output {name} is a folder", "name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"--output {name} cannot be written: no permission in {path.parent}", "name another file")
    if path.exists() and not overwrite:
        raise UserError(f"--output {name} is there already", "use --overwrite to replace it, or name another file")
    return path


def _write_config(path: Path, settings: GenerateSettings, table: Mapping[str, list[str]], races: Races) -> None:
    import yaml  # here, as in config.py

    asked = [name for name in SETTINGS if name not in _OF_ONE_RUN and settings.origin(name) not in (DEFAULT, DERIVED)]
    given: dict[str, Any] = {name: getattr(settings, name) for name in dict.fromkeys(("target", "draft", "max_running_requests", *asked))}
    for name in (*MODEL_SETTINGS, *PATH_SETTINGS):
        if given.get(name) not in (None, BUILT_IN_NAME) and Path(given[name]).exists():
            given[name] = str(Path(given[name]).resolve())
    document = {**given, "speculative_adaptive_config": {int(size): row for size, row in table.items()}}
    measured = [f"#{line}" for size, race in races.items() for line in _lines(race, size)]
    text = "\n".join(
        ["# Written by eaglecli tune: speculation by batch size, fastest first.", *measured, yaml.safe_dump(document, sort_keys=False)]
    )
    try:
        replace_with(path, [text.encode("utf-8")])
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror or error}", "name another file") from error


def _document(
    settings: GenerateSettings, races: Races, table: Mapping[str, Any], output: Path, status: str, code: ExitCode
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "exit_code": int(code),
        "target": settings.target,
        "draft": settings.draft,
        "table": dict(table),
        "measured": [
            {
                "batch_size": size,
                "speculation": str(names[item.mode]),
                "output_throughput": item.tokens_per_second(size),
                "accept_length": item.tokens_per_row_step,
                "iteration_s": item.median_step_s,
                "num_iterations": len(item.step_s),
            }
            for size, (times, names) in races.items()
            for item in times
        ],
        "output": str(output),
    }
