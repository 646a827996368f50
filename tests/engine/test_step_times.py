"""How long iterations took, as policies are told: only where the host did nothing else between two records."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request
from eaglecli.engine.settings import PLAIN, Alternative, EngineSettings, SpeculationSettings
from eaglecli.engine.speculation_policy import FixedPolicy, ScriptedPolicy, StepObservation
from tests.engine.harness import CONTEXT, LoadedPair, random_prompts, requests_of


class Listener(FixedPolicy):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StepObservation] = []

    def observe(self, observation: StepObservation) -> None:
        self.seen.append(observation)


def test_a_prefill_hides_how_long_its_iteration_and_the_one_before_took(rand: LoadedPair) -> None:
    """While the host admits, the iteration in flight ends: its record is read when the host has time, not when it is there."""
    backend = replace(TORCH, needs_host_lengths=False)  # an iteration is in flight, as on a GPU
    engine = Engine(rand.target.model, None, EngineSettings(CONTEXT, 4096, speculation=PLAIN), backend)
    engine.policy = listener = Listener()
    first, second = requests_of(random_prompts([5, 6]), 30)
    engine.add(first)
    for _ in range(6):
        engine.step()
    engine.add(second)
    for _ in range(5):
        engine.step()
    is_timed = [observation.seconds is not None for observation in listener.seen]
    num_requests = [observation.num_requests for observation in listener.seen]
    joined = num_requests.index(2)
    assert num_requests == [1] * joined + [2] * (len(num_requests) - joined) and joined == 6
    assert is_timed == [False] + [True] * (joined - 2) + [False, False] + [True] * (len(is_timed) - joined - 1)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_catching_up_hides_how_long_the_iteration_before_took_but_not_its_own_cost(rand: LoadedPair, is_ahead: bool) -> None:
    modes = PLAIN, SpeculationSettings(2, 1, 3)
    settings = EngineSettings(CONTEXT, 4096, speculation=modes[0], alternatives=(Alternative(modes[1], 4),))
    engine = Engine(rand.target.model, rand.draft.model, settings, replace(TORCH, needs_host_lengths=not is_ahead))
    seen: list[StepObservation] = []
    script = iter([0] * 5 + [1] * 4 + [0] * 9)
    engine.policy = ScriptedPolicy(lambda num_requests: next(script), seen.append)
    engine.add(requests_of(random_prompts([5]), 30)[0])
    for _ in range(10):
        engine.step()
    assert [observation.mode for observation in seen[:8]] == [0] * 5 + [1] * 3
    assert [observation.caught_up for observation in seen[:8]] == [False] * 5 + [True] + [False] * 2
    is_timed = [observation.seconds is not None for observation in seen[1:8]]
    assert is_timed == [True] * 3 + [not is_ahead] + [True] * 3


class StopsAt:
    """A stop string that ends with so many tokens: the device does not see it, and its row runs on."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def look(self, output_ids: np.ndarray) -> tuple[int, str] | None:
        return (self.num_tokens, "stop") if len(output_ids) >= self.num_tokens else None


def test_rows_that_ended_while_an_iteration_was_in_flight_count_for_nobody(cycle: LoadedPair) -> None:
    """Their rows are another request's when its record comes: the policy and the mode hear of the rows that are still whose they were."""
    settings = EngineSettings(CONTEXT, 4096, max_running_requests=2, speculation=SpeculationSettings(3, 1, 4))
    engine = Engine(cycle.target.model, cycle.draft.model, settings, replace(TORCH, needs_host_lengths=False))
    engine.policy = listener = Listener()
    (one,) = requests_of(random_prompts([5]), 40)
    capped = [Request(cap, one.prompt_ids, replace(one.sampling, max_new_tokens=cap)) for cap in (33, 9, 17, 10)]
    stopped = [replace(one, key=-length, make_stop_watch=partial(StopsAt, length)) for length in (13, 9, 29)]  # at the end of a step
    completions = list(engine.generate([*capped, *stopped]))
    row_steps, accepted = (sum(getattr(done, name) for done in completions) for name in ("num_verify_steps", "num_accepted_drafts"))
    assert engine.counts.num_wasted_row_steps >= 4 and engine.counts.num_row_steps == row_steps + engine.counts.num_wasted_row_steps
    (mode,), by_requests = engine.modes, engine.summary()["accepted_by_requests"].values()
    assert (mode.num_row_steps, mode.num_accepted_drafts) == (row_steps, accepted)
    assert sum(split["row_steps"] for split in by_requests) == row_steps
    assert sum(split["accepted_drafts"] for split in by_requests) == accepted
    num_tokens = sum(len(done.output_ids) - 1 for done in completions)
    assert (mode.num_tokens, sum(observation.num_tokens for observation in listener.seen)) == (num_tokens, num_tokens)
    told = [count for observation in listener.seen for count in observation.accept_counts.tolist()]
    going_on = [done.accept_counts[: len(done.accept_counts) - (done.finish_reason == "length")].tolist() for done in completions]
    assert sorted(told) == sorted(itertools.chain.from_iterable(going_on))
