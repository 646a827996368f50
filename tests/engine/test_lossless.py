"""EAGLE writes what the target alone would have written, token for token, and accepts what the oracle accepts, step by step."""

import random

import pytest

from tests.engine.harness import (
    LoadedPair,
    Triple,
    accept_lists,
    make_engine,
    mixed_requests,
    oracle_eagle,
    oracle_plain,
    run,
    texts,
)

TRIPLES: list[Triple] = [(1, 1, 2), (3, 1, 4), (6, 1, 7), (1, 2, 3), (2, 2, 5), (5, 2, 9), (2, 4, 12), (5, 4, 16), (6, 4, 33)]
REQUESTS = mixed_requests(16, max_cap=25)


@pytest.fixture(scope="module")
def plain(pair: LoadedPair) -> dict[object, tuple[list[int], str]]:
    return oracle_plain(pair, REQUESTS)


def test_plain_decoding_equals_the_oracle(pair: LoadedPair, plain: dict[object, tuple[list[int], str]]) -> None:
    assert texts(run(make_engine(pair.target, None), REQUESTS)) == plain


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_eagle_text_equals_plain_text(pair: LoadedPair, plain: dict[object, tuple[list[int], str]], triple: Triple) -> None:
    assert texts(run(make_engine(pair.target, pair.draft, triple), REQUESTS)) == plain


@pytest.mark.parametrize("triple", [(4, 1, 5), (3, 2, 6), (3, 4, 14)], ids=str)
def test_accept_lists_equal_the_oracle_step_by_step(pair: LoadedPair, triple: Triple) -> None:
    requests = mixed_requests(6, seed=1, max_prompt=24, max_cap=24)
    expected = oracle_eagle(pair, requests, triple)
    found = run(make_engine(pair.target, pair.draft, triple), requests)
    assert accept_lists(found) == {key: result.accept_counts for key, result in expected.items()}
    assert texts(found) == {key: (result.output_ids, result.finish_reason) for key, result in expected.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 1},
        {"max_running_requests": 5, "page_size": 1},
        {"page_size": 3, "max_total_tokens": 400},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 7, "page_size": 32},
        {"chunked_prefill_size": 16, "max_running_requests": 3},
        {"graph_sizes": (1, 2, 4, 8, 16)},
        {"graph_sizes": (3, 7), "max_running_requests": 7},
    ],
    ids=str,
)
def test_text_and_accept_lists_do_not_depend_on_the_batch(pair: LoadedPair, settings: dict[str, object]) -> None:
    reference = run(make_engine(pair.target, pair.draft, (4, 2, 7)), REQUESTS)
    shuffled = random.Random(3).sample(REQUESTS, len(REQUESTS))
    found = run(make_engine(pair.target, pair.draft, (4, 2, 7), **settings), shuffled)
    assert texts(found) == texts(reference)
    assert accept_lists(found) == accept_lists(reference)


def test_stop_ids_end_the_output_at_the_oracles_token(pair: LoadedPair) -> None:
    requests = mixed_requests(12, seed=2, stop_token_ids=tuple(range(0, 320, 20)), max_cap=60)
    plain = oracle_plain(pair, requests)
    assert texts(run(make_engine(pair.target, pair.draft, (4, 2, 8)), requests)) == plain
    assert any(reason == "stop" for _, reason in plain.values()) and any(reason == "length" for _, reason in plain.values())
