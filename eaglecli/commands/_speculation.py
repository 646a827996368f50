"""Shared by the commands that run models: which ways to speculate a run may use, and who chooses between them.

Without `--speculative-adaptive` and without a table there is one triple and nothing to choose. A table alone is followed as it stands; with
`--speculative-adaptive` its entries are what is chosen from, at every batch size up to one row past their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglecli.config import DEFAULT, TRIPLE_SETTINGS, GenerateSettings, choose_speculation
from eaglecli.engine.adaptive_policy import AdaptivePolicy
from eaglecli.engine.engine import Engine
from eaglecli.engine.iteration_costs import IterationCosts
from eaglecli.engine.settings import PLAIN, Alternative, SpeculationSettings
from eaglecli.engine.speculation_policy import FixedPolicy, SpeculationPolicy, TablePolicy
from eaglecli.errors import UserError
from eaglecli.speculation_table import parse_triple

DEFAULT_CANDIDATES = ((2, 1, 3), (3, 1, 4), (5, 1, 6), (7, 1, 8), (5, 4, 16))
MOST_VERIFIED_TOKENS = 1024  # of an iteration: past it arithmetic has long become dearer than the weights that speculation saves


@dataclass(frozen=True)
class SpeculationPlan:
    """What an engine is to hold. `table`: (batch size, number of mode) to follow; None where modes are measured, or there is no choice."""

    first: SpeculationSettings
    alternatives: tuple[Alternative, ...] = ()
    is_adaptive: bool = False
    table: tuple[tuple[int, int], ...] | None = None

    @property
    def all(self) -> tuple[SpeculationSettings, ...]:
        """In the order of an engine's modes."""
        return (self.first, *(alternative.speculation for alternative in self.alternatives))

    @property
    def deepest(self) -> SpeculationSettings:
        """The one of most steps: what statistics by depth must have room for."""
        return max(self.all, key=lambda speculation: speculation.num_steps)

    @property
    def most_branches(self) -> int:
        """Candidates that the draft must be able to propose."""
        return max(speculation.topk for speculation in self.all)

    @property
    def lookahead(self) -> int:
        """Slots past a row's length."""
        return max(speculation.lookahead for speculation in self.all)

    def __str__(self) -> str:
        names = " ".join(map(str, self.all))
        return f"adaptive: {names}" if self.is_adaptive else f"by batch size: {names}" if self.table else names


def plan_speculation(settings: GenerateSettings, has_draft: bool) -> SpeculationPlan:
    """From the settings of a run. Raises UserError with the rule that is broken."""
    choice = choose_speculation(settings)
    chosen = SpeculationSettings(choice.num_steps, choice.topk, choice.num_draft_tokens)
    table = _read_table(settings)
    if not has_draft:
        if settings.speculative_adaptive and settings.origin("speculative_adaptive") == settings.origin("draft"):
            raise UserError("--speculative-adaptive needs a draft", "name one with --draft")
        return SpeculationPlan(PLAIN)
    is_given = any(settings.origin(name) != DEFAULT for name in TRIPLE_SETTINGS if getattr(settings, name) is not None)
    if table:
        return _plan_from_table(table, settings, chosen if is_given else None)
    if settings.speculative_adaptive:
        candidates = (SpeculationSettings(*triple) for triple in DEFAULT_CANDIDATES)
        return SpeculationPlan(chosen, (_plain(settings), *_limited(chosen, candidates, settings)), is_adaptive=True)
    return SpeculationPlan(chosen)


def make_policy(engine: Engine, plan: SpeculationPlan) -> SpeculationPolicy:
    """Who chooses. For an adaptive plan the engine's costs are measured now: graphs should be captured before."""
    if plan.table is not None:
        return TablePolicy(plan.table)
    if not plan.is_adaptive:
        return FixedPolicy()
    most = engine.settings.max_running_requests
    limits = (most, *(alternative.max_requests for alternative in plan.alternatives))
    return AdaptivePolicy(plan.all, limits, IterationCosts(engine.measure_costs()))


