"""An engine that changes how it speculates between iterations: the text stays plain decoding's, the draft loses nothing by a pause."""

import functools
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from eaglecli.engine.backlog import START_UNIT
from eaglecli.engine.engine import Engine
from eaglecli.engine.iteration import Iteration, named_tensors
from eaglecli.engine.measure_costs import MeasuredRows, measured_sizes
from eaglecli.engine.request import Request
from eaglecli.engine.settings import PLAIN, Alternative, EngineSettings, SpeculationSettings
from eaglecli.engine.speculation_policy import ScriptedPolicy, StepObservation, TablePolicy
from eaglecli.errors import UserError
from eaglecli.kernels.attention import choose_tile
from tests import oracle
from tests.engine.harness import (
    LoadedPair,
    Triple,
    make_engine,
    mixed_requests,
    oracle_plain,
    random_prompts,
    requests_of,
    run,
    run_watched,
    texts,
)

CHAIN, SHORT, TREE = SpeculationSettings(4, 1, 5), SpeculationSettings(1, 1, 2), SpeculationSettings(3, 3, 8)
MODES = (CHAIN, PLAIN, TREE, SHORT)
CONTEXT = 1024


def changing_engine(pair: LoadedPair, modes: Sequence[SpeculationSettings] = MODES, **settings: object) -> Engine:
    options = {"context_length": CONTEXT, "max_total_tokens": 16384, **settings}
    alternatives = tuple(Alternative(mode, 64) for mode in modes[1:])
    return Engine(pair.target.model, pair.draft.model, EngineSettings(speculation=modes[0], alternatives=alternatives, **options))


def at_random(seed: int) -> tuple[ScriptedPolicy, list[int]]:
    """A policy that stays with a mode for a few iterations, and the modes it has chosen."""
    chooser, chosen = random.Random(seed), []

    def choose(num_requests: int) -> int:
        stays = chosen and chooser.random() < 0.6
        chosen.append(chosen[-1] if stays else chooser.randrange(len(MODES)))
        return chosen[-1]

    return ScriptedPolicy(choose), chosen


@pytest.mark.parametrize("seed", range(2))
def test_changing_at_random_leaves_the_text_as_it_is(pair: LoadedPair, seed: int):
    requests = mixed_requests(10, seed=20 + seed, max_prompt=30, max_cap=30)
    engine = changing_engine(pair, max_running_requests=6, chunked_prefill_size=40)
    engine.policy, chosen = at_random(seed)
    assert texts(run(engine, requests)) == oracle_plain(pair, requests)
    assert len(set(chosen)) >= 3 and 1 in chosen


def test_penalties_and_log_probabilities_are_those_of_plain_decoding(rand: LoadedPair):
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((7, 2.0),), "min_new_tokens": 3, "logprobs": 2}
    requests = requests_of(random_prompts([5, 12, 9], seed=6), 20, temperature=0.7, seed=4, **options)
    needs = {"adjusts_logits": True, "max_logprobs": 2, "context_length": 128, "max_total_tokens": 2048}
    engine = changing_engine(rand, **needs)
    engine.policy, chosen = at_random(1)
    found, plain = run(engine, requests), run(make_engine(rand.target, None, **needs), requests)
    assert len(set(chosen)) >= 3
    assert texts(found) == texts(plain)
    for key, completion in found.items():
        assert np.array_equal(completion.logprobs.top_ids, plain[key].logprobs.top_ids)
        assert np.allclose(completion.logprobs.chosen, plain[key].logprobs.chosen, atol=1e-4)


