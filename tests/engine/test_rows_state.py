"""Positions and chunk borders: kind STATE of the known failures."""

import numpy as np
import pytest

from eaglecli.engine.request import Completion
from tests.engine.harness import LoadedPair, make_engine, oracle_eagle, outcomes, random_prompts, requests_of, run

NUM_STEPS = 5


def accepted_at_depth(completions: dict[object, Completion]) -> list[int]:
    """Verify steps that accepted a draft at depth 1, 2, ..., NUM_STEPS."""
    counts = np.concatenate([completion.accept_counts for completion in completions.values()])
    return [int((counts >= depth).sum()) for depth in range(1, NUM_STEPS + 1)]


def test_acceptance_at_each_depth_equals_the_oracles_and_does_not_fall(twin: LoadedPair) -> None:
    """B17: a draft that rotates by one too many loses from depth 2 on."""
    requests = requests_of(random_prompts([2 + number % 11 for number in range(40)]), 14)
    found = run(make_engine(twin.target, twin.draft, (NUM_STEPS, 1, NUM_STEPS + 1), max_running_requests=40), requests)
    expected = oracle_eagle(twin, requests, (NUM_STEPS, 1, NUM_STEPS + 1))
    by_depth = [result.accepted_at_depth(NUM_STEPS) for result in expected.values()]
    assert accepted_at_depth(found) == np.sum(by_depth, axis=0).tolist()
    assert {key: completion.accept_counts.tolist() for key, completion in found.items()} == {
        key: result.accept_counts for key, result in expected.items()
    }


def test_share_accepted_of_those_that_came_so_far_stays_level(twin: LoadedPair) -> None:
    """B17, by itself: a draft that sees wrong keys or features loses from depth 2 on. The last steps, cut by the cap, are left out.

    A position that is off by one costs TWIN a few percent only: the oracle's counts show that.
    """
    requests = requests_of(random_prompts([8] * 40, seed=100), 60)
    found = run(make_engine(twin.target, twin.draft, (NUM_STEPS, 1, NUM_STEPS + 1), max_running_requests=40), requests)
    counts = np.concatenate([completion.accept_counts[:-2] for completion in found.values()])
    reached = [int((counts >= depth).sum()) for depth in range(NUM_STEPS + 1)]
    shares = [after / before for before, after in zip(reached, reached[1:], strict=False)]
    assert min(shares[1:]) > shares[0] - 0.1, shares


@pytest.mark.parametrize(("name", "chunk_sizes"), [("twin", (1, 7, 16, 199, 200)), ("e3", (199,))])
def test_output_and_accept_list_do_not_depend_on_the_chunk_size(
    request: pytest.FixtureRequest, name: str, chunk_sizes: tuple[int, ...]
) -> None:
    """B19: at the end of a chunk the draft sees the next token of the prompt."""
    pair: LoadedPair = request.getfixturevalue(name)
    requests = requests_of(random_prompts([200], seed=7), 40)
    whole = outcomes(run(make_engine(pair.target, pair.draft, (4, 1, 5), chunked_prefill_size=2048), requests))
    for chunk_size in chunk_sizes:
        engine = make_engine(pair.target, pair.draft, (4, 1, 5), chunked_prefill_size=chunk_size)
        assert outcomes(run(engine, requests)) == whole, chunk_size
