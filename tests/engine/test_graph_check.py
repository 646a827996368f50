"""The check of the stages: all ways of running a batch agree at every size, and a way that does not is named."""

import dataclasses

import pytest

from eaglecli.engine.engine import Engine
from tests.engine.harness import LoadedPair, make_engine, mixed_requests, outcomes, run
from tests.engine.test_graph_runner import play_graphs

SIZES = (1, 2, 4, 8, 16)


def checked_engine(pair: LoadedPair, triple=(3, 2, 7), **settings) -> Engine:
    return make_engine(
        pair.target, pair.draft, triple, graph_sizes=SIZES, **{"max_running_requests": 17, "context_length": 256, **settings}
    )


def change_stage(engine: Engine, index: int, change) -> None:
    """Do something more whenever a stage has run."""
    runner = engine._runners[index]
    stage = runner.stage

    def run_changed(size, hints):
        stage.run(size, hints)
        change(size)

    runner.stage = dataclasses.replace(stage, run=run_changed)


@pytest.mark.parametrize(("name", "triple"), [("twin", (3, 2, 7)), ("e3", (3, 1, 4)), ("rand", (4, 2, 9)), ("twin", None)], ids=str)
def test_padding_and_poison_change_nothing_while_batches_shrink_and_grow(request, name, triple):
    """B25 at every batch size 1 to 17."""
    engine = checked_engine(request.getfixturevalue(name), triple)
    batches = [*range(17, 0, -2), *range(2, 17, 2)] if triple == (3, 2, 7) else [17, 9, 16, 5, 1, 2, 3, 12]
    checks = [engine.check_stages(count, seed=count) for count in batches]
    assert [check.size for check in checks] == [min((size for size in SIZES if size >= count), default=count) for count in batches]
    for check in checks:
        assert check.poison_differs == ()
        assert check.num_padding_differs == 0
        assert check.graph_differs is None  # the CPU captures nothing
    assert triple is None or sum(check.num_accepted for check in checks) > 17


def test_the_check_leaves_an_engine_as_it_was(twin: LoadedPair):
    requests = mixed_requests(5, seed=8, max_cap=12)
    expected = outcomes(run(checked_engine(twin), requests))
    engine = checked_engine(twin)
    engine.check_stages(3, seed=0)
    assert outcomes(run(engine, requests)) == expected


def test_a_graph_that_computes_something_else_is_found_by_name(twin: LoadedPair):
    engine = checked_engine(twin)
    play_graphs(engine, SIZES)
    assert engine.check_stages(3, seed=1).graph_differs == ()
    extend = engine._runners[2]

    class Stale:
        def replay(self):
            extend.stage.run(4, engine.widest_hints)
            engine._state.draft_hidden[engine._iteration.buffers.rows[0]] += 1e-3

    extend.add_graph(4, engine.settings.context_length, Stale())
    check = engine.check_stages(3, seed=1)
    assert "state.draft_hidden" in check.graph_differs
    assert not check.is_exact
    assert engine.check_stages(2, seed=1).is_exact


def test_a_wrong_graph_for_short_rows_is_found_where_rows_are_short(twin: LoadedPair):
    engine = checked_engine(twin, context_length=640)
    play_graphs(engine, SIZES, (300,))
    assert engine.check_stages(3, seed=1).graph_differs == ()
    verify = engine._runners[1]

    class Stale:
        def replay(self):
            verify.stage.run(4, engine.widest_hints)
            engine._iteration.buffers.run.record[:1] += 1

    right = list(verify._graphs[4])
    verify.add_graph(4, 300, Stale())
    assert "run.record of rows up to 300 tokens" in engine.check_stages(3, seed=1).graph_differs
    verify._graphs[4] = right
    verify.add_graph(4, 2, Stale())
    assert engine.check_stages(3, seed=1).graph_differs == ()  # longer rows never meet it


def test_a_stage_that_reads_an_unowned_slot_is_found(twin: LoadedPair):
    engine = checked_engine(twin)
    cache = engine._caches["the target's cache"]

    def read_unowned(size):
        columns = engine._state.slot_table[engine._iteration.buffers.rows[:1].long(), -1].long()
        engine._iteration.buffers.run.features[:1] += cache[0, 0, columns, 0, 0]

    change_stage(engine, 1, read_unowned)
    assert "run.features" in engine.check_stages(3, seed=1).poison_differs


def test_a_stage_that_writes_an_unowned_slot_is_found(twin: LoadedPair):
    engine = checked_engine(twin)
    cache = engine._caches["the draft's cache"]

    def write_unowned(size):
        columns = engine._state.slot_table[engine._iteration.buffers.rows[:1].long(), -1].long()
        cache[:, :, columns] = 1.0

    change_stage(engine, 0, write_unowned)
    assert engine.check_stages(3, seed=1).poison_differs == ("unowned slots of the draft's cache",)


def test_padding_that_changes_tokens_is_counted(twin: LoadedPair):
    engine = checked_engine(twin)

    def spoil_padded(size):
        if size == 4:
            engine._iteration.buffers.run.record[0, 0] += 1

    change_stage(engine, 1, spoil_padded)
    check = engine.check_stages(3, seed=1)
    assert check.num_padding_differs == 1
    assert check.is_exact


def test_buffers_as_long_as_the_row_state_are_told_apart(twin: LoadedPair):
    """Seventeen buffer rows for sixteen requests and the dummy row: poison in unused buffers must not reach the rows."""
    engine = make_engine(twin.target, twin.draft, (3, 2, 7), graph_sizes=(1, 2, 17), max_running_requests=16, context_length=128)
    assert engine.check_stages(2, seed=5).is_exact


def test_a_cache_that_is_too_small_for_the_batch_is_refused(twin: LoadedPair):
    engine = checked_engine(twin, max_total_tokens=48)
    with pytest.raises(ValueError, match="too few"):
        engine.check_stages(17, seed=0)


def test_rows_that_reach_their_cap_are_part_of_the_check(twin: LoadedPair):
    engine = checked_engine(twin)
    statuses = set()
    change_stage(engine, 1, lambda size: statuses.update(engine._iteration.buffers.run.record[:, -1].tolist()))
    engine.check_stages(16, seed=2)
    assert {0, 2} <= statuses


def test_the_poison_is_there(twin: LoadedPair):
    """A check whose poison vanished would prove nothing."""
    engine = checked_engine(twin)
    free_slots_are_nan = []

    def look(size):
        row = engine._iteration.buffers.rows[0].long()
        slot = engine._state.slot_table[row, -1].long()
        free_slots_are_nan.append(all(bool(cache[:, :, slot].isnan().all()) for cache in engine._caches.values()))

    change_stage(engine, 0, look)
    assert engine.check_stages(3, seed=1).is_exact
    assert sorted(set(free_slots_are_nan)) == [False, True]
