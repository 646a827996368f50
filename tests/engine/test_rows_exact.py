"""Greedy text does not change, and what must be accepted is: kind EXACT of the known failures, and the counts of CYCLE."""

import pytest

from tests.engine.harness import LoadedPair, Triple, accept_length, make_engine, requests_of, run, texts

SUBJECTS = ("a river", "the number", "an old map", "my train", "glass", "winter", "a small town", "the sound of")
PROMPTS = [
    f"{verb} {subject} {number}".encode() for number, subject in enumerate(SUBJECTS * 2) for verb in ("Tell", "Write", "Why", "List", "?")
]


def test_80_prompts_of_128_tokens_read_the_same_with_and_without_speculation(twin: LoadedPair) -> None:
    """B29: 80 of 80, chain and tree."""
    requests = requests_of([list(prompt) for prompt in PROMPTS], 128)
    plain = texts(run(make_engine(twin.target, None, max_running_requests=80), requests))
    triples: list[Triple] = [(4, 1, 5), (3, 2, 7)]
    for triple in triples:
        found = texts(run(make_engine(twin.target, twin.draft, triple, max_running_requests=64), requests))
        assert sum(found[key] == plain[key] for key in plain) == len(PROMPTS) == 80


@pytest.mark.parametrize("triple", [(1, 1, 2), (5, 1, 6), (3, 2, 6), (4, 4, 16), (2, 3, 13), (7, 2, 8)], ids=str)
def test_cycle_accepts_every_step_in_full(cycle: LoadedPair, triple: Triple) -> None:
    num_steps = triple[0]
    requests = requests_of([[0], [7, 8, 9], [50] * 20], 1 + 10 * (num_steps + 1))
    found = run(make_engine(cycle.target, cycle.draft, triple), requests)
    assert all(completion.accept_counts.tolist() == [num_steps] * 10 for completion in found.values())
    assert all(completion.num_cut_tokens == 0 for completion in found.values())


def test_cycle_of_depth_5_has_an_accept_length_of_6(cycle: LoadedPair) -> None:
    """Cap 61: one token of the prefill, then 60 in 10 steps."""
    found = run(make_engine(cycle.target, cycle.draft, (5, 1, 6)), requests_of([[3]], 61))
    assert len(found[0].output_ids) == 61
    assert found[0].num_verify_steps == 10
    assert accept_length(found) == 6.0
    assert found[0].num_proposed_drafts == 50


def test_nodes_past_the_cap_are_not_accepted(cycle: LoadedPair) -> None:
    """16 tokens: 1, then 6, 6 and the last 3, whose step accepts 3 drafts and has no room for its own token."""
    found = run(make_engine(cycle.target, cycle.draft, (5, 1, 6)), requests_of([[3]], 16))
    assert found[0].accept_counts.tolist() == [5, 5, 3]
    assert found[0].num_cut_tokens == 1
