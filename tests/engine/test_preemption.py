"""A pool too small for what was admitted: rows grow page by page, the youngest gives way and is computed again, the text stays."""

from dataclasses import replace

import numpy as np
import pytest

from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
from eaglecli.engine.logit_adjustments import _counts_of_output
from eaglecli.engine.request import Completion, Request
from eaglecli.engine.row_state import write_growths
from eaglecli.engine.sequence import EmittedOutput, Sequence
from eaglecli.engine.settings import PLAIN, Alternative, EngineSettings, SchedulingSettings, SpeculationSettings
from eaglecli.engine.speculation_policy import ScriptedPolicy
from tests.engine.harness import (
    CONTEXT,
    DEVICE,
    LoadedPair,
    Triple,
    make_engine,
    mixed_requests,
    outcomes,
    random_prompts,
    requests_of,
    run,
    run_watched,
)

TRIPLES = [None, (3, 1, 4), (2, 3, 7)]
HOPEFUL = SchedulingSettings(pledged_share=0.0, growth_tokens=4)
POOL_TOKENS = 108
NUM_REQUESTS = 4


def small_pool(pair: LoadedPair, triple: Triple | None, **settings: object) -> Engine:
    """With an iteration in flight, and on a GPU with graphs of the sizes given."""
    pool = {"page_size": 4, "max_total_tokens": POOL_TOKENS, "chunked_prefill_size": 32, "scheduling": HOPEFUL}
    options = {"context_length": CONTEXT, **pool, **settings}
    speculation = SpeculationSettings(*triple) if triple else PLAIN
    backend = None if DEVICE.type == "cuda" else replace(TORCH, needs_host_lengths=False)
    draft = pair.draft.model if triple else None
    engine = Engine(pair.target.model, draft, EngineSettings(speculation=speculation, **options), backend)
    if engine.can_capture and engine.settings.graph_sizes:
        assert list(engine.capture())
    return engine


def long_requests() -> list[Request]:
    """Greedy and sampled by turns; their outputs outgrow the pages that they are given at first."""
    requests = mixed_requests(NUM_REQUESTS, seed=3)
    caps = (40, 36, 30, 40)
    return [replace(request, sampling=replace(request.sampling, max_new_tokens=cap)) for request, cap in zip(requests, caps, strict=True)]


@pytest.fixture(scope="module")
def expected() -> dict[object, dict[object, object]]:
    """Outcomes with an ample pool, by pair and triple."""
    return {}


