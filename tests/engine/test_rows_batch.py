"""Requests that share a batch do not touch one another: kind BATCH of the known failures."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from eaglecli.engine.request import Request, SamplingParams
from tests.engine.harness import (
    LoadedPair,
    Triple,
    draft_dir,
    load_engine_pair,
    make_engine,
    outcomes,
    random_prompt,
    requests_of,
    run,
    texts,
)
from tests.fixtures import change_checkpoint, disjoint_cycles, read_checkpoint

CYCLES = disjoint_cycles()
LENGTH = len(CYCLES[0])
Outcomes = dict[object, tuple[list[int], str, list[int]]]


def cycle_request(key: int, prompt_len: int, cap: int) -> Request:
    """A prompt that runs round cycle `key`."""
    prompt = np.array([CYCLES[key][index % LENGTH] for index in range(prompt_len)], np.int32)
    return Request(key, prompt, SamplingParams(max_new_tokens=cap))


def cycle_texts(requests: list[Request]) -> dict[object, tuple[list[int], str]]:
    """What each `cycle_request` must be answered."""
    found: dict[object, tuple[list[int], str]] = {}
    for request in requests:
        first, cap = len(request.prompt_ids), request.sampling.max_new_tokens
        found[request.key] = [CYCLES[int(str(request.key))][(first + index) % LENGTH] for index in range(cap)], "length"
    return found


@pytest.mark.parametrize("num_running", [64, 7])
@pytest.mark.parametrize("triple", [None, (5, 1, 6), (3, 2, 7)], ids=str)
def test_every_output_stays_inside_its_own_cycle(cycle: LoadedPair, triple: Triple | None, num_running: int) -> None:
    """B21."""
    random = np.random.default_rng(0)
    requests = [cycle_request(key, int(random.integers(1, 90)), int(random.integers(1, 40))) for key in range(64)]
    engine = make_engine(cycle.target, cycle.draft, triple, max_running_requests=num_running)
    assert texts(run(engine, requests)) == cycle_texts(requests)


def test_64_requests_may_all_end_in_the_same_step(cycle: LoadedPair) -> None:
    """B22: one prefill, then five full steps for everyone."""
    requests = [cycle_request(key, 5, 31) for key in range(64)]
    engine = make_engine(cycle.target, cycle.draft, (5, 1, 6), max_running_requests=64, chunked_prefill_size=64 * 5)
    found = run(engine, requests)
    assert texts(found) == cycle_texts(requests)
    assert all(completion.accept_counts.tolist() == [5] * 5 for completion in found.values())


@pytest.fixture(scope="module")
def shrinking() -> list[Request]:
    """Caps 1 to 64, greedy and sampled by turns."""
    return [
        Request(cap, random_prompt(1 + cap % 19, cap), SamplingParams(temperature=float(cap % 2), seed=cap, max_new_tokens=cap))
        for cap in range(1, 65)
    ]


@pytest.fixture(scope="module")
def together(twin: LoadedPair, shrinking: list[Request]) -> Outcomes:
    return outcomes(run(make_engine(twin.target, twin.draft, (4, 1, 5), max_running_requests=64), shrinking))


def test_batch_that_shrinks_at_each_step_equals_running_alone(twin: LoadedPair, shrinking: list[Request], together: Outcomes) -> None:
    """B22: every seventh request alone with its accept list, the text of all against plain decoding."""
    engine = make_engine(twin.target, twin.draft, (4, 1, 5), max_running_requests=1)
    alone = outcomes(run(engine, shrinking[::7]))
    assert {key: together[key] for key in alone} == alone
    plain = texts(run(make_engine(twin.target, None, max_running_requests=64), shrinking))
    assert {key: outcome[:2] for key, outcome in together.items()} == plain


def test_request_that_joins_at_each_step_changes_nothing(twin: LoadedPair, shrinking: list[Request], together: Outcomes) -> None:
    """B22: rows are given back and taken again while others run."""
    engine = make_engine(twin.target, twin.draft, (4, 1, 5), max_running_requests=12)
    completions = {}
    waiting = list(shrinking)
    while waiting or not engine.is_idle:
        if waiting:
            engine.add(waiting.pop())
        completions |= {completion.request.key: completion for completion in engine.step()}
        engine.check()
    assert outcomes(completions) == together


@pytest.mark.parametrize("triple", [(5, 1, 6), (5, 2, 8)], ids=str)
def test_full_and_refused_rows_advance_side_by_side(cycle: LoadedPair, tmp_path: Path, triple: Triple) -> None:
    """B24: the draft knows cycle 0 and is wrong on cycles 1 and 2, whose head rows are exchanged."""
    head = read_checkpoint(cycle.target.path)[1]["lm_head.weight"]
    exchanged = head.clone()
    exchanged[CYCLES[1]], exchanged[CYCLES[2]] = head[CYCLES[2]], head[CYCLES[1]]
    change_checkpoint(draft_dir(cycle), tmp_path, tensors={"lm_head.weight": exchanged})
    target, draft = load_engine_pair(cycle.target.path, tmp_path)
    requests = [cycle_request(0, 4, 31), cycle_request(1, 9, 31)]
    found = run(make_engine(target, draft, triple), requests)
    assert texts(found) == cycle_texts(requests)
    assert found[0].accept_counts.tolist() == [5] * 5
    assert found[1].accept_counts.tolist() == [0] * 30


def test_equal_requests_get_equal_answers_wherever_they_stand(rand: LoadedPair) -> None:
    """B21: a row's answer does not depend on the row it has."""
    request = requests_of([random_prompt(9, 5)], 20)[0]
    copies = [dataclasses.replace(request, key=key) for key in range(12)]
    found = outcomes(run(make_engine(rand.target, rand.draft, (3, 2, 6), max_running_requests=5), copies))
    assert all(found[key] == found[0] for key in found)