def oracle_steps(pair: LoadedPair, request: Request, modes: Sequence[Triple]) -> tuple[list[list[int]], list[int]]:
    """Tree and accepted drafts of each verify step when step i speculates by modes[i]: the oracle's rules, one step after another."""
    forward, result = oracle.as_function(pair.oracle_target, pair.oracle_draft.tap_boundaries), oracle.OracleResult()
    prompt, sampling, trees, accepts = request.prompt_ids.tolist(), request.sampling, [], []
    ended = oracle.emit(result, [oracle.choose_token(forward(prompt)[0][-1], sampling, 0, len(prompt))], sampling)
    for num_steps, topk, num_nodes in modes:
        if ended:
            break
        ids = prompt + result.output_ids
        tree = oracle.OracleTree((ids[-1],), (-1,), (0,))
        if num_steps:
            hidden = pair.oracle_draft.fuse(forward(ids[:-1])[1])
            pool = oracle.grow_pool(pair.oracle_draft, ids[1:], hidden, oracle.DraftRule(num_steps, topk, sampling))
            tree = oracle.keep_nodes(pool, ids[-1], num_nodes)
        emitted = oracle.walk(forward, tree, prompt, result.output_ids, sampling, 0)
        trees.append(list(tree.tokens))
        accepts.append(len(emitted) - 1)
        ended = oracle.emit(result, emitted, sampling)
    return trees, accepts


def note_tree(trees: list[list[int]], engine: Engine) -> None:
    trees.append(engine._iteration.buffers.tree.tokens[0].tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["rand", "e3"])
def test_after_a_pause_the_draft_proposes_what_it_would_have_proposed(request, name: str, temperature: float):
    """Trees and accept lists equal the oracle's step by step: wrong entries in the draft's cache would show there and nowhere else."""
    pair = request.getfixturevalue(name)
    requests = requests_of(random_prompts([5, 17], seed=3), 24, temperature=temperature, seed=5)
    engine = changing_engine(pair, max_running_requests=1)
    chosen: list[int] = []
    pattern = itertools.cycle((1, 0, 1, 1, 2, 1, 3, 1, 1, 1, 0, 2, 3))

    def choose(num_requests: int) -> int:
        chosen.append(next(pattern))
        return chosen[-1]

    engine.policy = ScriptedPolicy(choose)
    taken = 0
    for one in requests:
        trees: list[list[int]] = []
        watch = functools.partial(note_tree, trees)
        (completion,) = run_watched(engine, [one], watch).values()
        num_verify_steps = len(completion.accept_counts)  # with an iteration in flight there is one more, which counts for nothing
        modes = [MODES[mode] for mode in chosen[taken : taken + num_verify_steps]]
        triples = [(mode.num_steps, mode.topk, mode.num_draft_tokens) for mode in modes]
        assert (trees[:num_verify_steps], completion.accept_counts.tolist()) == oracle_steps(pair, one, triples)
        assert completion.num_proposed_drafts == sum(mode.num_draft_tokens - 1 for mode in modes)
        taken = len(chosen)


def test_a_pause_longer_than_the_backlog_leaves_a_gap_and_the_same_text(twin: LoadedPair):
    """Plain for 200 tokens with room for 128, then a chain: the draft's cache begins anew, rows that came later have no gap."""
    requests = requests_of(random_prompts([20, 9, 33], seed=8), 270)
    requests.append(Request("late", random_prompts([7])[0], requests[0].sampling))
    engine = changing_engine(twin, (CHAIN, PLAIN), max_backlog_tokens=128, max_running_requests=3)
    counts, starts = [], []
    engine.policy = ScriptedPolicy(lambda num_requests: int(len(counts) < 200), counts.append)
    found = {}
    for one in requests:
        engine.add(one)
    while not engine.is_idle:
        found |= {completion.request.key: completion for completion in engine.step()}
        starts.append(engine._state.draft_start.tolist())
    assert texts(found) == oracle_plain(twin, requests)
    assert not any(any(at) for at in starts[:200])
    assert all(at % START_UNIT == 0 for at in starts[201]) and sum(at > 0 for at in starts[201]) == 3
    assert starts[-1].count(0) == 2  # the late one's row, and the dummy row
    assert sum(int(observation.accept_counts.sum()) for observation in counts[200:]) > 50  # poorer, not useless


