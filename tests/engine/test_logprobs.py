"""Log-probabilities: one entry a token, of the model's own law, the same with a draft as without."""

import dataclasses

import numpy as np
import pytest
import torch

from eaglecli.engine.request import Completion, Request
from tests.engine.harness import LoadedPair, Triple, accept_lists, make_engine, mixed_requests, random_prompts, requests_of, run, texts
from tests.engine.test_graph_runner import play_graphs
from tests.oracle import generate_plain

WANTED = (None, 0, 3, 20)
ADJUSTED = {"repetition_penalty": 1.5, "logit_bias": ((4, 8.0),)}


def asking_requests(count: int, seed: int = 0, **options: object) -> list[Request]:
    """Requests that want no log-probabilities, or those of 0, 3 or 20 alternatives."""
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=WANTED[number % 4], **options))
        for number, request in enumerate(mixed_requests(count, seed, max_prompt=25, max_cap=20))
    ]


def assert_follow_the_oracle(pair: LoadedPair, found: dict[object, Completion]) -> None:
    """One entry a token, values of a naive log-softmax, alternatives best first and lowest id first."""
    for completion in found.values():
        sampling, given = completion.request.sampling, completion.logprobs
        if sampling.logprobs is None:
            assert given is None
            continue
        expected = generate_plain(pair.oracle_target, completion.request.prompt_ids, sampling, completion.request.sample)
        assert completion.output_ids.tolist() == expected.output_ids
        laws = torch.stack(expected.logprobs).numpy()
        steps, k = np.arange(len(laws)), sampling.logprobs
        assert (given.chosen.dtype, given.top_ids.dtype, given.top_values.dtype) == (np.float32, np.int32, np.float32)
        assert given.chosen.shape == steps.shape
        assert given.top_ids.shape == given.top_values.shape == (len(steps), k)
        assert np.allclose(given.chosen, laws[steps, completion.output_ids], atol=2e-4)
        assert np.allclose(given.top_values, -np.sort(-laws, axis=1)[:, :k], atol=2e-4)
        assert np.allclose(given.top_values, np.take_along_axis(laws, given.top_ids.astype(np.int64), 1), atol=2e-4)


@pytest.mark.parametrize("triple", [None, (4, 1, 5), (3, 3, 9)], ids=str)
def test_every_token_has_the_logprobs_of_the_models_own_law(pair: LoadedPair, triple: Triple | None) -> None:
    """B53: greedy and sampled rows, rows with adjusted logits, rows that ask for nothing, in one batch."""
    requests = asking_requests(9) + [
        dataclasses.replace(request, key=("adjusted", request.key)) for request in asking_requests(4, seed=5, **ADJUSTED)
    ]
    found = run(make_engine(pair.target, pair.draft, triple, adjusts_logits=True, max_logprobs=20), requests)
    assert_follow_the_oracle(pair, found)


def test_logprobs_change_neither_text_nor_acceptance(twin: LoadedPair) -> None:
    """B53."""
    requests = asking_requests(9)
    without = [dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=None)) for request in requests]
    plain = run(make_engine(twin.target, twin.draft, (3, 2, 7)), without)
    found = run(make_engine(twin.target, twin.draft, (3, 2, 7), max_logprobs=20), requests)
    assert texts(found) == texts(plain)
    assert accept_lists(found) == accept_lists(plain)


def test_a_graph_made_for_all_serves_rows_that_want_none(twin: LoadedPair) -> None:
    engine = make_engine(twin.target, twin.draft, (3, 2, 6), max_logprobs=20, graph_sizes=(1, 2, 4, 8, 16))
    play_graphs(engine, (1, 2, 4, 8, 16))
    assert_follow_the_oracle(twin, run(engine, asking_requests(9, seed=2)))


def test_an_answer_that_is_cut_has_the_logprobs_of_its_tokens_alone(cycle: LoadedPair) -> None:
    """Chains of 5 on CYCLE end inside a step: by the cap, and by a stop id."""
    capped = requests_of([[10]], 9, logprobs=1)
    stopped = [dataclasses.replace(request, key="stop") for request in requests_of([[10]], 40, logprobs=1, stop_token_ids=(13,))]
    found = run(make_engine(cycle.target, cycle.draft, (5, 1, 6), max_logprobs=1), [*capped, *stopped])
    assert [len(found[key].logprobs.chosen) for key in (0, "stop")] == [len(found[key].output_ids) for key in (0, "stop")] == [9, 3]
    assert_follow_the_oracle(cycle, found)


def test_padding_and_poison_do_not_reach_logprobs(twin: LoadedPair) -> None:
    engine = make_engine(twin.target, twin.draft, (3, 2, 7), max_logprobs=4, graph_sizes=(4, 8), max_running_requests=9, context_length=256)
    assert all(engine.check_stages(count, seed=count).is_exact for count in (9, 3))


@pytest.mark.parametrize(("max_logprobs", "asked"), [(None, 0), (2, 3)])
def test_more_than_the_engine_was_opened_for_is_refused(twin: LoadedPair, max_logprobs: int | None, asked: int) -> None:
    (request,) = requests_of(random_prompts([4]), 3, logprobs=asked)
    assert f"{asked} alternatives" in (make_engine(twin.target, None, max_logprobs=max_logprobs).refusal(request) or "")
