"""The runner of a stage: which batch meets a graph, what is counted, and what a replay refuses. No GPU: graphs are played by a stand-in."""

import dataclasses

import numpy as np
import pytest
import torch

from eaglecli.engine.engine import Engine
from eaglecli.engine.graph_runner import FULL_CHECK_PERIOD, GraphRunner, StaticTensors
from eaglecli.engine.iteration import Stage
from eaglecli.engine.row_state import HostHints
from tests.engine.harness import LoadedPair, make_engine, mixed_requests, outcomes, run

HINTS = HostHints(8, any_sampled=False, any_filtered=False)


class PlayedGraph:
    """Does at replay what the stage does at this size with the hints of the capture."""

    def __init__(self, runner: GraphRunner, size: int, hints: HostHints) -> None:
        self.runner, self.size, self.hints = runner, size, hints

    def replay(self) -> None:
        self.runner.stage.run(self.size, self.hints)


def play_graphs(engine: Engine, sizes: tuple[int, ...], short_lengths: tuple[int, ...] = ()) -> None:
    def play(runner: GraphRunner, size: object, length: int) -> None:
        runner.add_graph(size, length, PlayedGraph(runner, size, dataclasses.replace(engine.widest_hints, max_length=length)))

    for runner in engine._runners:
        for size in sizes:
            for length in (engine.settings.context_length, *short_lengths):
                play(runner, size, length)
    engine._static.freeze()
    for prefill_size in engine.prefill_sizes:
        play(engine._prefill_runner, prefill_size, engine.settings.context_length)
    engine._prefill_static.freeze()


def test_only_captured_sizes_run_by_graph_and_both_kinds_are_counted():
    ran = []
    runner = GraphRunner(Stage("draft", 1, lambda size, hints: ran.append((size, hints))), StaticTensors({}))
    runner.add_graph(4, HINTS.max_length, PlayedGraph(runner, 4, HINTS))
    for size in (4, 3, 4, 5):
        runner.run(size, HINTS)
    assert (runner.num_graph_runs, runner.num_eager_runs, runner.captured_sizes) == (2, 2, (4,))
    assert [size for size, _ in ran] == [4, 3, 4, 5]


def test_a_batch_meets_the_graph_of_the_lowest_bound_that_holds_its_rows():
    played = []
    runner = GraphRunner(Stage("draft", 1, lambda size, hints: played.append(hints.max_length)), StaticTensors({}))
    for length in (64, 16):
        runner.add_graph(4, length, PlayedGraph(runner, 4, dataclasses.replace(HINTS, max_length=length)))
    for length in (1, 16, 17, 64, 65):
        runner.run(4, dataclasses.replace(HINTS, max_length=length))
    assert played == [16, 16, 64, 64, 65]  # the last one eagerly
    assert runner.captured_lengths(4) == (16, 64) and runner.captured_lengths(5) == ()
    assert runner.num_graph_runs == 4


@pytest.mark.parametrize("triple", [None, (3, 2, 7)], ids=str)
def test_graphs_for_short_rows_leave_out_no_key(twin: LoadedPair, triple):
    """They look at no more columns than their bound: a row that had grown past it would change its text. Rows of up to 32 tokens."""
    requests = mixed_requests(12, seed=3, max_prompt=20, max_cap=12)
    expected = outcomes(run(make_engine(twin.target, twin.draft, triple), requests))
    engine = make_engine(twin.target, twin.draft, triple, graph_sizes=(1, 2), context_length=128, max_running_requests=2)
    bounds = (4, 8, 12, 16, 20, 24, 28)
    play_graphs(engine, (1, 2), bounds)
    ran = []
    for runner in engine._runners:
        for graphs in runner._graphs.values():
            for length, graph in graphs:
                graph.replay = lambda replay=graph.replay, length=length: (ran.append(length), replay())
    assert outcomes(run(engine, requests)) == expected
    assert len({*ran} & {*bounds}) > 3


