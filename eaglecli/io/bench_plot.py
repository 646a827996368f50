"""The picture of a bench, one PNG: throughput against batch size, accept lengths, acceptance by position, time by stage.

Needs matplotlib (extra `plot`), which is imported with this module.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

_COLORS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind eyes too
_STAGES = {"draft": "#56b4e9", "verify": "#0072b2", "extend": "#009e73", "other": "#bbbbbb"}
_MARKERS, _LINES = "oDs^vPX", ("-", "-", "--", "-.", ":")
_MOST_BARS = 20
_MODES_BESIDE_ONE_ANOTHER = 4

Configuration = Mapping[str, Any]


def draw_report(document: Mapping[str, Any], file: Path) -> None:
    """Draw the four panels of a bench's object into `file`."""
    found: Sequence[Configuration] = document["configurations"]
    modes = list(dict.fromkeys(item["mode"] for item in found))
    colors = {mode: _COLORS[(number + ("plain" not in modes)) % len(_COLORS)] for number, mode in enumerate(_plain_first(modes))}
    figure = Figure(figsize=(13, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(document), fontsize=11)
    panels = figure.subplots(2, 2).flatten()
    _draw_throughput(panels[0], found, modes, colors)
    speculative = _one_batch_a_mode(found)
    _draw_histogram(panels[1], speculative, colors)
    _draw_positions(panels[2], speculative, colors)
    _draw_stages(panels[3], found)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _title(document: Mapping[str, Any]) -> str:
    conditions = document["conditions"]
    data = conditions["dataset"]
    simulated = conditions["simulated_accept_length"]
    lines = [
        f"eaglecli bench: {Path(str(conditions['target'])).stem} with draft {Path(str(conditions['draft'] or 'none')).name}",
        f"{conditions['device']}, {conditions['dtype']}, {data['num_prompts']} prompts of `{data['name']}`, "
        f"{data['input_len']['mean']:.0f} prompt tokens and up to {data['output_len']['max']:.0f} new ones",
    ]
    notes = ["RANDOM WEIGHTS"] if conditions["weights"] == "dummy" else []
    notes += [f"SIMULATED ACCEPTANCE of {simulated:g} tokens a step"] if simulated is not None else []
    return "\n".join([*lines, *([", ".join(notes)] if notes else [])])


def _plain_first(modes: Sequence[str]) -> list[str]:
    return sorted(modes, key=lambda mode: mode != "plain")


def _name(mode: str) -> str:
    return {"plain": "no draft", "adaptive": "adaptive", "table": "table"}.get(mode, f"draft {mode}")


def _name_at(item: Configuration) -> str:
    return f"{_name(item['mode'])}, batch {item['batch_size']}"


def _one_batch_a_mode(found: Sequence[Configuration]) -> list[Configuration]:
    """What a triple accepts hardly depends on the batch size: the smallest stands for it. What a choice of triples accepts does."""
    chosen: dict[str, Configuration] = {}
    for item in sorted(found, key=lambda item: item["batch_size"]):
        if item["accept"] and item["accept"]["spec_verify_ct"] and item["mode"] not in ("adaptive", "table"):
            chosen.setdefault(item["mode"], item)
    return list(chosen.values())[:_MODES_BESIDE_ONE_ANOTHER]


def _draw_throughput(axes: Axes, found: Sequence[Configuration], modes: Sequence[str], colors: Mapping[str, str]) -> None:
    for number, mode in enumerate(_plain_first(modes)):
        points = sorted((item for item in found if item["mode"] == mode), key=lambda item: item["batch_size"])
        sizes, rates = [item["batch_size"] for item in points], [item["output_throughput"] for item in points]
        repeats = [[repeat["output_throughput"] for repeat in item["repeats"]] for item in points]
        lows = [max(0.0, rate - min(values)) for rate, values in zip(rates, repeats, strict=True)]
        highs = [max(0.0, max(values) - rate) for rate, values in zip(rates, repeats, strict=True)]
        axes.errorbar(
            sizes,
            rates,
            yerr=(lows, highs),
            color=colors[mode],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=_LINES[number % len(_LINES)],
            capsize=3,
            label=_name(mode) + _speedups(points),
        )
    sizes = sorted({item["batch_size"] for item in found})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.15)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.1 * 1.3 ** len(modes))  # room for the names above the curves
    axes.set(
        title="Output throughput (middle pass; bars: all passes; ratios to no draft)",
        xlabel="batch size (requests at a time)",
        ylabel="token/s",
    )
    axes.grid(alpha=0.3, which="major")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _speedups(points: Sequence[Configuration]) -> str:
    """Ratios to plain decoding, smallest and largest batch size first and last; of what chooses also those to the best of the others."""
    ratios = [f"{item['speedup']['ratio']:.2f}x" for item in points if item.get("speedup")]
    to_best = [f"{item['ratio_to_best_fixed']['ratio']:.3f}" for item in points if item.get("ratio_to_best_fixed")]
    return (f": {', '.join(ratios)}" if ratios else "") + (f"\n({', '.join(to_best)} of the best of the others)" if to_best else "")