def ample_outcomes(expected: dict, name: str, pair: LoadedPair, triple: Triple | None) -> dict[object, tuple[list[int], str, list[int]]]:
    if (name, triple) not in expected:
        ample = make_engine(pair.target, pair.draft, triple)
        expected[name, triple] = outcomes(run(ample, long_requests()))
        assert ample.summary()["num_preemptions"] == 0
    return expected[name, triple]


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
@pytest.mark.parametrize("name", ["rand", "e3"])
def test_texts_and_accept_lists_do_not_tell_that_rows_were_preempted(name, triple, expected, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(name)
    tight = small_pool(pair, triple)
    assert outcomes(run(tight, long_requests())) == ample_outcomes(expected, name, pair, triple)
    summary = tight.summary()
    assert summary["num_preemptions"] >= 1
    assert 0 < summary["num_recomputed_tokens"] < summary["num_prefill_tokens"]
    if triple is None:
        assert summary["num_wasted_row_steps"] == 0, "a preempted row was run in vain: what was in flight was not read first"
    assert summary["num_output_tokens"] == sum(request.sampling.max_new_tokens for request in long_requests())


@pytest.mark.parametrize("settings", [{"graph_sizes": (1, 2, 4)}, {"page_size": 1}, {"chunked_prefill_size": 5}], ids=str)
def test_neither_padding_nor_pages_nor_chunks_show_after_a_preemption(settings, e3, expected) -> None:
    triple = (3, 1, 4)
    tight = small_pool(e3, triple, **settings)
    assert outcomes(run(tight, long_requests())) == ample_outcomes(expected, "e3", e3, triple)
    assert tight.summary()["num_preemptions"]


def test_rows_that_will_soon_be_short_of_pages_grow_with_those_that_are(rand: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the device for every row that grows would cost the host as much as the rest of an iteration."""
    grown: list[int] = []

    def count(state, growths, page_size) -> None:
        grown.append(len(growths))
        assert all(growth.pages for growth in growths)
        write_growths(state, growths, page_size)

    monkeypatch.setattr("eaglecli.engine.engine.write_growths", count)
    requests = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=60 - 3 * n)) for n, r in enumerate(mixed_requests(NUM_REQUESTS, seed=3))
    ]
    engine = small_pool(rand, None, max_total_tokens=1024, scheduling=SchedulingSettings(growth_tokens=16))
    expected = outcomes(run(make_engine(rand.target, None), requests))
    assert outcomes(run(engine, requests)) == expected
    assert sum(grown) >= 2.5 * len(grown)


def test_a_sequence_that_loses_its_row_within_its_prompt_begins_again(rand: LoadedPair) -> None:
    first, second = requests_of(random_prompts([4, 180]), 40)
    requests = [first, replace(second, sampling=replace(second.sampling, max_new_tokens=9))]
    tight = small_pool(rand, (3, 1, 4), max_total_tokens=232, chunked_prefill_size=5)
    seen: list[int] = []
    original = tight._scheduler.preempt

    def preempt(sequence, emitted) -> None:
        seen.append(sequence.num_prefilled)
        assert not len(emitted.token_ids)
        original(sequence, emitted)

    tight._scheduler.preempt = preempt
    tight.add(requests[0])
    tight.step()
    completions = run_watched(tight, requests[1:], lambda _: None)
    assert len(seen) == 1 and 0 < seen[0] < 180
    assert outcomes(completions) == outcomes(run(make_engine(rand.target, rand.draft, (3, 1, 4)), requests))


def test_a_run_that_is_given_up_and_taken_up_again_answers_what_is_left(rand: LoadedPair, expected) -> None:
    """The consumer leaves in the middle, with sequences preempted and in flight; the engine's books stay right."""
    triple = (3, 1, 4)
    tight = small_pool(rand, triple)
    answers = tight.generate(long_requests())
    found: list[Completion] = [next(answers)]
    answers.close()
    tight.check()
    assert tight.summary()["num_preemptions"]
    found += tight.generate([])
    assert outcomes({completion.request.key: completion for completion in found}) == ample_outcomes(expected, "rand", rand, triple)


def test_stop_ids_end_a_preempted_output_where_they_would_have(rand: LoadedPair, expected) -> None:
    """The stop id of each request is the token that it put out after half of its output."""
    full = ample_outcomes(expected, "rand", rand, None)
    requests, cut = [], {}
    for request in long_requests():
        tokens = full[request.key][0]
        stop = tokens[20]
        requests.append(replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,))))
        cut[request.key] = (tokens[: tokens.index(stop) + 1], "stop")
    tight = small_pool(rand, (3, 1, 4), max_total_tokens=104)
    found = run(tight, requests)
    assert {key: (completion.output_ids.tolist(), completion.finish_reason) for key, completion in found.items()} == cut


def test_penalties_bias_least_lengths_and_log_probabilities_go_on_after_a_preemption(rand: LoadedPair) -> None:
    """The counts that penalties go by are those of prompt and output so far; log-probabilities are of every token once."""
    options = (
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.8},
        {"min_new_tokens": 30, "stop_token_ids": tuple(range(0, 320, 20)), "frequency_penalty": 0.5},
        {"logit_bias": ((3, 9.0), (60, 8.0)), "repetition_penalty": 0.8},
    )
    requests = [
        replace(request, sampling=replace(request.sampling, logprobs=2, **option))
        for request, option in zip(long_requests(), options, strict=True)
    ]
    opened_for = {"adjusts_logits": True, "max_logprobs": 2}
    expected = run(make_engine(rand.target, rand.draft, (3, 1, 4), **opened_for), requests)
    tight = small_pool(rand, (3, 1, 4), **opened_for)
    found = run(tight, requests)
    assert outcomes(found) == outcomes(expected)
    assert tight.summary()["num_preemptions"] >= 2
    for key, completion in found.items():
        assert len(completion.logprobs.chosen) == len(completion.output_ids)
        np.testing.assert_allclose(completion.logprobs.chosen, expected[key].logprobs.chosen, atol=1e-3)
        np.testing.assert_array_equal(completion.logprobs.top_ids, expected[key].logprobs.top_ids)


