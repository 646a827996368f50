"""How long iterations took, as policies are told: only where the host did nothing else between two records."""

from dataclasses import replace

import pytest

from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
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