def test_gaps_end_where_blocks_of_every_tile_do():
    """Attention loads whole blocks of keys: one that began before the gap's end would bring NaN with it."""
    for packed_rows, row_heads, is_masked, head_dim in itertools.product(
        (1, 3, 18, 48, 96), (3, 24, 192, 768, 2048), (False, True), (64, 128)
    ):
        assert START_UNIT % choose_tile(packed_rows, row_heads, is_masked, False, head_dim).block_keys == 0


def test_what_lies_in_a_gap_is_never_read(twin: LoadedPair):
    """NaN in every slot of the draft's cache before the gap's end changes no proposal."""
    lists = []
    for is_spoilt in (False, True):
        engine = changing_engine(twin, (CHAIN, PLAIN), max_backlog_tokens=128, max_running_requests=1)
        num_steps = 0

        def choose(num_requests: int, engine: Engine = engine, is_spoilt: bool = is_spoilt) -> int:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 201 and is_spoilt:
                engine._caches["the draft's cache"].fill_(torch.nan)
            return int(num_steps <= 200)

        engine.policy = ScriptedPolicy(choose)
        (completion,) = run(engine, requests_of(random_prompts([20], seed=8), 250)).values()
        lists.append(completion.accept_counts.tolist())
    assert lists[0] == lists[1] and sum(lists[0]) > 10


def first_tree_after_a_pause(pair: LoadedPair, num_plain: int, spoilt: bool = False) -> tuple[list[int], list[int], int]:
    """The tree, the tokens known when it grew (its root is the last), and where the draft's cache began; a ring of 128 places."""
    engine = changing_engine(pair, (TREE, PLAIN), max_backlog_tokens=128, max_running_requests=1)
    grown: list[tuple[list[int], int]] = []
    num_steps = 0

    def choose(num_requests: int) -> int:
        nonlocal num_steps
        num_steps += 1
        if num_steps == num_plain + 1 and spoilt:
            engine._caches["the draft's cache"].fill_(torch.nan)
        return int(num_steps <= num_plain)

    def watch(engine: Engine) -> None:
        if num_steps == num_plain + 1 and not grown:
            grown.append((engine._iteration.buffers.tree.tokens[0].tolist(), int(engine._state.draft_start[0])))

    engine.policy = ScriptedPolicy(choose)
    (request,) = requests_of(random_prompts([20], seed=8), num_plain + 5)
    (completion,) = run_watched(engine, [request], watch).values()
    tree, start = grown[0]
    return tree, request.prompt_ids.tolist() + completion.output_ids[: 1 + num_plain].tolist(), start


@pytest.mark.parametrize(("num_plain", "start"), [(127, 0), (128, 0), (129, 128), (130, 128), (236, 128), (237, 256)])
@pytest.mark.parametrize("name", ["twin", "rand"])
def test_a_pause_of_as_many_tokens_as_there_are_places_leaves_no_gap_and_one_more_does(request, name: str, num_plain: int, start: int):
    """The draft proposes what it would have without the pause, or what it would if the text had begun where its cache does."""
    pair = request.getfixturevalue(name)
    tree, ids, found_start = first_tree_after_a_pause(pair, num_plain)
    assert found_start == start
    forward = oracle.as_function(pair.oracle_target, pair.oracle_draft.tap_boundaries)
    hidden = pair.oracle_draft.fuse(forward(ids[:-1])[1])
    pool = oracle.grow_pool(pair.oracle_draft, ids[1:][start:], hidden[start:], oracle.DraftRule(TREE.num_steps, TREE.topk))
    assert tree == list(oracle.keep_nodes(pool, ids[-1], TREE.num_draft_tokens).tokens)


