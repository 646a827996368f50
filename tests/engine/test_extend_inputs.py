"""The extend's inputs as the engine builds them: the concerns of SGLang's pull request 6987 (room, whole runs, clean tails)."""

import pytest
import torch

from eaglecli.engine.engine import Engine
from eaglecli.engine.extend import prepare_extend_after_decode
from eaglecli.engine.row_state import Batch
from tests.engine.harness import LoadedPair, make_engine, random_prompts, requests_of

TRIPLE = (4, 2, 9)
NUM_ROWS, SIZE, WIDTH = 5, 8, 5
HUGE = 2**30


@pytest.fixture
def engine(twin: LoadedPair) -> Engine:
    """After some iterations of five requests, padded to eight, which accept more and less; one of them goes on no longer."""
    settings = {"graph_sizes": (SIZE,), "max_running_requests": NUM_ROWS, "same_noise_drafting": False}
    engine = make_engine(twin.target, twin.draft, TRIPLE, **settings)
    requests = requests_of(random_prompts([5, 17, 9, 30, 2], seed=4), 40, temperature=1.3)
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    buffers = engine._iteration.buffers
    buffers.run.extend_lens[1] = 0
    assert len(set(buffers.run.extend_lens[:NUM_ROWS].tolist())) > 2, "runs of several lengths are wanted"
    return engine


def prepared(engine: Engine):
    run = engine._iteration.buffers.run
    front = type(run)(**{name: getattr(run, name)[:SIZE] for name in run.__dataclass_fields__})
    batch = Batch(engine._iteration.buffers.live_rows[:SIZE], engine.widest_hints)
    with torch.inference_mode():
        return prepare_extend_after_decode(engine._eagle._draft, engine._state, batch, front, TRIPLE[2])


def test_there_is_room_for_every_token_that_could_be_accepted(engine):
    """S9 a."""
    forward = prepared(engine)
    for tensor in (forward.input_ids, forward.positions, forward.hidden, forward.attention.out_slots):
        assert tensor.shape[0] == SIZE * WIDTH
    full = engine._iteration.buffers.run
    full.extend_lens[:] = WIDTH
    assert prepared(engine).attention.query_start[-1] == SIZE * WIDTH


def test_input_ids_are_the_whole_accepted_runs_in_order(engine):
    """S9 b."""
    run, forward = engine._iteration.buffers.run, prepared(engine)
    ids, positions, slots = [], [], []
    for index in range(NUM_ROWS):
        count, base = int(run.extend_lens[index]), int(run.base_lengths[index])
        row = int(engine._iteration.buffers.live_rows[index])
        ids += run.record[index, :count].tolist()
        positions += range(base, base + count)
        slots += engine._state.slot_table[row, base : base + count].tolist()
        if count:
            assert int(run.record[index, -3]) + 1 == count  # accepted drafts and the bonus token
            assert forward.input_ids[forward.last_index[index]] == engine._state.verified_id[row]
    total = len(ids)
    assert forward.input_ids[:total].tolist() == ids
    assert forward.positions[:total].tolist() == positions
    assert forward.attention.out_slots[:total].tolist() == slots
    assert len(ids) > NUM_ROWS


def test_the_tail_is_token_0_at_position_0_in_the_dummy_slot(engine):
    forward = prepared(engine)
    total = int(forward.attention.query_start[-1])
    assert total < SIZE * WIDTH
    for tensor in (forward.input_ids, forward.positions, forward.attention.out_slots):
        assert not tensor[total:].any()


def test_nan_and_huge_ids_in_every_tail_change_nothing(engine):
    """S9 c: tokens and path nodes past a run, features of nodes off the path, everything of padded rows."""
    run, state = engine._iteration.buffers.run, engine._state
    rows = engine._iteration.buffers.live_rows[:NUM_ROWS].long()

    def extend() -> list[torch.Tensor]:
        with torch.inference_mode():
            engine._iteration.stages[2].run(SIZE, engine.widest_hints)
        return [tensor[rows].clone() for tensor in (state.draft_hidden, state.draft_log_q, state.draft_token)]

    expected = extend()
    for index in range(SIZE):
        count = int(run.extend_lens[index])
        on_path = torch.zeros(TRIPLE[2], dtype=torch.bool)
        on_path[run.path[index, :count].long().cpu()] = True
        run.tokens[index, count:] = HUGE
        run.path[index, count:] = HUGE
        if count:
            run.features[index, ~on_path] = torch.nan
    run.features[NUM_ROWS:] = torch.nan
    run.record.fill_(HUGE)
    goes_on = run.extend_lens[:NUM_ROWS] > 0
    for before, after in zip(expected, extend(), strict=True):
        assert torch.equal(before[goes_on], after[goes_on])
    assert all(torch.isfinite(tensor[goes_on].float()).all() for tensor in expected)
