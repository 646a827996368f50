"""Pages of look-ahead are on the books: kind KV of the known failures."""

import numpy as np
import pytest

from tests.engine.harness import LoadedPair, Triple, make_engine, random_prompts, requests_of, run, texts

PAGE_SIZE = 4
PROMPT, CAP = 6, 2


@pytest.mark.parametrize("triple", [(1, 1, 2), (2, 4, 12)], ids=str)
def test_400_requests_pass_through_a_pool_for_4(rand: LoadedPair, triple: Triple) -> None:
    """B42: nearly all proposals are refused, so every step writes pages that are not kept."""
    num_steps, topk, num_nodes = triple
    pages_each = -(-(PROMPT + CAP + max(num_nodes, topk * (num_steps - 1))) // PAGE_SIZE)
    requests = requests_of(random_prompts([PROMPT] * 400), CAP)
    engine = make_engine(rand.target, rand.draft, triple, page_size=PAGE_SIZE, max_total_tokens=4 * pages_each * PAGE_SIZE)
    at_start = engine.summary()["num_free_pages"]
    found = run(engine, requests)
    assert len(found) == 400
    assert engine.summary()["num_free_pages"] == at_start == 4 * pages_each
    assert texts(found) == texts(run(make_engine(rand.target, None, max_running_requests=200), requests))
    assert np.concatenate([completion.accept_counts for completion in found.values()]).mean() < 0.3


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pool_without_look_ahead_for_one_request_refuses_it(rand: LoadedPair, page_size: int) -> None:
    """B42: the slots that a request is refused for are those of its prompt, its cap and the look-ahead of one step."""
    triple = (3, 4, 12)
    request = requests_of(random_prompts([PROMPT]), CAP)[0]
    needed = -(-(PROMPT + CAP + 12) // page_size) * page_size
    enough = make_engine(rand.target, rand.draft, triple, page_size=page_size, max_total_tokens=needed)
    assert run(enough, [request])[0].finish_reason == "length"
    short = make_engine(rand.target, rand.draft, triple, page_size=page_size, max_total_tokens=needed - 1)
    assert short.refusal(request) is not None