def describe_costs(policy: SpeculationPolicy, plan: SpeculationPlan, max_requests: int) -> str | None:
    """A sentence on what the start has measured; None where nothing was."""
    if not isinstance(policy, AdaptivePolicy):
        return None
    sizes = sorted({1, max_requests})
    costs = (
        f"{speculation} {' / '.join(f'{policy.costs.seconds(mode, size) * 1e3:.2f}' for size in sizes)}"
        for mode, speculation in enumerate(plan.all)
    )
    return f"adaptive speculation, ms of an iteration of {' / '.join(map(str, sizes))} requests: {', '.join(costs)}"


def describe_shares(summary: Mapping[str, Any]) -> str | None:
    """A sentence on what an engine with a choice did, from its summary; None where there was no choice, or nothing ran."""
    speculation = summary.get("speculation")
    if not speculation or not any(mode["iterations"] for mode in speculation["modes"].values()):
        return None
    shares = sorted(speculation["modes"].items(), key=lambda item: -item[1]["tokens"])
    used = ", ".join(f"{mode['share_of_tokens']:.0%} by {name}{_accepted(name, mode)}" for name, mode in shares if mode["iterations"])
    changes = f"; {speculation['num_changes']} changes" if "num_changes" in speculation else ""
    return f"speculation: {used} of the tokens{changes}"


def _accepted(name: str, mode: Mapping[str, Any]) -> str:
    length = mode.get("accept_length")
    return "" if length is None or name == str(PLAIN) else f" (accept length {length:.2f})"


def _read_table(settings: GenerateSettings) -> dict[int, tuple[SpeculationSettings, ...]]:
    table = settings.speculative_adaptive_config or {}
    return {int(size): tuple(SpeculationSettings(*parse_triple(name)) for name in names) for size, names in table.items()}


def _plan_from_table(
    table: Mapping[int, tuple[SpeculationSettings, ...]], settings: GenerateSettings, given: SpeculationSettings | None
) -> SpeculationPlan:
    most = settings.max_running_requests
    num_reached = sum(size < most for size in table) + 1 + settings.speculative_adaptive  # rows behind them hold for no batch
    sizes = list(table)[:num_reached]
    limits: dict[SpeculationSettings, int] = {}
    for place, size in enumerate(sizes):
        last = place == len(sizes) - 1
        reach = (
            most if last or (settings.speculative_adaptive and place == len(sizes) - 2) else sizes[place + settings.speculative_adaptive]
        )
        for speculation in table[size] if settings.speculative_adaptive else table[size][:1]:
            limits[speculation] = max(limits.get(speculation, 0), min(reach, most))
    if settings.speculative_adaptive:
        limits |= {speculation: most for speculation in (PLAIN, given) if speculation is not None}
    first = table[sizes[-1]][0]  # holds for the largest batches, as an engine's first mode must
    others = tuple(Alternative(speculation, limit) for speculation, limit in limits.items() if speculation != first)
    if settings.speculative_adaptive:
        return SpeculationPlan(first, others, is_adaptive=True)
    plan = SpeculationPlan(first, others)
    return SpeculationPlan(first, others, table=tuple((size, plan.all.index(table[size][0])) for size in sizes))


def _plain(settings: GenerateSettings) -> Alternative:
    return Alternative(PLAIN, settings.max_running_requests)


def _limited(chosen: SpeculationSettings, candidates: Any, settings: GenerateSettings) -> tuple[Alternative, ...]:
    """Those that are not chosen anyway, for batches that do not verify too many tokens at a time."""
    limits = (
        (speculation, min(MOST_VERIFIED_TOKENS // speculation.num_draft_tokens, settings.max_running_requests))
        for speculation in candidates
    )
    return tuple(Alternative(speculation, limit) for speculation, limit in limits if speculation != chosen)
