"""Penalties, bias and least lengths under speculation: the text is that of plain decoding and of the oracle, token for token."""

import dataclasses
import random

import numpy as np
import pytest

from eaglecli.engine.request import Request, SamplingParams
from tests.engine.harness import (
    LoadedPair,
    Triple,
    accept_length,
    accept_lists,
    load_pair,
    make_engine,
    mixed_requests,
    oracle_eagle,
    oracle_plain,
    random_prompts,
    requests_of,
    run,
    texts,
)
from tests.engine.test_graph_runner import play_graphs
from tests.fixtures import VOCAB_SIZE, write_cycle

TRIPLES: list[Triple] = [(4, 1, 5), (3, 3, 9)]
OPTIONS = (
    {"min_new_tokens": 12},
    {"repetition_penalty": 2.7, "presence_penalty": -1.9, "frequency_penalty": 1.9, "logit_bias": ((31, 13.0),), "min_new_tokens": 6},
    {"logit_bias": ((7, 14.0), (90, 16.0), (200, -100.0)), "repetition_penalty": 0.6},
    {"repetition_penalty": 3.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
)
NOTHING = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "min_new_tokens": 0}


def adjusting_requests(count: int, seed: int = 0, stop_token_ids: tuple[int, ...] = tuple(range(0, 320, 40))) -> list[Request]:
    """Greedy and sampled requests; every third one asks for nothing, the others for each of OPTIONS in turn."""
    requests = []
    for number, request in enumerate(mixed_requests(count, seed, stop_token_ids=stop_token_ids, max_prompt=30, max_cap=30)):
        asked = {} if number % 3 == 2 else OPTIONS[number % len(OPTIONS)]
        sampling = dataclasses.replace(request.sampling, **asked)
        requests.append(dataclasses.replace(request, sampling=sampling))
    return requests


def adjusting_engine(pair: LoadedPair, triple: Triple | None, **settings):
    return make_engine(pair.target, pair.draft, triple, adjusts_logits=True, **settings)


REQUESTS = adjusting_requests(15)


@pytest.fixture(scope="module")
def plain(pair: LoadedPair) -> dict[object, tuple[list[int], str]]:
    return oracle_plain(pair, REQUESTS)


@pytest.mark.parametrize("triple", [None, *TRIPLES, (5, 2, 8)], ids=str)
def test_text_is_the_oracles_for_chains_trees_and_no_draft(pair: LoadedPair, plain, triple: Triple | None) -> None:
    """B36: rows with and without options in one batch."""
    assert texts(run(adjusting_engine(pair, triple), REQUESTS)) == plain


def test_the_options_change_the_text(twin: LoadedPair) -> None:
    """Or the tests above would prove nothing."""
    without = [dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **NOTHING)) for request in REQUESTS]
    before, after = oracle_plain(twin, without), oracle_plain(twin, REQUESTS)
    changed = {key for key in before if before[key] != after[key]}
    assert len(changed) >= 7
    assert not any(key % 3 == 2 for key in changed)


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_accept_lists_are_the_oracles(pair: LoadedPair, triple: Triple) -> None:
    requests = adjusting_requests(6, seed=3)
    expected = oracle_eagle(pair, requests, triple)
    found = run(adjusting_engine(pair, triple), requests)
    assert accept_lists(found) == {key: result.accept_counts for key, result in expected.items()}
    assert texts(found) == {key: (result.output_ids, result.finish_reason) for key, result in expected.items()}


@pytest.mark.parametrize(
    "settings",
    [{"max_running_requests": 2}, {"page_size": 3, "max_total_tokens": 300}, {"chunked_prefill_size": 5}, {"graph_sizes": (4, 20)}],
    ids=str,
)
def test_text_does_not_depend_on_the_batch_or_on_who_had_the_row_before(twin: LoadedPair, settings) -> None:
    shuffled = random.Random(1).sample(REQUESTS, len(REQUESTS))
    expected = texts(run(adjusting_engine(twin, None), REQUESTS))
    assert texts(run(adjusting_engine(twin, (3, 3, 9), **settings), shuffled)) == expected


def test_captured_stages_serve_rows_with_and_without_options(twin: LoadedPair) -> None:
    """A graph is made for the widest hints: it must do for every batch."""
    engine = adjusting_engine(twin, (3, 2, 6), graph_sizes=(1, 2, 4, 8, 16))
    play_graphs(engine, (1, 2, 4, 8, 16))
    assert texts(run(engine, REQUESTS)) == texts(run(adjusting_engine(twin, None), REQUESTS))
    assert engine.summary()["graph_hit_rate"] == 1.0


