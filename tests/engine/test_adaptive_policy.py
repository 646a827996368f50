"""The adaptive policy on a simulated clock: costs like an 8B target's on an H200, drafts that are always, often, seldom or never right."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from eaglecli.engine.acceptance import Acceptance
from eaglecli.engine.adaptive_policy import LONGEST_WAIT_ITERATIONS, AdaptivePolicy
from eaglecli.engine.iteration_costs import IterationCosts
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from eaglecli.engine.speculation_policy import SpeculationPolicy, StepObservation

MODES = (
    SpeculationSettings(5, 1, 6),
    PLAIN,
    SpeculationSettings(2, 1, 3),
    SpeculationSettings(3, 1, 4),
    SpeculationSettings(7, 1, 8),
    SpeculationSettings(5, 4, 16),
)
LIMITS = (256, 256, 256, 256, 128, 64)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GOOD, FAIR, NEVER = (0.85, 0.83, 0.8, 0.78, 0.76, 0.74, 0.72), (0.66, 0.62, 0.58, 0.55, 0.52, 0.5, 0.5), (0.0,) * 7
KEYS_S = 2e-6  # of reading keys, a row: the start does not see it
CATCH_UP_S = 1e-3


def true_cost_s(mode: int, num_requests: int, keys_s: float = KEYS_S) -> float:
    """Weights once, then arithmetic with the tokens; a draft step costs a twentieth."""
    speculation = MODES[mode]

    def forward_s(tokens: int) -> float:
        return 4.3e-3 * (1 + tokens / 300 + max(0, tokens - 200) / 300)

    draft_s = sum(forward_s(speculation.topk * num_requests) / 20 for _ in range(speculation.num_steps))
    return forward_s(speculation.num_draft_tokens * num_requests) + draft_s + keys_s * num_requests


def measured_costs(wrong: dict[int, float] | None = None) -> IterationCosts:
    factors = wrong or {}
    return IterationCosts({(m, n): true_cost_s(m, n, 0.0) * factors.get(m, 1.0) for m in range(len(MODES)) for n in SIZES})


@dataclass
class World:
    """An engine that is nothing but a clock: accepts at random by the chain's rates of each depth, trees at (1 - (1 - rate)^lift)."""

    policy: SpeculationPolicy
    rates: Sequence[float]
    lift: float = 1.6
    noise: float = 0.03

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.seconds, self.num_tokens = 0.0, 0
        self.used = np.zeros(len(MODES), int)
        self.in_flight: StepObservation | None = None
        self.behind = False

    def rates_of(self, mode: int) -> np.ndarray:
        speculation = MODES[mode]
        rates = np.array(self.rates[: speculation.num_steps])
        return rates if speculation.topk == 1 else 1 - (1 - rates) ** self.lift

    def expected_rate(self, mode: int, num_requests: int) -> float:
        return num_requests * (1 + float(np.cumprod(self.rates_of(mode)).sum())) / true_cost_s(mode, num_requests)

    def best_fixed(self, num_requests: int) -> float:
        return max(self.expected_rate(mode, num_requests) for mode, most in enumerate(LIMITS) if num_requests <= most)

    def run(self, batches: Iterator[int] | Sequence[int]) -> float:
        """Tokens a second over the batches."""
        seconds, num_tokens = self.seconds, self.num_tokens
        for num_requests in batches:
            mode = self.policy.choose(num_requests)
            self.used[mode] += 1
            hits = self.random.random((num_requests, MODES[mode].num_steps)) < self.rates_of(mode)
            accepts = np.cumprod(hits, axis=1).sum(1)
            caught_up = self.behind and mode != 1
            self.behind = mode == 1
            step_s = true_cost_s(mode, num_requests) * float(self.random.normal(1, self.noise)) + CATCH_UP_S * caught_up
            if self.random.random() < 0.01:
                step_s *= 3  # the host was busy
            self.seconds += step_s
            self.num_tokens += int(accepts.sum()) + num_requests
            if self.in_flight is not None:
                self.policy.observe(self.in_flight)
            self.in_flight = StepObservation(mode, num_requests, accepts, int(accepts.sum()) + num_requests, step_s, caught_up)
        return (self.num_tokens - num_tokens) / (self.seconds - seconds)


