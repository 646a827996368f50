"""The padded prefill against the exact one: the whole engine, and stage by stage with poison."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import eaglecli.engine.prefill as prefill_module
from eaglecli.engine.engine import Engine
from eaglecli.engine.prefill import PrefillStage
from eaglecli.engine.prefill_inputs import CHOSEN_LATER, buffer_len, pack_chunks, view_batch
from eaglecli.engine.prefill_sizes import PrefillSize, exact_size, padded_size
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.sequence import NOTHING_EMITTED, PrefillChunk, Sequence
from tests.engine.harness import LoadedPair, make_engine, mixed_requests, outcomes, run

DUMMY = 9


def sequence(row: int, prompt_len: int, emitted: tuple[int, ...] = ()) -> Sequence:
    request = Request(row, np.arange(100 * row, 100 * row + prompt_len, dtype=np.int32), SamplingParams(max_new_tokens=8))
    output = replace(NOTHING_EMITTED, token_ids=np.array(emitted, np.int32))
    return Sequence(request, row=row, emitted=output)


def packed(chunks: list[PrefillChunk], size):
    return view_batch(torch.from_numpy(pack_chunks(chunks, size, DUMMY)), size)


def test_an_exact_pack_holds_every_chunk_as_one_segment():
    """A whole prompt, a part of one, and the end of one that begins again."""
    chunks = [
        PrefillChunk(sequence(1, 3), 0, 3),
        PrefillChunk(sequence(2, 9), 4, 6),
        PrefillChunk(sequence(3, 2, emitted=(7, 8)), 1, 3),
    ]
    batch = packed(chunks, exact_size([3, 2, 2]))
    assert batch.input_ids.tolist() == [100, 101, 102, 204, 205, 301, 7]
    assert batch.next_ids.tolist() == [101, 102, CHOSEN_LATER, 205, 206, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 4, 5, 1, 2]
    assert batch.token_rows.tolist() == [1, 1, 1, 2, 2, 3, 3]
    assert batch.segment_rows.tolist() == batch.rows.tolist() == [1, 2, 3]
    assert (batch.segment_start.tolist(), batch.prefix_lens.tolist()) == ([0, 3, 5, 7], [0, 4, 1])
    assert batch.choosing_rows.tolist() == [1, DUMMY, DUMMY]
    assert (batch.num_known.tolist(), batch.last_index.tolist()) == ([3, 9, 4], [2, 4, 6])


def test_a_padded_pack_cuts_long_chunks_and_names_the_dummy_row():
    chunks = [PrefillChunk(sequence(1, 20), 5, 20), PrefillChunk(sequence(2, 2), 0, 2)]
    size = replace(padded_size(24, 3), segment_len=8, num_segments=6)
    batch = packed(chunks, size)
    assert batch.segment_rows.tolist() == [1, 1, 2, DUMMY, DUMMY, DUMMY]
    assert batch.segment_start.tolist() == [0, 8, 15, 17, 17, 17, 17]
    assert batch.prefix_lens.tolist()[:3] == [5, 13, 0]
    assert batch.token_rows.tolist() == [1] * 15 + [2] * 2 + [DUMMY] * 7
    assert batch.rows.tolist() == batch.choosing_rows.tolist() == [1, 2, DUMMY]
    assert batch.num_known.tolist() == [20, 2, 1]
    assert all(part.storage_offset() % 16 == 0 for part in vars(batch).values())
    assert buffer_len([size]) >= max(part.storage_offset() + len(part) for part in vars(batch).values())


@pytest.mark.parametrize("triple", [None, (3, 2, 7)], ids=str)
@pytest.mark.parametrize("chunk", [7, 300])
def test_a_padded_prefill_changes_no_text(pair: LoadedPair, triple, chunk: int) -> None:
    requests = mixed_requests(12, seed=5, max_prompt=200, max_cap=8)
    settings = {"context_length": 256, "max_total_tokens": 8192, "chunked_prefill_size": chunk}
    expected = outcomes(run(make_engine(pair.target, pair.draft, triple, **settings), requests))
    engine = make_engine(pair.target, pair.draft, triple, graph_sizes=(16,), **settings)
    assert engine.prefill_sizes[-1].num_tokens == chunk
    assert outcomes(run(engine, requests)) == expected


@pytest.mark.parametrize("triple", [None, (3, 2, 7)], ids=str)
def test_every_size_agrees_with_itself_beside_poison_and_unpadded(twin: LoadedPair, triple) -> None:
    engine = small_engine(twin, triple)
    for size in engine.prefill_sizes:
        for seed in range(3):
            check = engine.check_prefill(size, seed)
            assert check.is_exact and check.num_padding_differs == 0, check
            assert check.graph_differs is None and check.num_tokens <= check.size_tokens


def small_engine(pair: LoadedPair, triple) -> Engine:
    return make_engine(
        pair.target, pair.draft, triple, graph_sizes=(12,), max_running_requests=12, chunked_prefill_size=300, max_total_tokens=4096
    )


def test_a_short_context_is_checked_too(twin: LoadedPair) -> None:
    engine = make_engine(twin.target, twin.draft, (2, 1, 3), graph_sizes=(2,), max_running_requests=2, context_length=20)
    for size in engine.prefill_sizes:
        assert engine.check_prefill(size, 0).is_exact


def test_the_check_deals_whole_prompts_parts_of_them_and_sequences_that_begin_again(twin: LoadedPair, monkeypatch) -> None:
    seen: list[PrefillChunk] = []
    load = PrefillStage.load

    def watch(stage: PrefillStage, chunks: list[PrefillChunk], size: PrefillSize) -> None:
        seen.extend(chunks)
        load(stage, chunks, size)

    monkeypatch.setattr(PrefillStage, "load", watch)
    engine = small_engine(twin, None)
    for seed in range(4):
        assert engine.check_prefill(engine.prefill_sizes[-1], seed).is_exact
    assert {(chunk.is_last, chunk.sequence.is_resumed) for chunk in seen} >= {(True, False), (False, False), (True, True)}


def test_the_check_finds_a_slot_that_is_read_before_it_is_written(twin: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(buffer, size):
        batch = view_batch(buffer, size)
        return replace(batch, prefix_lens=batch.prefix_lens + 1)

    monkeypatch.setattr(prefill_module, "view_batch", one_more)
    engine = small_engine(twin, None)
    assert engine.check_prefill(engine.prefill_sizes[0], 0).poison_differs


def test_the_check_finds_segments_that_do_not_see_what_is_before_them(e3: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(buffer, size):
        batch = view_batch(buffer, size)
        return replace(batch, prefix_lens=torch.zeros_like(batch.prefix_lens))

    monkeypatch.setattr(prefill_module, "view_batch", forgets)
    engine = make_engine(e3.target, None, None, graph_sizes=(1,), max_running_requests=1, context_length=256)
    assert engine.check_prefill(engine.prefill_sizes[-1], 0).padding_difference > 1e-2