def test_modes_may_change_before_and_after_a_preemption(rand: LoadedPair, expected) -> None:
    """A row that is plain when it loses its row, and behind for the draft, is neither when it comes back."""
    alternatives = (Alternative(PLAIN, 64), Alternative(SpeculationSettings(2, 3, 7), 64))
    tight = small_pool(rand, (3, 1, 4), alternatives=alternatives)
    chooser = np.random.default_rng(0)
    tight.policy = ScriptedPolicy(lambda num_requests: int(chooser.integers(3)))
    found = run(tight, long_requests())
    plain = ample_outcomes(expected, "rand", rand, None)
    assert {key: outcome[:2] for key, outcome in outcomes(found).items()} == {key: outcome[:2] for key, outcome in plain.items()}
    assert tight.summary()["num_preemptions"] >= 2
    for completion in found.values():
        assert completion.num_verify_steps == len(completion.accept_counts)
        assert completion.num_proposed_drafts >= completion.num_accepted_drafts


class EndsAfter:
    """A watch that ends an output behind its nth token, however it comes."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def look(self, output_ids: np.ndarray) -> tuple[int, str] | None:
        return (self.num_tokens, "stop") if len(output_ids) >= self.num_tokens else None


def test_stop_strings_end_a_preempted_output_where_they_would_have(rand: LoadedPair, expected) -> None:
    full = ample_outcomes(expected, "rand", rand, None)
    requests = [replace(request, make_stop_watch=lambda key=request.key: EndsAfter(24 + key)) for request in long_requests()]
    tight = small_pool(rand, (3, 1, 4))
    found = run(tight, requests)
    assert {key: completion.output_ids.tolist() for key, completion in found.items()} == {key: full[key][0][: 24 + key] for key in full}
    assert tight.summary()["num_preemptions"] >= 1


def test_counts_of_an_output_hold_how_often_a_token_came_and_whether_the_prompt_has_it() -> None:
    sequence = Sequence(Request(0, np.array([1, 2, 2], np.int32)), row=2)
    sequence.emitted = EmittedOutput(np.array([3, 2, 3, 3], np.int32), np.zeros(3, np.int16), np.zeros(3, np.int16), 0)
    places, values = _counts_of_output(sequence, 10)
    assert (places.tolist(), values.tolist()) == ([22, 23], [3, 6])


def test_longer_requests_are_run_before_shorter_ones(cycle: LoadedPair) -> None:
    engine = make_engine(cycle.target, None, max_running_requests=1)
    requests = [request for cap in (3, 9, 6) for request in requests_of(random_prompts([5]), cap)]
    assert [len(completion.output_ids) for completion in engine.generate(requests)] == [9, 6, 3]


def test_the_outlook_counts_what_is_done_and_what_is_left(cycle: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eaglecli.engine.engine.OUTLOOK_INTERVAL_S", 0.0)
    engine = make_engine(cycle.target, None, max_running_requests=2)
    for request in requests_of(random_prompts([5] * 4), 10):
        engine.add(request)
    totals = []
    while not engine.is_idle:
        engine.step()
        outlook = engine.outlook
        assert outlook.num_requests == 4
        totals.append(outlook.num_output_tokens + outlook.forecast.num_tokens)
    assert totals == [40.0] * len(totals)
    assert (outlook.num_output_tokens, outlook.num_prefill_tokens, outlook.forecast.longest) == (40, 20, 0.0)
    assert np.isclose(engine.summary()["mean_running_requests"], 2.0)
