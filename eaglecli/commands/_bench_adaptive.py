"""Configurations whose engine chooses between triples, beside those of one triple: which there are, and what they did.

They are run like any other, so warm-up and repeats are one long run to a policy, in which it goes on learning. Every configuration
begins with a policy of its own, so its figures do not depend on which others were measured before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from eaglecli.commands._bench_settings import CHOOSING_MODES, BenchConfiguration, BenchOptions
from eaglecli.commands._speculation import SpeculationPlan, describe_shares, make_policy, plan_speculation
from eaglecli.config import CHOOSER_SETTINGS, COMMAND_LINE, GenerateSettings
from eaglecli.engine.adaptive_policy import AdaptivePolicy
from eaglecli.engine.engine import Engine
from eaglecli.engine.modes import accept_length
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.engine.speculation_policy import TablePolicy
from eaglecli.errors import UserError
from eaglecli.io.bench_statistics import ratio_interval

_COUNTERS = ("num_changes", "num_trials", "num_trial_iterations")


def with_choosing(
    listed: tuple[BenchConfiguration, ...], options: BenchOptions, settings: GenerateSettings, has_draft: bool
) -> tuple[BenchConfiguration, ...]:
    """`listed`, and where the settings ask for a choice of triples one configuration more at each of their batch sizes.

    Where a table holds one triple for all batches up to a size, and that is listed, there is nothing more to measure.
    Raises UserError when the command line asks for it and it cannot be; what a config file asks for is left out then.
    """
    is_wanted = bool(settings.speculative_adaptive or settings.speculative_adaptive_config)
    needs_it = options.assert_adaptive_ratio is not None
    if needs_it and not is_wanted:
        raise UserError("--assert-adaptive-ratio needs an adaptive configuration to hold against the others", "add --speculative-adaptive")
    if not is_wanted:
        return listed
    given = next((name for name in CHOOSER_SETTINGS if settings.origin(name) == COMMAND_LINE), None)
    refusal = _refusal(given or CHOOSER_SETTINGS[0], options, has_draft)
    if refusal is not None:
        if given is not None or needs_it:
            raise refusal
        return listed
    sizes = tuple(dict.fromkeys(item.batch_size for item in listed))
    plan = plan_speculation(replace(settings, max_running_requests=max(sizes)), has_draft)
    choosing = (BenchConfiguration(size, plan) for size in sizes if needs_it or _only_choice(plan, size) not in _fixed_at(listed, size))
    return (*listed, *choosing)


def _only_choice(plan: SpeculationPlan, batch_size: int) -> SpeculationSettings | None:
    """What a table does with every batch of up to that size; None where it changes, or who chooses measures."""
    if plan.table is None:
        return None
    policy = TablePolicy(plan.table)
    chosen = {policy.choose(size) for size in range(1, batch_size + 1)}
    return plan.all[chosen.pop()] if len(chosen) == 1 else None


def _fixed_at(listed: Sequence[BenchConfiguration], batch_size: int) -> set[SpeculationSettings]:
    return {item.fixed for item in listed if item.batch_size == batch_size and item.fixed is not None}


def _refusal(name: str, options: BenchOptions, has_draft: bool) -> UserError | None:
    option = f"--{name.replace('_', '-')}"
    if not has_draft:
        return UserError(f"{option} needs a draft", "name one with --draft")
    if options.simulate_acc_len is not None:
        return UserError(
            f"--simulate-acc-len is what one triple accepts; {option} chooses by what each of several does",
            "leave one of the two out",
        )
    return None


def begin_policy(engine: Engine, plan: SpeculationPlan, batch_size: int) -> dict[str, Any]:
    """Give the engine a policy that has seen nothing; what the start of it took and measured, {} without a choice of triples."""
    started = perf_counter()
    engine.policy = make_policy(engine, plan)
    if not isinstance(engine.policy, AdaptivePolicy):
        return {}
    costs = {str(speculation): engine.policy.costs.seconds(mode, batch_size) * 1e3 for mode, speculation in enumerate(plan.all)}
    return {"start_costs_ms": costs, "start_costs_s": perf_counter() - started}


def describe_choices(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What each mode did between two summaries of an engine, and what its policy says in the second one."""
    earlier, later = before["modes"], after["modes"]
    counts = ("iterations", "tokens", "row_steps", "accepted_drafts")
    done = {name: {key: later[name][key] - earlier[name][key] for key in counts} for name in later}
    for mode in done.values():
        mode["accept_length"] = accept_length(mode["accepted_drafts"], mode["row_steps"])
    totals = {key: sum(mode[key] for mode in done.values()) or 1 for key in ("iterations", "tokens")}
    modes = {name: {**mode, **{f"share_of_{key}": mode[key] / totals[key] for key in totals}} for name, mode in done.items()}
    said = {key: value for key, value in after.items() if key not in ("modes", "changes")}
    return said | {key: after[key] - before[key] for key in _COUNTERS if key in after} | {"modes": modes}


def describe_choosing(item: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on one result whose engine chose between triples."""
    choices = item["speculation"]
    if "start_costs_ms" in choices:
        costs = ", ".join(f"{name} {cost_ms:.2f}" for name, cost_ms in choices["start_costs_ms"].items())
        yield f"{item['label']}: ms of an iteration as measured in {choices['start_costs_s']:.1f} s of its start: {costs}"
    shares = describe_shares(item)
    if shares is not None:
        yield f"{item['label']}: {shares}"


def put_ratios_to_best(found: Sequence[dict[str, Any]]) -> None:
    """Into every configuration that chooses: its ratio to the fastest one at its batch size that does not."""
    for item in found:
        fixed = [other for other in found if other["batch_size"] == item["batch_size"] and other["mode"] not in CHOOSING_MODES]
        if item["mode"] not in CHOOSING_MODES or not fixed:
            continue
        best = max(fixed, key=lambda other: other["output_throughput"])
        ours, theirs = ([repeat["output_throughput"] for repeat in each["repeats"]] for each in (item, best))
        ratio = item["output_throughput"] / best["output_throughput"]
        item["ratio_to_best_fixed"] = {
            "over": best["label"],
            "mode": best["mode"],
            "ratio": ratio,
            "interval": ratio_interval(ours, theirs),
        }