@pytest.mark.parametrize("triple", [None, (3, 2, 7)], ids=str)
def test_the_whole_engine_runs_on_graphs_and_says_so(twin: LoadedPair, triple):
    """Graphs are made for the widest hints; the text is that of exact ones. Above the largest size a batch runs eagerly."""
    requests = mixed_requests(12, seed=3, max_prompt=20, max_cap=12)
    expected = outcomes(run(make_engine(twin.target, twin.draft, triple), requests))
    engine = make_engine(twin.target, twin.draft, triple, graph_sizes=(1, 2, 4, 8), context_length=128)
    play_graphs(engine, (1, 2, 4, 8))
    assert outcomes(run(engine, requests)) == expected
    summary = engine.summary()
    by_requests = {int(size): count for size, count in summary["iterations_by_requests"].items()}
    above = sum(count for size, count in by_requests.items() if size > 8)
    assert above and sum(by_requests.values()) == summary["num_iterations"]
    prefill = summary["stages"].pop("prefill")
    assert prefill["graph_runs"] and not prefill["eager_runs"]
    for counts in summary["stages"].values():
        assert counts == {"graph_runs": summary["num_iterations"] - above, "eager_runs": above}
    assert summary["graph_hit_rate"] == pytest.approx(1 - above / summary["num_iterations"])
    assert summary["graph_sizes"] == [1, 2, 4, 8]


def test_without_padding_only_a_batch_of_a_captured_size_meets_a_graph(rand: LoadedPair):
    requests = mixed_requests(6, seed=4, max_prompt=9, max_cap=12)
    engine = make_engine(rand.target, rand.draft, (2, 1, 3), graph_sizes=(1, 4), pads_to_graph_sizes=False)
    play_graphs(engine, (1, 4))
    run(engine, requests)
    by_requests = engine.summary()["iterations_by_requests"]
    assert engine._runners[1].num_graph_runs == by_requests.get("1", 0) + by_requests.get("4", 0) > 0
    assert engine._runners[1].num_eager_runs == sum(by_requests.values()) - engine._runners[1].num_graph_runs > 0


def test_plain_decoding_has_no_extend_stage(twin: LoadedPair):
    assert list(make_engine(twin.target, None).summary()["stages"]) == ["prefill", "draft", "verify"]
    assert list(make_engine(twin.target, twin.draft, (2, 1, 3)).summary()["stages"]) == ["prefill", "draft", "verify", "extend"]


@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("state.lengths", lambda engine: engine._state.lengths),
        ("buffers.run.features", lambda engine: engine._iteration.buffers.run.features),
        ("the draft's cache", lambda engine: engine._caches["the draft's cache"]),
    ],
)
def test_a_tensor_that_was_moved_after_the_capture_is_refused_by_name(rand: LoadedPair, name, find):
    engine = make_engine(rand.target, rand.draft, (2, 1, 3), graph_sizes=(1, 2, 4))
    play_graphs(engine, (1, 2, 4))
    for request in mixed_requests(3):
        engine.add(request)
    engine.step()
    tensor = find(engine)
    tensor.data = tensor.clone()
    with pytest.raises(RuntimeError, match=name):
        engine.step()


def test_a_tensor_of_another_shape_or_type_at_the_same_place_is_refused():
    for change in (lambda tensor: tensor.data.view(4), lambda tensor: tensor.data.view(torch.int32)):
        tensor = torch.zeros(2, 2)
        static = StaticTensors({"it": tensor})
        static.check()
        static.freeze()
        static.check()
        tensor.data = change(tensor)
        with pytest.raises(RuntimeError, match="it was moved"):
            for _ in range(FULL_CHECK_PERIOD):
                static.check()


def test_row_numbers_are_copied_only_when_rows_or_size_change(rand: LoadedPair):
    engine = make_engine(rand.target, rand.draft, (2, 1, 3), max_running_requests=8)
    iteration, rows = engine._iteration, engine._iteration.buffers.rows
    dummy = engine._state.dummy_row
    iteration.load_rows(np.array([3, 1]), 4)
    assert rows[:4].tolist() == [3, 1, dummy, dummy]
    rows[0] = 7  # shows whether it is written again
    iteration.load_rows(np.array([3, 1]), 4)
    assert rows[0] == 7
    iteration.load_rows(np.array([3, 1]), 2)
    assert rows[:2].tolist() == [3, 1]
    iteration.load_rows(np.array([3]), 2)
    assert rows[:2].tolist() == [3, dummy]