def adaptive(costs: IterationCosts | None = None, watch: Callable[[str], None] = lambda line: None) -> AdaptivePolicy:
    return AdaptivePolicy(MODES, LIMITS, costs or measured_costs(), watch)


@pytest.mark.parametrize("num_requests", [1, 8, 32, 64, 256])
def test_a_draft_that_is_never_right_costs_two_percent_at_most(num_requests: int):
    world = World(adaptive(), NEVER)
    busy = 1.02  # the host's pauses
    assert world.run([num_requests] * 3000) * busy >= 0.98 * world.expected_rate(1, num_requests)
    assert world.used[1] > 0.9 * 3000


@pytest.mark.parametrize("rates", [GOOD, FAIR], ids=["good", "fair"])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 64, 128, 256])
def test_a_draft_of_any_worth_runs_at_the_best_fixed_setting(num_requests: int, rates: Sequence[float]):
    world = World(adaptive(), rates)
    assert world.run([num_requests] * 2000) * 1.02 >= 0.97 * world.best_fixed(num_requests)


def test_speculation_comes_back_when_the_draft_gets_better_and_goes_when_it_gets_worse():
    world = World(adaptive(), NEVER)
    world.run([8] * 1500)
    assert world.used[1] > 1300
    world.rates = GOOD
    world.run([8] * 2 * LONGEST_WAIT_ITERATIONS)
    before = world.used.copy()
    assert world.run([8] * 500) * 1.02 >= 0.97 * world.best_fixed(8)
    assert world.used[1] == before[1]
    world.rates = NEVER
    world.run([8] * 100)
    assert world.run([8] * 1000) * 1.02 >= 0.97 * world.expected_rate(1, 8)


def test_a_batch_that_shrinks_takes_speculation_up_again():
    """A long batch of requests with a tail: plain while it is full, deep trees for the last ones."""
    lines: list[str] = []
    world = World(adaptive(watch=lines.append), GOOD)
    world.run([256] * 400)
    assert world.used[1] + world.used[2] > 390
    assert world.run([1] * 400) * 1.02 >= 0.96 * world.best_fixed(1)
    assert world.policy.num_changes < 60
    assert lines and all("->" in line and "tokens in" in line for line in lines)


def test_costs_that_were_measured_wrongly_are_put_right():
    """The start takes a chain for 0.6 as dear as it is, and the mode that is best for a fifth dearer."""
    best = max(range(len(MODES)), key=lambda mode: World(adaptive(), GOOD).expected_rate(mode, 4))
    world = World(adaptive(measured_costs({best: 1.2, 3: 0.6})), GOOD)
    world.run([4] * 2500)
    assert world.run([4] * 1000) * 1.02 >= 0.97 * world.best_fixed(4)


@pytest.mark.parametrize("factor", [1.15, 1.5])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_plain_decoding_that_was_measured_too_dear_is_found_to_be_best(num_requests: int, factor: float):
    """It promises one token whatever happens: only its cost, put right by running it, can win."""
    world = World(adaptive(measured_costs({1: factor})), NEVER)
    world.run([num_requests] * 2000)
    before = world.used[1]
    world.run([num_requests] * 1000)
    assert world.used[1] - before > 900


def test_batches_that_go_to_and_fro_between_two_sizes_do_not_make_modes_flicker():
    world = World(adaptive(), FAIR)
    world.run(itertools.islice(itertools.cycle((120, 140)), 1000))
    assert world.policy.num_changes <= 2 * 1000 / 8


def test_modes_are_never_used_for_batches_past_their_limit():
    policy = adaptive()
    world = World(policy, GOOD)
    for size in (1, 64, 65, 128, 129, 256):
        before = world.used.copy()
        world.run([size] * 200)
        used = {mode for mode, (old, new) in enumerate(zip(before, world.used, strict=True)) if new > old}
        assert used <= {mode for mode, most in enumerate(LIMITS) if size <= most}


