"""`eaglecli capture`: capture every graph of a configuration, tell what each costs, and check them against the stages run eagerly.

Without a GPU nothing is captured; the same padded stages are checked on the CPU.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eaglecli.commands._graphs import (
    MIB,
    capture_graphs,
    choose_backend,
    describe_graphs,
    left_out_sizes,
    wanted_graph_sizes,
    why_no_graphs,
)
from eaglecli.commands._open_engine import BuiltEngine, FoundModels, find_device, find_models, out_of_memory
from eaglecli.config import DEFAULT_CONFIG, GenerateSettings, find_config, read_config, resolve_settings
from eaglecli.engine.check_tools import Agreement
from eaglecli.engine.engine import Engine
from eaglecli.engine.graph_runner import CaptureReport
from eaglecli.engine.graph_sizes import default_graph_sizes, padding_waste, waste_of_size
from eaglecli.engine.prefill_check import PrefillCheck
from eaglecli.engine.stage_check import StageCheck
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.console import Console
from eaglecli.io.step_sizes import read_step_sizes

SCHEMA_VERSION = 1
MUCH_WASTE = 0.25


@dataclass(frozen=True)
class CaptureResult:
    """How the command ended: `document` is what --json prints."""

    exit_code: ExitCode
    document: dict[str, Any]


@dataclass
class CaptureFindings:
    """What is found out on the way."""

    engine: Engine
    graphs: list[CaptureReport] = field(default_factory=list)
    checks: list[StageCheck] = field(default_factory=list)
    prefill_checks: list[PrefillCheck] = field(default_factory=list)
    capture_s: float = 0.0
    device_bytes: int = 0  # taken from the device by all graphs, the driver's part included
    advice: list[str] = field(default_factory=list)
    step_sizes: Sequence[int] | None = None  # of an earlier run: iterations by number of requests

    @property
    def sizes(self) -> tuple[int, ...]:
        """Checked sizes, ascending."""
        return self.engine.settings.graph_sizes

    @property
    def most_requests(self) -> int:
        """Requests that can run at a time."""
        return self.engine.settings.max_running_requests

    @property
    def must_match_unpadded(self) -> bool:
        """Only in float32, or with row-invariant kernels, does another product size leave the tokens as they are."""
        return self.engine.dtype == torch.float32 or self.engine.settings.is_deterministic

    @property
    def is_good(self) -> bool:
        """Nothing differs that must be equal."""
        return all(check.is_exact and not (self.must_match_unpadded and check.num_padding_differs) for check in self.all_checks)

    @property
    def all_checks(self) -> list[Agreement]:
        """Of iterations and of prefills."""
        return [*self.checks, *self.prefill_checks]


def resolve(given: Mapping[str, Any], config_name: str | None) -> GenerateSettings:
    """Settings from the command line's `given` values and a config file. Raises UserError."""
    config_name = config_name or (None if "target" in given else DEFAULT_CONFIG)
    return resolve_settings(given, read_config(find_config(config_name)) if config_name else None, find_device)


def capture(
    settings: GenerateSettings,
    console: Console,
    from_run: str | None = None,
    find: Callable[[GenerateSettings], FoundModels] = find_models,
) -> CaptureResult:
    """Runs the command. Raises UserError for what stops it: exit code 6 when a graph cannot be captured or memory is short."""
    step_sizes = read_step_sizes(Path(from_run)) if from_run else None
    sizes = wanted_graph_sizes(settings)
    if not sizes:
        raise UserError("there is nothing to capture: the list of graph sizes is empty", "name sizes with --cuda-graph-bs, or leave it out")
    backend = choose_backend(settings)
    no_graphs = why_no_graphs(settings, backend)
    if no_graphs and settings.device == "cuda":
        raise UserError(no_graphs, "use another --attention-backend, or leave it out")
    try:
        built = find(settings).build_engine(settings, backend, sizes)
        _introduce(built, console)
        for line in left_out_sizes(settings):
            console.warning(line)
        findings = CaptureFindings(built.engine, step_sizes=step_sizes)
        if no_graphs:
            console.warning(f"{no_graphs}: nothing is captured, the padded stages are checked on the CPU")
        else:
            _capture(findings, settings, console)
        _check(findings, console)
        _check_prefills(findings, console)
    except (MemoryError, RuntimeError) as error:
        memory_error = out_of_memory(error)
        if memory_error is None:
            raise
        raise memory_error from error
    findings.advice = list(_advice(findings))
    _say_totals(findings, console)
    exit_code = ExitCode.OK if findings.is_good else ExitCode.CHECK_FAILED
    return CaptureResult(exit_code, _document(findings, settings, exit_code))