@pytest.mark.parametrize("triple", [(3, 2, 7), None], ids=str)
def test_padding_and_poison_do_not_reach_adjusted_rows(twin: LoadedPair, triple: Triple | None) -> None:
    engine = adjusting_engine(twin, triple, graph_sizes=(4, 8), max_running_requests=9, context_length=256)
    for count in (9, 3, 5):
        check = engine.check_stages(count, seed=count)
        assert check.is_exact
        assert check.num_padding_differs == 0


# ---- B36 on CYCLE, where every draft is right: what is not adjusted is accepted in full ------------------------------


@pytest.mark.parametrize("triple", [(5, 1, 6), (3, 2, 8)], ids=str)
@pytest.mark.parametrize(
    ("option", "stop_token_ids"),
    [
        ({"logit_bias": ((103, -100.0),)}, ()),
        ({"frequency_penalty": 1.93}, ()),  # 2 would make ties of the integer logits of CYCLE
        ({"repetition_penalty": 4.0}, ()),
        ({"min_new_tokens": 20}, (103,)),
        ({"min_new_tokens": 20}, (101, 102, 103)),
    ],
    ids=str,
)
def test_an_option_reaches_every_token_of_a_step(cycle: LoadedPair, triple: Triple, option, stop_token_ids) -> None:
    """B36: bias against the next token, a count for each accepted token, an end that comes too early."""
    requests = [Request(0, np.array([100], np.int32), SamplingParams(max_new_tokens=120, stop_token_ids=stop_token_ids, **option))]
    expected = oracle_plain(cycle, requests)
    found = run(adjusting_engine(cycle, triple), requests)
    assert texts(found) == expected
    assert expected[0] != oracle_plain(cycle, requests_of([[100]], 120, stop_token_ids=stop_token_ids))[0]
    assert not {*stop_token_ids} & {*expected[0][0][: option.get("min_new_tokens", 0)]}


@pytest.mark.parametrize("triple", [(5, 1, 6), (3, 2, 8)], ids=str)
def test_a_token_that_repeats_itself_is_counted_once_for_each_time(tmp_path_factory, triple: Triple) -> None:
    """B36: root, path and committed tokens are all the same token, and none may be counted twice."""
    pair = load_pair(write_cycle(tmp_path_factory.mktemp("steady"), [[1, 2, 3]]))
    requests = requests_of([[200], [90, 91]], 60, frequency_penalty=1.93) + [
        dataclasses.replace(request, key="rare") for request in requests_of([[120]], 60, frequency_penalty=0.71, repetition_penalty=1.1)
    ]
    expected = oracle_plain(pair, requests)
    assert all(len({*output_ids}) > 1 for output_ids, _ in expected.values()), "the penalty must be felt"
    assert texts(run(adjusting_engine(pair, triple), requests)) == expected


def test_a_penalty_that_is_never_felt_leaves_acceptance_as_it_is(cycle: LoadedPair) -> None:
    """A bias far from the text: every draft is still accepted."""
    requests = requests_of([[0], [7]], 61, logit_bias=((311, -50.0),))
    found = run(adjusting_engine(cycle, (5, 1, 6)), requests)
    assert accept_length(found) == 6.0


# ---- what an engine refuses ----------------------------------------------------------------------------------------


def test_an_engine_that_was_not_opened_for_it_refuses_by_reason(twin: LoadedPair) -> None:
    engine = make_engine(twin.target, None)
    (request,) = requests_of(random_prompts([4]), 3, repetition_penalty=1.1)
    assert "opened for them" in (engine.refusal(request) or "")
    (request,) = requests_of(random_prompts([4]), 3, min_new_tokens=2)  # nothing ends the output early: nothing to do
    assert engine.refusal(request) is None
    assert engine.summary()["num_pages"]


def test_a_bias_on_a_token_that_does_not_exist_is_refused(twin: LoadedPair) -> None:
    (request,) = requests_of(random_prompts([4]), 3, logit_bias=((5, 1.0), (VOCAB_SIZE, 1.0)))
    assert f"token {VOCAB_SIZE}" in (adjusting_engine(twin, None).refusal(request) or "")