def test_the_catch_up_itself_reads_nothing_that_lies_in_a_gap(twin: LoadedPair):
    """Its keys and values depend on no key before them, a draft having one layer: only the tree that grows from it would show."""
    assert first_tree_after_a_pause(twin, 200) == first_tree_after_a_pause(twin, 200, spoilt=True)


def test_observations_add_up_to_the_output(rand: LoadedPair):
    requests = mixed_requests(8, seed=4, max_prompt=20, max_cap=20)
    engine = changing_engine(rand, max_running_requests=4)
    observed: list[StepObservation] = []
    modes = iter(np.random.default_rng(0).integers(0, len(MODES), 10_000).tolist())
    engine.policy = ScriptedPolicy(lambda num_requests: next(modes), observed.append)
    completions = run(engine, requests)
    num_tokens = sum(len(completion.output_ids) - 1 for completion in completions.values())  # the first is the prefill's
    assert sum(observation.num_tokens for observation in observed) == num_tokens
    assert all(observation.seconds is None or observation.seconds > 0 for observation in observed)
    assert any(observation.caught_up for observation in observed) and any(observation.seconds is None for observation in observed)
    assert all(observation.accept_counts.sum() == 0 for observation in observed if MODES[observation.mode] == PLAIN)
    summary = engine.summary()["speculation"]
    assert list(summary["modes"]) == ["4/1/5", "none", "3/3/8", "1/1/2"]
    assert sum(mode["iterations"] for mode in summary["modes"].values()) == engine.summary()["num_iterations"] == len(observed)
    assert sum(mode["tokens"] for mode in summary["modes"].values()) == num_tokens


def test_a_table_chooses_by_batch_size():
    policy = TablePolicy([(1, 2), (8, 0), (64, 1)])
    assert [policy.choose(size) for size in (1, 2, 8, 9, 64, 65)] == [2, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError):
        TablePolicy([(8, 0), (1, 1)])


def test_the_same_speculation_twice_is_refused():
    with pytest.raises(UserError):
        EngineSettings(64, 64, speculation=CHAIN, alternatives=(Alternative(CHAIN, 4),))


def test_an_engine_holds_room_for_the_widest_of_its_modes():
    settings = EngineSettings(100, 1600, speculation=SHORT, alternatives=(Alternative(TREE, 8), Alternative(PLAIN, 8)))
    assert (settings.lookahead, settings.run_width, settings.num_candidates) == (8, 4, 3)
    assert settings.row_capacity == 112


@pytest.mark.parametrize("mode", range(len(MODES)))
def test_every_mode_is_checked_as_if_it_were_alone(e3: LoadedPair, mode: int):
    engine = changing_engine(e3, graph_sizes=(4, 8), max_running_requests=8, context_length=256)
    check = engine.check_stages(3, seed=2, mode_number=mode)
    assert check.poison_differs == () and check.num_padding_differs == 0


@pytest.mark.parametrize(
    ("graph_sizes", "most", "expected"),
    [((), 1, [1]), ((), 12, [1, 12, 4, 2, 8]), ((1, 3, 24, 48), 48, [1, 48, 3, 24]), ((8,), 8, [8])],
)
def test_sizes_are_measured_from_the_ends_inwards(graph_sizes, most, expected):
    assert measured_sizes(graph_sizes, most) == expected


