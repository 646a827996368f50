"""Measuring one configuration: warm-up, timed passes, a clocked pass, and the document of what was found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eaglecli.commands._bench_adaptive import begin_policy, describe_choices
from eaglecli.commands._bench_engine import BenchEngine, BenchModels, synchronize
from eaglecli.commands._bench_prompts import BenchData
from eaglecli.commands._bench_run import Pass, WarmUp, in_simulated_step, run_pass, warm_up
from eaglecli.commands._bench_settings import BenchConfiguration, BenchOptions
from eaglecli.commands._bench_stages import DECODE_STAGES, StageTimes, stage_of, time_stages
from eaglecli.io.bench_splits import AnsweredRecord, context_edges, split_accept_lengths, split_by_batch_size, split_by_context
from eaglecli.io.bench_statistics import middle_place, percentiles, pooled_ratio_interval, spread
from eaglecli.io.garbage_pauses import seldom_garbage_pauses

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class Measurement:
    """One configuration as measured: `document` is its line of results.jsonl, `middle` the timed pass that it tells of."""

    configuration: BenchConfiguration
    document: dict[str, Any]
    middle: Pass


def measure(
    bench: BenchEngine, models: BenchModels, data: BenchData, configuration: BenchConfiguration, options: BenchOptions
) -> Measurement:
    """Warm up, time `options.repeat` passes over all the data, then clock the stages of one wave.

    All figures are those of one pass, the middle one by its throughput, so that they belong together; `repeats` has the others' rates.
    An engine that chooses between triples begins with what it measures before anything runs, and learns all the while.
    """
    engine, batch_size = bench.engine, configuration.batch_size
    is_cuda = models.device.type == "cuda"
    simulated = options.simulate_acc_len if configuration.has_drafts else None
    requests = data.requests if simulated is None else in_simulated_step(data.requests, simulated)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(models.device)
    started_policy = begin_policy(engine, configuration.plan, batch_size)
    warmth = warm_up(engine, requests, batch_size, 0 if options.skip_warmup else options.num_warmups)
    synchronize(models.device)
    passes, summaries = [], [engine.summary()]
    for _ in range(options.repeat):
        with seldom_garbage_pauses():
            passes.append(run_pass(engine, requests, batch_size, data.end_token_ids))
        summaries.append(engine.summary())
    place = middle_place([done.output_throughput for done in passes])
    middle, before, after = passes[place], summaries[place], summaries[place + 1]
    stages = time_stages(engine, requests, batch_size, models.device, middle)
    peak = torch.cuda.max_memory_allocated(models.device) if is_cuda else None
    document = _describe(bench, models, data, configuration, simulated, passes, middle, warmth, stages)
    document |= {"graph_hit_rate": _hit_rate(_stage_runs(before), _stage_runs(after)), "peak_memory_bytes": peak}
    if document["accept"]:
        by_batch_size = split_by_batch_size(before["accepted_by_requests"], after["accepted_by_requests"])
        document["accept"]["splits"]["batch_size"] = by_batch_size
    document["timing"]["capture_s"] += started_policy.get("start_costs_s", 0.0)
    if "speculation" in after:
        document["speculation"] = started_policy | describe_choices(before["speculation"], after["speculation"])
    return Measurement(configuration, document, middle)


def _describe(
    bench: BenchEngine,
    models: BenchModels,
    data: BenchData,
    configuration: BenchConfiguration,
    simulated: float | None,
    passes: Sequence[Pass],
    middle: Pass,
    warmth: WarmUp,
    stages: StageTimes,
) -> dict[str, Any]:
    triple, rates = configuration.fixed, _rates(middle)
    repeats = [_rates(done) for done in passes]
    window = middle.steady_window(configuration.batch_size)
    return {
        "schema_version": SCHEMA_VERSION,
        "label": configuration.label,
        "mode": configuration.mode,
        "batch_size": configuration.batch_size,
        "speculative_num_steps": triple and triple.num_steps,
        "speculative_eagle_topk": triple and triple.topk,
        "speculative_num_draft_tokens": triple and triple.num_draft_tokens,
        "simulated_accept_length": simulated,
        **_counts(middle),
        **rates,
        "output_throughput_per_user": rates["output_throughput"] / min(configuration.batch_size, len(data.requests)),
        "output_throughput_per_gpu": rates["output_throughput"],
        "spread": spread([repeat["output_throughput"] for repeat in repeats]),
        "repeats": repeats,
        "steady_state_output_throughput": window.throughput,
        "steady_state_window": {"seconds": window.seconds, "num_steps": window.num_steps, "output_tokens": window.num_output_tokens},
        "step_latency_ms": percentiles(window.decode_step_s * 1e3),
        "stages_ms": stages.describe(),
        "host_share": stages.host_ms / (middle.elapsed_s / middle.num_iterations * 1e3)
        if stages.host_ms and middle.num_iterations
        else None,
        "statistics_share": middle.statistics_s / middle.elapsed_s,
        "floor": _floor(models, configuration, middle, window.decode_step_s),
        "ttft_s": percentiles([completion.ttft_s for completion in middle.completions]),
        "tpot_s": percentiles(
            [(done.e2e_s - done.ttft_s) / (len(done.output_ids) - 1) for done in middle.completions if len(done.output_ids) > 1]
        ),
        "accept": _accept(middle, data) if configuration.has_drafts else None,
        "by_context": split_by_context(answered_records(middle, data), _edges(models, data)),
        "timing": {
            "load_s": models.load_s,
            "capture_s": bench.capture_s,
            "warmup_s": warmth.seconds,
            "timed_s": sum(done.elapsed_s for done in passes),
            "profile_s": stages.seconds,
        },
        "warmup": {"windows": list(warmth.windows), "agreed": warmth.agreed},
        "num_iterations": middle.num_iterations,
    }


def _rates(done: Pass) -> dict[str, float]:
    counts = {
        "request_throughput": len(done.completions),
        "input_throughput": done.num_input_tokens,
        "output_throughput": done.num_output_tokens,
        "total_throughput": done.num_input_tokens + done.num_output_tokens,
    }
    return {**{name: count / done.elapsed_s for name, count in counts.items()}, "total_latency": done.elapsed_s}


def _counts(done: Pass) -> dict[str, int]:
    failed = sum(completion.finish_reason == "error" for completion in done.completions)
    return {
        "successful_requests": len(done.completions) - failed,
        "failed_requests": failed,
        "num_early_stopped": sum(completion.finish_reason == "stop" for completion in done.completions),
        "total_input_tokens": done.num_input_tokens,
        "total_output_tokens": done.num_output_tokens,
    }


def _accept(done: Pass, data: BenchData) -> dict[str, Any]:
    accepted = np.array([completion.num_accepted_drafts for completion in done.completions])
    steps = np.array([completion.num_verify_steps for completion in done.completions])
    interval = pooled_ratio_interval(accepted + steps, steps)
    splits = split_accept_lengths(answered_records(done, data))
    return {**done.totals.describe(), "accept_length_interval": interval, "splits": splits}


def _floor(models: BenchModels, configuration: BenchConfiguration, done: Pass, step_s: np.ndarray) -> dict[str, float | None]:
    """Floor of an iteration at the mean batch and context, and how far the median decode step is above it; several triples have none."""
    step = float(np.median(step_s)) if len(step_s) else None
    step_ms = None if step is None else step * 1e3
    if configuration.fixed is None:
        return {"floor_ms": None, "weight_bytes": None, "step_ms": step_ms, "ratio": None}
    contexts = [len(completion.request.prompt_ids) + len(completion.output_ids) / 2 for completion in done.completions]
    num_rows = min(configuration.batch_size, len(done.completions))
    work = models.work(configuration.fixed)
    accept_length = done.totals.accept_length or 1.0
    floor_s = work.floor_s(models.speed, num_rows, float(np.mean(contexts)), accept_length)
    return {
        "floor_ms": floor_s * 1e3,
        "weight_bytes": work.weight_bytes,
        "step_ms": step_ms,
        "ratio": None if step is None else step / floor_s,
    }


def answered_records(done: Pass, data: BenchData) -> list[AnsweredRecord]:
    """What the splits need; requests are keyed by their place in the data."""
    return [
        AnsweredRecord(
            tag=data.tags[completion.request.key],  # type: ignore[index]
            finish_reason=completion.finish_reason,
            num_prompt_tokens=len(completion.request.prompt_ids),
            num_output_tokens=len(completion.output_ids),
            accept_counts=completion.accept_counts,
            decode_s=completion.e2e_s - completion.ttft_s,
        )
        for completion in done.completions
    ]


def _edges(models: BenchModels, data: BenchData) -> tuple[int, ...]:
    return context_edges(models.draft_limit or models.context_length, data.longest)


def _stage_runs(summary: dict[str, Any]) -> tuple[int, int]:
    stages = [stage for name, stage in summary["stages"].items() if stage_of(name) in DECODE_STAGES]
    return sum(stage["graph_runs"] for stage in stages), sum(stage["eager_runs"] for stage in stages)


def _hit_rate(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    by_graph, eagerly = after[0] - before[0], after[1] - before[1]
    return by_graph / (by_graph + eagerly) if by_graph + eagerly else None
