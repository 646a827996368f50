"""Padded sizes and stale values, on the runner that runs static buffers eagerly: kind GRAPH of the known failures."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request
from eaglecli.engine.settings import EngineSettings
from eaglecli.errors import UserError
from tests.engine.harness import (
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

SIZES = (1, 2, 4, 8)
HUGE = 2**30


def spoil(tensor: torch.Tensor, where: torch.Tensor | slice) -> None:
    """Fill a part with what must never be used: NaN, a huge number, True."""
    tensor[where] = torch.nan if tensor.is_floating_point() else True if tensor.dtype == torch.bool else HUGE


def spoil_tensors(record: object, where: torch.Tensor | slice, spared: str = "") -> None:
    """All tensors of a dataclass and of those in it, but the one named `spared`."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            spoil_tensors(value, where)
        elif isinstance(value, torch.Tensor) and field.name != spared:
            spoil(value, where)


def poison(engine: Engine) -> None:
    """Between two steps, spoil everything that the engine promises not to read.

    That is: what passes from stage to stage, the row numbers behind the batch, all state of rows that nobody has (they stay
    finished), and in both caches all slots that do not hold a known token of a row.
    """
    state, held = engine._state, engine._scheduler.prefilling + engine._scheduler.running
    buffers = engine._iteration.buffers
    spoil_tensors(buffers, slice(None), spared="rows")
    spoil(buffers.rows, slice(len(engine._iteration._loaded), None))
    is_free = torch.ones_like(state.finished)
    is_free[[sequence.row for sequence in held] + [state.dummy_row]] = False
    spoil_tensors(state, is_free)
    for cache in engine._caches.values():
        is_unused = torch.ones(cache.shape[2], dtype=torch.bool, device=cache.device)
        for sequence in held:
            length = max(int(state.lengths[sequence.row]), sequence.num_prefilled)
            is_unused[state.slot_table[sequence.row, :length].long()] = False
        cache[:, :, is_unused] = torch.nan


def watch_sizes(engine: Engine) -> list[tuple[int, int]]:
    """Batch size asked and padded size of every iteration from now on, in the list that is returned."""
    sizes: list[tuple[int, int]] = []
    load_rows = engine._iteration.load_rows

    def watched_load(rows: Sequence[int], size: int) -> None:
        sizes.append((len(rows), size))
        load_rows(rows, size)

    engine._iteration.load_rows = watched_load
    return sizes


def waves() -> list[list[Request]]:
    """8 long contexts, then 3, 5 and 7 short ones."""
    long = requests_of(random_prompts([300, 280, 310, 290, 305, 295, 285, 301]), 12)
    return [long, *(requests_of(random_prompts(range(2, 2 + count), seed=count), 12) for count in (3, 5, 7))]


@pytest.mark.parametrize("triple", [None, (4, 1, 5), (3, 2, 7)], ids=str)
def test_short_batches_after_long_ones_equal_unpadded_ones(twin: LoadedPair, triple: Triple | None) -> None:
    """B25."""
    engine = make_engine(twin.target, twin.draft, triple, graph_sizes=SIZES, max_running_requests=8)
    for wave in waves():
        assert outcomes(run(engine, wave)) == outcomes(run(make_engine(twin.target, twin.draft, triple), wave))


@pytest.mark.parametrize(("name", "triple"), [("twin", None), ("twin", (4, 1, 5)), ("twin", (3, 2, 7)), ("e3", (3, 2, 7))], ids=str)
def test_poison_in_all_that_is_not_read_changes_nothing(request: pytest.FixtureRequest, name: str, triple: Triple | None) -> None:
    """B25: padded sizes, rows taken again, prompts in chunks."""
    pair: LoadedPair = request.getfixturevalue(name)
    requests = mixed_requests(16, seed=5, max_prompt=40, max_cap=16)
    settings = {"graph_sizes": SIZES, "max_running_requests": 6, "chunked_prefill_size": 24, "page_size": 4, "max_total_tokens": 600}
    clean = outcomes(run(make_engine(pair.target, pair.draft, triple, **settings), requests))
    engine = make_engine(pair.target, pair.draft, triple, **settings)
    poison(engine)
    assert outcomes(run_watched(engine, requests, poison)) == clean


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (2, 4, 8), (3, 64), ()], ids=str)
def test_waves_of_32_run_at_the_smallest_size_that_holds_them(rand: LoadedPair, sizes: tuple[int, ...]) -> None:
    """B27: above the largest size a batch runs at its own size; every run of a stage is counted."""
    requests = mixed_requests(32, seed=6, max_prompt=12, max_cap=16)
    expected = outcomes(run(make_engine(rand.target, rand.draft, (2, 2, 4), max_running_requests=32), requests))
    engine = make_engine(rand.target, rand.draft, (2, 2, 4), max_running_requests=32, graph_sizes=sizes)
    used = watch_sizes(engine)
    assert outcomes(run(engine, requests)) == expected
    assert used[0][0] > 8 and min(count for count, _ in used) <= 3
    assert all(size == min((s for s in sizes if s >= count), default=count) for count, size in used)
    counts = {"graph_runs": 0, "eager_runs": len(used)}
    stages = engine.summary()["stages"]
    assert stages.pop("prefill")["eager_runs"] > 0
    assert stages == {"draft": counts, "verify": counts, "extend": counts}


@pytest.mark.parametrize("sizes", [(4, 2, 1), (1, 2, 2, 4), (0, 1)], ids=str)
def test_sizes_in_odd_order_or_repeated_are_refused(sizes: tuple[int, ...]) -> None:
    """B27: whoever takes them from a user sorts them first."""
    with pytest.raises(UserError, match="ascending"):
        EngineSettings(context_length=64, max_total_tokens=512, graph_sizes=sizes)