def test_costs_are_measured_for_every_mode_and_leave_no_trace(rand: LoadedPair, monkeypatch: pytest.MonkeyPatch):
    requests = mixed_requests(5, seed=9, max_prompt=12, max_cap=12)
    alternatives = (Alternative(PLAIN, 4), Alternative(TREE, 2))
    settings = EngineSettings(128, 2048, max_running_requests=4, speculation=CHAIN, alternatives=alternatives)
    engine = Engine(rand.target.model, rand.draft.model, settings)
    for cache in engine._caches.values():
        cache.fill_(torch.nan)  # as uninitialised memory may be
    state = named_tensors("state", engine._state)
    for name, left in (("draft_start", 128), ("stop_ids", 0), ("temperature", 1)):  # what earlier requests may leave
        state[f"state.{name}"][:-1] = left
    before = {name: tensor.clone() for name, tensor in state.items()}
    dealt: list[tuple[int, bool]] = []
    deal = MeasuredRows.deal

    def watch(rows: MeasuredRows, iteration: Iteration, size: int) -> None:
        """What the run before has left: the same rows, further on, none stopped by a bad number."""
        ended = bool(engine._state.finished[:-1][engine._state.lengths[:-1] > 0].any())
        deal(rows, iteration, size)
        used = engine._state.slot_table[:size, : rows.max_length]
        assert used.unique().numel() == used.numel() and used.all(), "rows share slots, or use the dummy slot"
        assert not engine._state.draft_start[:size].any() and bool((engine._state.stop_ids[:size] == -1).all())
        dealt.append((int(engine._state.lengths[0]), ended))

    monkeypatch.setattr(MeasuredRows, "deal", watch)
    costs = engine.measure_costs(budget_s=0.0)
    assert {*dealt} == {(128 // 4, False)}
    assert all(torch.equal(tensor[:-1], before[name][:-1]) for name, tensor in state.items())  # which are then gone
    assert set(costs) == {(0, 1), (0, 4), (1, 1), (1, 4), (2, 1), (2, 2)}  # no cost past a mode's limit
    assert min(costs.values()) > 0
    assert len(engine.measure_costs(budget_s=100.0)) == 8
    assert engine.summary()["num_iterations"] == 0
    assert all(stage == {"graph_runs": 0, "eager_runs": 0} for stage in engine.summary()["stages"].values())
    assert texts(run(engine, requests)) == oracle_plain(rand, requests)


def test_costs_are_measured_though_the_cache_is_too_small_for_all_rows_at_once(rand: LoadedPair):
    engine = changing_engine(rand, context_length=128, max_total_tokens=160, max_running_requests=6)
    assert len(engine.measure_costs(budget_s=0.0)) == 2 * len(MODES)
    requests = mixed_requests(5, seed=9, max_prompt=12, max_cap=12)
    assert texts(run(engine, requests)) == oracle_plain(rand, requests)


def test_a_policy_is_told_which_batches_have_long_rows(twin: LoadedPair):
    """Rows of more than 512 tokens; and the observation of an iteration comes with the class that it was chosen for."""
    engine = changing_engine(twin, (CHAIN, PLAIN), context_length=1024, max_running_requests=2)
    told: list[int] = []
    observed: list[StepObservation] = []

    class Watching(ScriptedPolicy):
        def choose(self, num_requests: int, length_class: int = 0) -> int:
            told.append(length_class)
            return 0

    engine.policy = Watching(lambda num_requests: 0, observed.append)
    run(engine, requests_of(random_prompts([480, 5], seed=8), 60))
    assert told[0] == 0 and 1 in told
    first_long = told.index(1)
    assert 490 <= 480 + sum(step.num_tokens for step in observed[:first_long]) // 2 <= 530
    assert [step.length_class for step in observed] == told[: len(observed)]


def test_a_prescribed_accept_length_reaches_as_far_as_each_mode_goes(rand: LoadedPair):
    engine = changing_engine(rand, simulated_accept_length=3.0, max_running_requests=2)
    observed: list[StepObservation] = []
    engine.policy = ScriptedPolicy(lambda num_requests: len(observed) // 25 % len(MODES), observed.append)
    run(engine, requests_of(random_prompts([8, 8]), 250))
    settled = [step for before, step in itertools.pairwise(observed) if step.mode == before.mode]  # the first step falls into step
    accepted = {mode: {count for step in settled if step.mode == mode for count in step.accept_counts} for mode in range(len(MODES))}
    assert accepted == {0: {2}, 1: {0}, 2: {2}, 3: {1}}  # plain decoding accepts nothing, a chain of one step one