def test_the_description_names_modes_and_counts():
    world = World(adaptive(), FAIR)
    world.run([8] * 300)
    described = world.policy.describe()
    assert set(described["expected_tokens"]) == {str(mode) for mode in MODES} and described["expected_tokens"]["none"] == 1.0
    assert described["choice_by_batch_size"].keys() == {"8"}
    assert described["num_changes"] == len(described["changes"])
    assert described["num_trial_iterations"] >= described["num_trials"]


def test_a_chain_tells_of_shorter_and_longer_ones():
    acceptance = Acceptance(MODES)
    counts = np.repeat([0, 1, 2, 3, 4, 5], [40, 20, 10, 10, 10, 30])
    for _ in range(30):
        acceptance.observe(0, counts)
    assert acceptance.tokens(0) == pytest.approx(1 + counts.mean(), rel=0.02)
    assert acceptance.tokens(2) == pytest.approx(1 + np.minimum(counts, 2).mean(), rel=0.02)
    assert acceptance.tokens(0) < acceptance.tokens(4) < acceptance.tokens(0) + 0.5
    assert acceptance.tokens(5) > acceptance.tokens(0)  # a guess
    assert (acceptance.evidence(2) > 100, acceptance.evidence(4)) == (True, 0.0)
    assert acceptance.doubt(2) == 0.0 < 0.2 < acceptance.doubt(5)


def test_what_is_known_stays_while_nothing_is_seen_and_gives_way_quickly():
    acceptance = Acceptance(MODES)
    for _ in range(100):
        acceptance.observe(0, np.zeros(8, int))
    for _ in range(2000):
        acceptance.observe(1, np.zeros(8, int))
    assert acceptance.tokens(0) < 1.01
    for _ in range(4):
        acceptance.observe(0, np.full(8, 5))
    assert acceptance.tokens(0) > 3


def test_costs_are_lines_between_sizes_and_learn_what_the_start_did_not_see():
    costs = IterationCosts({(0, 1): 1.0, (0, 9): 3.0, (1, 1): 0.5, (1, 9): 0.9})
    assert [costs.seconds(0, n) for n in (1, 5, 9, 13)] == [1.0, 2.0, 3.0, 4.0]
    assert [costs.bucket(n) for n in (1, 2, 9, 20)] == [(1, 0), (9, 0), (9, 0), (9, 0)]
    for _ in range(200):
        costs.observe(0, 9, 3.4, caught_up=False)
    assert costs.seconds(0, 9) == pytest.approx(3.4, abs=0.01)
    assert 1.1 < costs.seconds(1, 9) < 1.3  # most of it is common
    assert costs.seconds(1, 1) == 0.5
    costs.observe(0, 9, 4.4, caught_up=True)
    assert costs.catch_up_s > 0 and costs.seconds(0, 9) == pytest.approx(3.4, abs=0.01)
    assert costs.seconds(0, 9, length_class=1) == 3.0  # nothing is known of long rows yet
    costs.observe(0, 9, 3.6, caught_up=False, length_class=1)
    assert costs.seconds(0, 9, length_class=1) > 3.1
    costs.observe(0, 9, 100.0, caught_up=False)  # a pause of the host
    assert costs.seconds(0, 9) < 4.0


def test_what_is_best_for_long_rows_is_learnt_apart():
    """A chain pays with short rows only; batches of both kinds take turns, and the start measured none of it."""
    modes = (SpeculationSettings(3, 1, 4), PLAIN)
    true_s = {(0, 0): 1.3e-3, (1, 0): 1e-3, (0, 1): 2.6e-3, (1, 1): 1e-3}  # by (mode, length class)
    policy = AdaptivePolicy(modes, [64, 64], IterationCosts({(mode, size): 1e-3 for mode in (0, 1) for size in (1, 64)}))
    for iteration in range(1200):
        length_class = iteration // 60 % 2
        mode = policy.choose(8, length_class)
        accepted = np.full(8, int(mode == 0))
        policy.observe(StepObservation(mode, 8, accepted, int(accepted.sum()) + 8, true_s[mode, length_class], False, length_class))
    assert policy.describe()["choice_by_batch_size"] == {"64": "3/1/4", "64, length class 1": "none"}
