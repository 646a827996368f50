"""How long iterations took, as policies are told: only where the host did nothing else between two records."""

from dataclasses import replace

from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
from eaglecli.engine.settings import PLAIN, EngineSettings
from eaglecli.engine.speculation_policy import FixedPolicy, StepObservation
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