def _introduce(built: BuiltEngine, console: Console) -> None:
    for phrases in (built.target.summary, built.draft.summary if built.draft else ("no draft: plain decoding",)):
        console.note(", ".join(phrases))
    for warning in built.draft.warnings if built.draft else ():
        console.warning(warning)
    if built.draft is not None:
        console.note(f"speculation {' '.join(map(str, built.engine.settings.all_speculation))} (steps/topk/draft tokens)")


def _capture(findings: CaptureFindings, settings: GenerateSettings, console: Console) -> None:
    console.note(f"{'stage':16}{'requests':>10}{'tokens':>8}{'length':>8}{'first run s':>13}{'capture s':>11}{'MiB':>8}")

    def show(report: CaptureReport) -> None:
        console.note(
            f"{report.stage:16}{report.num_requests:10}{report.num_tokens:8}{report.max_length:8}{report.warmup_s:13.2f}{report.capture_s:11.3f}"
            f"{report.num_bytes / MIB:8.0f}"
        )

    free_before, _ = torch.cuda.mem_get_info()
    started = time.perf_counter()
    findings.graphs = capture_graphs(findings.engine, settings, show)
    findings.capture_s = time.perf_counter() - started
    findings.device_bytes = free_before - torch.cuda.mem_get_info()[0]
    console.note(describe_graphs(findings.graphs, findings.capture_s, findings.engine.lacks_prefill_graphs))


def _check(findings: CaptureFindings, console: Console) -> None:
    """Every size with the fewest and the most requests that are padded to it."""
    console.note(f"{'size':>6}{'requests':>10}{'waste':>8}  {'graph':10}{'poison':10}{'unpadded':20}accepted")
    for size in findings.sizes:
        fewest = max((other for other in findings.sizes if other < size), default=0) + 1
        for num_requests in sorted({min(fewest, findings.most_requests), min(size, findings.most_requests)}):
            for number, mode in enumerate(findings.engine.modes):
                if num_requests <= mode.max_requests:
                    check = findings.engine.check_stages(num_requests, seed=num_requests, mode_number=number)
                    findings.checks.append(check)
                    name = f"  {mode.speculation}" if len(findings.engine.modes) > 1 else ""
                    console.note(_check_line(check, waste_of_size(size, findings.sizes)) + name)


def _check_prefills(findings: CaptureFindings, console: Console) -> None:
    """Every size of a prefill, filled with random chunks."""
    console.note(f"prefill of{'tokens':>8}{'in':>8}{'requests':>10}{'in':>6}  {'graph':10}{'poison':10}unpadded")
    for number, size in enumerate(findings.engine.prefill_sizes):
        check = findings.engine.check_prefill(size, seed=number)
        findings.prefill_checks.append(check)
        sizes = f"          {check.num_tokens:8}{check.size_tokens:8}{check.num_rows:10}{check.size_rows:6}"
        console.note(f"{sizes}  {_outcome(check)}{_details(check)}")


def _check_line(check: StageCheck, waste: float) -> str:
    return f"{check.size:6}{check.num_requests:10}{waste:8.0%}  {_outcome(check)}{check.num_accepted}{_details(check)}"


def _outcome(check: Agreement) -> str:
    graph = "none" if check.graph_differs is None else "differs" if check.graph_differs else "equal"
    poison = "differs" if check.poison_differs else "no effect"
    unpadded = f"{check.num_padding_differs} differ" if check.num_padding_differs else "same text"
    return f"{graph:10}{poison:10}{f'{unpadded}, {check.padding_difference:.1e}':20}"


def _details(check: Agreement) -> str:
    details = [f"graph: {', '.join(check.graph_differs)}"] if check.graph_differs else []
    details += [f"poison: {', '.join(check.poison_differs)}"] if check.poison_differs else []
    return f"  <- {'; '.join(details)}" if details else ""


