"""The figures of a bench as lines of text, at most 80 characters wide."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eaglecli.io.bench_results import Comparison

_STAGES = ("prefill", "draft", "verify", "extend", "host")
_SHARES_SHOWN = 3
MIB = 1 << 20


def speed_table(configurations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Throughput, accept length, step time, ratio to the floor and to plain decoding."""
    yield f"{'batch':>5} {'mode':9}{'token/s':>10}{'spread':>8}{'accept':>8}{'step ms':>9}{'x floor':>8}  speed-up over plain"
    for item in configurations:
        accept = (item["accept"] or {}).get("accept_length")
        floor = item["floor"]
        yield (
            f"{item['batch_size']:5} {item['mode']:9}{item['output_throughput']:10.1f}{_cell(item['spread'], 8, '.1%')}"
            f"{_cell(accept, 8, '.3f')}{_cell(floor['step_ms'], 9, '.3f')}{_cell(floor['ratio'], 8, '.2f')}  {_speedup(item)}"
        )


def choice_table(configurations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What configurations that choose between triples did: ratio to the best of the others, changes, modes by tokens."""
    rows = [item for item in configurations if item.get("ratio_to_best_fixed")]
    if not rows:
        return
    yield f"{'batch':>5} {'mode':9}{'of best':>8} {'which is':9}{'changes':>8}  tokens by mode"
    for item in rows:
        best, choices = item["ratio_to_best_fixed"], item.get("speculation") or {}
        yield (
            f"{item['batch_size']:5} {item['mode']:9}{best['ratio']:8.3f} {best['mode']:9}{_cell(choices.get('num_changes'), 8, 'd')}"
            f"  {_shares(choices.get('modes') or {})}"
        )


def _shares(modes: Mapping[str, Mapping[str, Any]]) -> str:
    """The three that gave most tokens, and what the others gave together."""
    used = sorted(((mode["share_of_tokens"], name) for name, mode in modes.items() if mode["tokens"]), reverse=True)
    parts = [f"{share:.0%} {name}" for share, name in used[:_SHARES_SHOWN]]
    rest = sum(share for share, _ in used[_SHARES_SHOWN:])
    return " ".join(parts) + (f" +{rest:.0%}" if rest else "")


def stage_table(configurations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Median milliseconds of each stage (the host's: mean), graphs and memory."""
    yield "time by stage in ms, share of stages run by graph, peak memory"
    yield f"{'batch':>5} {'mode':9}" + "".join(f"{name:>10}" for name in _STAGES) + f"{'graphs':>7}{'MiB':>8}"
    for item in configurations:
        stages = item["stages_ms"]
        times = [(stages.get(name) or {}).get("mean" if name == "host" else "p50") for name in _STAGES]
        peak = item["peak_memory_bytes"]
        cells = "".join(_cell(value, 10, ".3f") for value in times)
        memory = None if peak is None else peak / MIB
        yield f"{item['batch_size']:5} {item['mode']:9}{cells}{_cell(item['graph_hit_rate'], 7, '.0%')}{_cell(memory, 8, '.0f')}"


def context_table(configurations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Accept length by length of the context, where there is more than one bucket."""
    rows = [(item, bucket) for item in configurations if item["accept"] and len(item["by_context"]) > 1 for bucket in item["by_context"]]
    if not rows:
        return
    yield f"{'batch':>5} {'mode':9}{'context':>14}{'records':>9}{'accept':>8}{'token/s each':>14}{'speed-up':>10}"
    for item, bucket in rows:
        high = bucket["context_up_to"]
        context = f"> {bucket['context_above']}" if high is None else f"{bucket['context_above'] + 1}-{high}"
        yield (
            f"{item['batch_size']:5} {item['mode']:9}{context:>14}{bucket['records']:9}{_cell(bucket['accept_length'], 8, '.3f')}"
            f"{_cell(bucket['output_throughput_per_user'], 14, '.1f')}{_cell(bucket.get('speedup'), 10, '.2f')}"
        )


def comparison_table(comparison: Comparison) -> Iterator[str]:
    """One line a configuration."""
    yield f"{'configuration':32}{'then':>10}{'now':>10}{'ratio':>8}  interval"
    for item in comparison.differences:
        interval = "" if item.interval is None else f"{item.interval[0]:.3f}-{item.interval[1]:.3f} "
        yield f"{item.label:32}{item.old:10.1f}{item.new:10.1f}{item.ratio:8.3f}  {interval}{item.verdict}"


def _speedup(item: Mapping[str, Any]) -> str:
    speedup = item.get("speedup")
    if not speedup:
        return ""
    interval = speedup["interval"]
    return f"{speedup['ratio']:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else " (one repeat: no interval)")


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
