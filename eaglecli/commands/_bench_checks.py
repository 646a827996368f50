"""What a bench concludes: speed-ups over plain decoding, where speculation loses, and whether --assert-* holds."""

from collections.abc import Sequence
from typing import Any

from eaglecli.commands._bench_settings import CHOOSING_MODES, BenchOptions
from eaglecli.io.bench_splits import compare_buckets
from eaglecli.io.bench_statistics import ratio_interval
from eaglecli.io.console import Console

SIMULATION_TOLERANCE = 0.02


def put_speedups(found: Sequence[dict[str, Any]]) -> None:
    """Into every configuration with a draft: the ratio to plain decoding at its batch size, if that was measured, and the buckets' own."""
    plain = {item["batch_size"]: item for item in found if item["mode"] == "plain"}
    for item in found:
        base = plain.get(item["batch_size"])
        if item["mode"] == "plain" or base is None:
            continue
        ours, theirs = ([repeat["output_throughput"] for repeat in each["repeats"]] for each in (item, base))
        ratio = item["output_throughput"] / base["output_throughput"]
        item["speedup"] = {"over": base["label"], "ratio": ratio, "interval": ratio_interval(ours, theirs)}
        compare_buckets(item["by_context"], base["by_context"])


def warn_of_losses(found: Sequence[dict[str, Any]], draft_limit: int | None, console: Console) -> None:
    """Rows B16 and B66 of the known failures: a draft that makes a batch size, or long contexts, slower than plain decoding."""
    for item in found:
        speedup = item.get("speedup")
        if not speedup:
            continue
        if speedup["ratio"] < 1 and (speedup["interval"] is None or speedup["interval"][1] < 1):
            console.warning(f"{item['label']}: speculation loses, {speedup['ratio']:.2f} x plain decoding; --draft none is faster here")
        slow = [bucket for bucket in item["by_context"] if (bucket.get("speedup") or 1) < 1]
        for bucket in slow if len(item["by_context"]) > 1 else ():
            limit = f"; the draft was made for {draft_limit}" if draft_limit is not None and bucket["context_above"] >= draft_limit else ""
            console.warning(
                f"{item['label']}: contexts above {bucket['context_above']} tokens lose, {bucket['speedup']:.2f} x plain decoding{limit}"
            )


def warn_of_simulation(found: Sequence[dict[str, Any]], console: Console) -> None:
    """A tree may have no node as deep as the prescription wants: then the figures are those of a shorter accept length."""
    for item in found:
        wanted, length = item["simulated_accept_length"], (item["accept"] or {}).get("accept_length")
        if wanted is not None and length is not None and abs(length - wanted) > SIMULATION_TOLERANCE * wanted:
            console.warning(
                f"{item['label']}: {wanted:g} tokens a step were to be simulated, {length:.3f} were: short answers, or a flat tree"
            )


def check_assertions(found: Sequence[dict[str, Any]], options: BenchOptions, console: Console) -> list[dict[str, Any]]:
    """Every --assert-* against every configuration that it is about."""
    wanted = (
        ("--assert-throughput", options.assert_throughput, lambda item: item["output_throughput"]),
        ("--assert-accept-length", options.assert_accept_length, _accept_length),
        ("--assert-speedup", options.assert_speedup, lambda item: (item.get("speedup") or {}).get("ratio")),
        ("--assert-adaptive-ratio", options.assert_adaptive_ratio, lambda item: (item.get("ratio_to_best_fixed") or {}).get("ratio")),
    )
    checks = []
    for name, least, find in wanted:
        if least is None:
            continue
        # plain decoding has no accept length and no speed-up, a triple no ratio to the best one
        values = {item["label"]: value for item in found if (value := find(item)) is not None}
        if not values:
            checks.append({"check": name, "label": None, "value": None, "at_least": least, "holds": False})
            console.error(f"{name} {least:g} could be held against no configuration", "is there a draft, and a batch size it is about?")
        for label, value in values.items():
            checks.append({"check": name, "label": label, "value": value, "at_least": least, "holds": value >= least})
            if value < least:
                console.error(f"{name} {least:g} does not hold for {label}: {value:.3f}")
    return checks


def _accept_length(item: dict[str, Any]) -> float | None:
    """Of a triple: where steps of several are mixed, plain ones among them, it says nothing about the draft."""
    return None if item["mode"] in CHOOSING_MODES else (item["accept"] or {}).get("accept_length")
