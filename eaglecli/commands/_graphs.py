"""Shared by the commands that run models: which graphs a run shall have, and capturing them with errors that say what to do."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from eaglecli.config import COMMAND_LINE, GRAPH_SETTINGS, GenerateSettings
from eaglecli.engine.attention_backend import BACKENDS, AttentionBackend, choose_attention
from eaglecli.engine.engine import Engine
from eaglecli.engine.graph_runner import CaptureError, CaptureReport
from eaglecli.engine.graph_sizes import default_graph_sizes, reachable_sizes
from eaglecli.engine.prefill import PrefillStage
from eaglecli.errors import ExitCode, UserError

MIB = 1 << 20


def choose_backend(settings: GenerateSettings) -> AttentionBackend:
    """The attention that was asked for, else the device's own. Raises UserError when it cannot run there."""
    wanted = BACKENDS[settings.attention_backend] if settings.attention_backend else None
    return choose_attention(wanted, torch.device(settings.device), settings.enable_deterministic_inference)


def wanted_graph_sizes(settings: GenerateSettings) -> tuple[int, ...]:
    """Ascending sizes in requests, without those that no batch is padded to; () = no graphs."""
    if settings.disable_cuda_graph:
        return ()
    largest = settings.cuda_graph_max_bs or settings.max_running_requests
    if settings.cuda_graph_bs is None:
        return default_graph_sizes(min(largest, settings.max_running_requests))
    listed = [size for size in settings.cuda_graph_bs if settings.cuda_graph_max_bs is None or size <= largest]
    return reachable_sizes(listed, settings.max_running_requests)


def why_no_graphs(settings: GenerateSettings, backend: AttentionBackend) -> str | None:
    """A phrase for people when nothing is captured although sizes are wanted; None when something is."""
    if settings.device != "cuda":
        return "no CUDA device, graphs are not used"
    if backend.needs_host_lengths:
        return f"graphs are not used: attention backend {backend.name} needs the lengths on the host, which also runs without overlap"
    return None


def idle_graph_settings(settings: GenerateSettings, backend: AttentionBackend) -> tuple[str, ...]:
    """A warning when the command line tunes graphs that are not there, or names sizes that no batch is padded to."""
    reason = why_no_graphs(settings, backend)
    given = [name for name in GRAPH_SETTINGS if settings.origin(name) == COMMAND_LINE]
    if reason and given:
        return (f"{reason}: --{given[0].replace('_', '-')} changes nothing",)
    return () if reason or settings.disable_cuda_graph else tuple(left_out_sizes(settings))


def left_out_sizes(settings: GenerateSettings) -> Iterator[str]:
    """A sentence when sizes were listed that no batch is padded to."""
    kept = wanted_graph_sizes(settings)
    left_out = [size for size in settings.cuda_graph_bs or () if size not in kept]
    if left_out:
        limits = f"--max-running-requests is {settings.max_running_requests}"
        limits += f", --cuda-graph-max-bs {settings.cuda_graph_max_bs}" if settings.cuda_graph_max_bs else ""
        yield f"graph sizes {' '.join(map(str, left_out))} are left out, no batch is padded to them: {limits}"


def capture_graphs(
    engine: Engine, settings: GenerateSettings, watch: Callable[[CaptureReport], None] = lambda report: None
) -> list[CaptureReport]:
    """Capture what the engine's settings name; `watch` is called for every graph. Raises UserError (exit code 6) with a value that fits.

    Where memory is too short for the graphs of prefills alone, these run eagerly: `Engine.lacks_prefill_graphs`.
    """
    reports: list[CaptureReport] = []
    failure: CaptureError | None = None
    try:
        for report in engine.capture():
            reports.append(report)
            watch(report)
    except CaptureError as error:
        if not error.is_out_of_memory:
            raise UserError(
                f"capturing CUDA graphs failed: {error}", "use --disable-cuda-graph to run without graphs", ExitCode.MEMORY
            ) from error
        failure = error
    if failure is not None and failure.stage == PrefillStage.name:
        engine.run_prefills_eagerly()
        return [report for report in reports if report.stage != PrefillStage.name]
    if failure is not None:
        raise _no_room(failure, engine.find_capturable_size(failure.num_requests), settings)
    return reports


def _no_room(failure: CaptureError, fitting_size: int | None, settings: GenerateSettings) -> UserError:
    message = f"no memory for CUDA graphs of {failure.num_requests} requests: {failure}"
    share = f"--mem-fraction-static {max(0.05, settings.mem_fraction_static - 0.1):.2f} (now {settings.mem_fraction_static:g})"
    if fitting_size is None:
        return UserError(message, f"use {share}, or --disable-cuda-graph: not even the smallest size fits", ExitCode.MEMORY)
    return UserError(message, f"use --cuda-graph-max-bs {fitting_size}, which was tried and fits, or {share}", ExitCode.MEMORY)


def describe_graphs(reports: Sequence[CaptureReport], elapsed_s: float, lacks_prefills: bool) -> str:
    """What was captured, in one sentence, sizes in requests and in tokens."""
    stages = list(dict.fromkeys(report.stage for report in reports))
    sizes = sorted({report.num_requests for report in reports if report.stage != PrefillStage.name})
    lengths = sorted({report.max_length for report in reports})
    tokens = {stage: sorted({report.num_tokens for report in reports if report.stage == stage}) for stage in stages}
    shown = ", ".join(f"{stage} {' '.join(map(str, tokens[stage]))}" for stage in stages)
    warmup_s = sum(report.warmup_s for report in reports)
    mib = sum(report.num_bytes for report in reports) / MIB
    lacking = "; no memory is left for graphs of prefills, which run eagerly" if lacks_prefills else ""
    return (
        f"{len(reports)} CUDA graphs at {' '.join(map(str, sizes))} requests (tokens: {shown}), rows up to {' '.join(map(str, lengths))}, "
        f"in {elapsed_s:.1f} s, {warmup_s:.1f} s of it first runs and compilation; {mib:.0f} MiB{lacking}"
    )


def capture_for_run(engine: Engine, settings: GenerateSettings) -> str:
    """Capture, and the sentence that tells of it."""
    started = time.perf_counter()
    reports = capture_graphs(engine, settings)
    return describe_graphs(reports, time.perf_counter() - started, engine.lacks_prefill_graphs)