def _draw_histogram(axes: Axes, chosen: Sequence[Configuration], colors: Mapping[str, str]) -> None:
    axes.set(title="Tokens of a verify step (accepted drafts and one more)", xlabel="tokens", ylabel="share of steps")
    if _say_nothing(axes, chosen):
        return
    width = 0.8 / len(chosen)
    for number, item in enumerate(chosen):
        histogram = item["accept"]["spec_correct_drafts_histogram"]
        total = sum(histogram)
        places = [1 + count + (number - (len(chosen) - 1) / 2) * width for count in range(len(histogram))]
        label = f"{_name_at(item)}: {_length(item)}"
        axes.bar(places, [count / total for count in histogram], width * 0.92, color=colors[item["mode"]], label=label)
    longest = max(len(item["accept"]["spec_correct_drafts_histogram"]) for item in chosen)
    axes.set_xticks(range(1, longest + 1))
    axes.legend(title="mean (accept length)", frameon=False, fontsize=9)


def _length(item: Configuration) -> str:
    interval = item["accept"]["accept_length_interval"]
    is_wide = interval is not None and interval[1] - interval[0] >= 0.01
    return f"{item['accept']['accept_length']:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if is_wide else "")


def _draw_positions(axes: Axes, chosen: Sequence[Configuration], colors: Mapping[str, str]) -> None:
    axes.set(title="Acceptance by depth", xlabel="depth i of the draft", ylabel="share of steps that accept at least i")
    if _say_nothing(axes, chosen):
        return
    deepest = 1
    for number, item in enumerate(chosen):
        rates = item["accept"]["accept_rate_per_position"]
        deepest = max(deepest, len(rates))
        marker = _MARKERS[(number + 1) % len(_MARKERS)]
        line = _LINES[(number + 1) % len(_LINES)]
        axes.plot(range(1, len(rates) + 1), rates, color=colors[item["mode"]], marker=marker, linestyle=line, label=_name_at(item))
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def _draw_stages(axes: Axes, found: Sequence[Configuration]) -> None:
    """Bars as long as the median decode step; what no stage accounts for is `other`. The floor is a tick on each."""
    shown = [item for item in found if item["floor"]["step_ms"] is not None][:_MOST_BARS]
    left_out = len(found) - len(shown)
    axes.set(title="One decode step by stage", xlabel="ms (medians)")
    if _say_nothing(axes, shown):
        return
    for place, item in enumerate(shown):
        step_ms = item["floor"]["step_ms"]
        start = 0.0
        for stage, color in _STAGES.items():
            own = (item["stages_ms"].get(stage) or {}).get("p50") or 0.0
            length = max(0.0, step_ms - start) if stage == "other" else own
            axes.barh(place, length, 0.66, start, color=color, label=stage if place == 0 else None)
            start += length
        if item["floor"]["ratio"] is None:
            continue  # several triples: they have no floor in common
        axes.plot([item["floor"]["floor_ms"]] * 2, [place - 0.4, place + 0.4], color="black", label="floor" if place == 0 else None)
        axes.annotate(f" {item['floor']['ratio']:.2f} x floor", (start, place), va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [item["label"] for item in shown], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(_bar_ms(item) for item in shown))
    axes.legend(frameon=False, fontsize=9, ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.12))
    if left_out:
        axes.set_title(f"One decode step by stage ({left_out} more configurations are not shown)")


def _bar_ms(item: Configuration) -> float:
    stages = [(item["stages_ms"].get(stage) or {}).get("p50") or 0.0 for stage in _STAGES]
    return max(sum(stages), item["floor"]["step_ms"])


def _say_nothing(axes: Axes, shown: Sequence[Configuration]) -> bool:
    if not shown:
        axes.text(0.5, 0.5, "nothing to show", ha="center", va="center", transform=axes.transAxes, color="#888888")
        axes.set(xticks=[], yticks=[])
    return not shown