def _advice(findings: CaptureFindings) -> Iterator[str]:
    sizes, most = findings.sizes, findings.most_requests
    if sizes[-1] < most:
        yield f"batches of {sizes[-1] + 1} to {most} requests run without a graph: add {most} to --cuda-graph-bs"
    waste = padding_waste(sizes, [int(0 < size <= sizes[-1]) for size in range(sizes[-1] + 1)])
    if waste > MUCH_WASTE:
        proposal = " ".join(map(str, default_graph_sizes(sizes[-1])))
        yield f"{waste:.0%} of the rows would be padding if all batch sizes were as frequent: try --cuda-graph-bs {proposal}"
    if findings.step_sizes is not None:
        yield from _advice_from_run(sizes, findings.step_sizes)


def _advice_from_run(sizes: Sequence[int], step_sizes: Sequence[int]) -> Iterator[str]:
    smallest = dict(zip(sizes, (1, *(size + 1 for size in sizes)), strict=False))
    idle = [size for size in sizes if not sum(step_sizes[smallest[size] : size + 1])]
    if idle:
        yield f"no iteration of that run would have used the graphs of {' '.join(map(str, idle))} requests"
    above = sum(step_sizes[sizes[-1] + 1 :])
    if above:
        most = len(step_sizes) - 1
        share = above / sum(step_sizes)
        yield f"{share:.1%} of its iterations had more than {sizes[-1]} requests, up to {most}: add {most} to --cuda-graph-bs"


def _say_totals(findings: CaptureFindings, console: Console) -> None:
    if findings.step_sizes is not None:
        hit, waste = _run_shares(findings)
        console.note(f"of the iterations of that run {hit:.1%} would have met a graph, with {waste:.1%} of the rows padding")
    for line in findings.advice:
        console.note(line)
    bad = [check for check in findings.all_checks if not check.is_exact]
    if bad:
        console.error(f"{len(bad)} of {len(findings.all_checks)} checks found a difference", "please report this with the table above")
    elif not findings.is_good:
        console.error("padding changed tokens, which it must not in this mode", "please report this with the table above")
    else:
        console.note(f"{len(findings.all_checks)} checks passed")


def _run_shares(findings: CaptureFindings) -> tuple[float, float]:
    """Share of an earlier run's iterations that would meet a graph, and share of padding in their rows."""
    step_sizes = findings.step_sizes or ()
    held = step_sizes[: findings.sizes[-1] + 1]
    return sum(held) / max(sum(step_sizes), 1), padding_waste(findings.sizes, held)


def _document(findings: CaptureFindings, settings: GenerateSettings, exit_code: ExitCode) -> dict[str, Any]:
    engine, sizes = findings.engine, findings.sizes
    triple, alternatives = engine.settings.speculation, engine.settings.alternatives
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": int(exit_code),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "is_captured": bool(findings.graphs),
        "target": settings.target,
        "draft": settings.draft,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "attention_backend": engine.attention.name,
        "speculation": {"num_steps": triple.num_steps, "topk": triple.topk, "num_draft_tokens": triple.num_draft_tokens},
        "alternatives": {str(alternative.speculation): alternative.max_requests for alternative in alternatives},
        "max_running_requests": engine.settings.max_running_requests,
        "max_total_tokens": engine.settings.max_total_tokens,
        "graph_sizes": list(sizes),
        "graphs": [asdict(report) for report in findings.graphs],
        "padding_waste": {str(size): waste_of_size(size, sizes) for size in sizes},
        "totals": {
            "num_graphs": len(findings.graphs),
            "elapsed_s": findings.capture_s,
            "warmup_s": sum(report.warmup_s for report in findings.graphs),
            "capture_s": sum(report.capture_s for report in findings.graphs),
            "num_bytes": sum(report.num_bytes for report in findings.graphs),
            "device_bytes": findings.device_bytes,
            "logits_bytes": sizes[-1] * triple.num_draft_tokens * engine.vocab_size * engine.dtype.itemsize,
        },
        "checks": [{**asdict(check), "is_exact": check.is_exact} for check in findings.checks],
        "prefill_checks": [{**asdict(check), "is_exact": check.is_exact} for check in findings.prefill_checks],
        "from_run": None
        if findings.step_sizes is None
        else dict(zip(("graph_hit_rate", "padding_waste"), _run_shares(findings), strict=True)),
        "advice": findings.advice,
    }
