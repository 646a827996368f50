"""Answers, loops, vocabulary, packing: everything before the first step."""

import json

import numpy as np
import pytest
import torch

from eaglecli.engine.request import Completion
from eaglecli.errors import UserError
from eaglecli.training.answer_engine import open_answer_engine
from eaglecli.training.answers import Answer, AnswerMaker, read_answers, temperature_of
from eaglecli.training.documents import Document, make_documents
from eaglecli.training.packing import make_batch, pack
from eaglecli.training.repetition import find_loop
from eaglecli.training.self_prompts import SelfPromptWriter
from eaglecli.training.shards import ShardStore
from eaglecli.training.vocabulary import choose_vocabulary, count_answer_tokens
from tests.fixtures import END_OF_TURN_ID
from tests.training.parts import SEQUENCE_LENGTH, load_e3, random_documents, small_settings


class ScriptedEngine:
    """Answers every request by a fixed rule, and counts requests."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []

    def generate(self, requests):
        for request in requests:
            self.requests.append(request)
            ids, reason = self.answer(request)
            yield Completion(request, np.array(ids, np.int32), reason)


def never():
    return False


# ---- loops -----------------------------------------------------------------------------------------------------------


def test_a_loop_begins_where_its_second_round_does():
    text = np.concatenate([np.arange(100, 110), np.tile([7, 8, 9], 20)])
    assert find_loop(text) == 13


def test_a_loop_in_the_middle_is_found():
    text = np.concatenate([np.arange(50), np.full(40, 3), np.arange(50, 90)])
    assert find_loop(text) == 51


@pytest.mark.parametrize(
    "text", [np.arange(200), np.tile(np.arange(30), 2), np.full(20, 5), np.zeros(0, np.int64), np.tile(np.arange(65), 6)]
)
def test_short_or_wide_repetition_is_no_loop(text):
    assert find_loop(text) is None


def answer(number, ids, loop_start=None, is_finished=True, sample=0):
    return Answer(number, sample, 0.0, np.array([1, 2], np.int32), np.array(ids, np.int32), is_finished, loop_start)


def test_loops_are_cut_dropped_and_counted():
    good, cut, dropped, short = [5, 6, 7, END_OF_TURN_ID], [9] * 50, [4] * 50, [END_OF_TURN_ID]
    answers = [answer(0, good), answer(1, cut, loop_start=5, is_finished=False), answer(2, dropped, loop_start=1), answer(3, short)]
    documents = make_documents(answers, frozenset())
    assert [document.token_ids.tolist() for document in documents.training] == [[1, 2, *good], [1, 2, *cut[:5]]]
    counts = documents.counts
    found = (
        counts.num_answers,
        counts.num_finished,
        counts.num_loops_cut,
        counts.num_loops_dropped,
        counts.num_loop_tokens,
        counts.num_too_short,
    )
    assert found == (4, 1, 1, 1, 45 + 49, 1)


def test_held_out_prompts_are_not_trained_on():
    answers = [answer(0, [5, 6, 7]), answer(1, [8, 9, 10]), answer(1, [8, 8, 8], sample=1)]
    documents = make_documents(answers, frozenset([1]))
    assert [document.answer_ids.tolist() for document in documents.training] == [[5, 6, 7]]
    assert [document.answer_ids.tolist() for document in documents.held_out] == [[8, 9, 10]]
    assert documents.counts.num_answers == 1


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_holds_the_most_frequent_answer_tokens_and_the_lowest_unused_ids():
    documents = [Document(np.array([9, 9, 9, 7, 7, 3, 11, 7], np.int32), answer_start=3)]
    vocabulary = choose_vocabulary(count_answer_tokens(documents, 12), 5)
    assert vocabulary.token_ids.tolist() == [0, 1, 3, 7, 11], "prompt tokens do not count"
    assert vocabulary.d2t.tolist() == [0, 0, 1, 4, 7]
    assert torch.nonzero(vocabulary.t2d).flatten().tolist() == [0, 1, 3, 7, 11]
    assert vocabulary.coverage == 1.0


def test_rare_tokens_are_left_out_and_coverage_says_how_many():
    documents = [Document(np.array([0, 5, 5, 5, 6, 6, 7], np.int32), answer_start=1)]
    vocabulary = choose_vocabulary(count_answer_tokens(documents, 10), 2)
    assert vocabulary.token_ids.tolist() == [5, 6]
    assert vocabulary.coverage == pytest.approx(5 / 6)


# ---- packing ---------------------------------------------------------------------------------------------------------


def test_packing_keeps_every_document_whole_and_fills_sequences():
    documents = [*random_documents(60), Document(np.zeros(SEQUENCE_LENGTH + 1, np.int32), 3)]
    packs = pack(documents, SEQUENCE_LENGTH)
    numbers = sorted(number for sequence in packs for number in sequence)
    assert numbers == list(range(60)), "a document is lost, doubled, or too long and kept"
    used = [sum(len(documents[number]) for number in sequence) for sequence in packs]
    assert max(used) <= SEQUENCE_LENGTH
    assert sum(used) / (len(packs) * SEQUENCE_LENGTH) > 0.85


def test_positions_and_cuts_begin_anew_with_every_document():
    documents = random_documents(3)
    batch = make_batch(documents, [[0, 1], [2]], SEQUENCE_LENGTH, 2, torch.device("cpu"))
    lengths = [len(document) for document in documents]
    expected = [0, lengths[0], lengths[0] + lengths[1], SEQUENCE_LENGTH, SEQUENCE_LENGTH + lengths[2], 2 * SEQUENCE_LENGTH]
    assert batch.starts.tolist() == expected
    for start, end in zip(expected, expected[1:], strict=False):
        assert batch.positions[start:end].tolist() == list(range(end - start))
    assert batch.input_ids[lengths[0] : lengths[0] + lengths[1]].tolist() == documents[1].token_ids.tolist()


# ---- shards and answers ----------------------------------------------------------------------------------------------


def test_shards_are_read_back_in_order_and_appended_to(tmp_path, monkeypatch):
    monkeypatch.setattr("eaglecli.training.shards._RECORDS_PER_SHARD", 2)
    store = ShardStore(tmp_path, "things")
    for number in range(5):
        store.add({"number": number})
    assert [record["number"] for record in ShardStore(tmp_path, "things").read()] == [0, 1, 2, 3]
    store.flush()
    again = ShardStore(tmp_path, "things")
    again.add({"number": 5})
    again.flush()
    assert [record["number"] for record in again.read()] == [0, 1, 2, 3, 4, 5]
    assert len(again.paths) == 4


def test_a_damaged_shard_is_named(tmp_path):
    (tmp_path / "things-00000.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="things-00000"):
        list(ShardStore(tmp_path, "things").read())


def prompts(count):
    return [np.array([10, number], np.int32) for number in range(count)]


def by_prompt(request):
    return [request.prompt_ids[-1], 5, 6, END_OF_TURN_ID], "stop"


def test_answers_are_made_once_and_go_on_where_they_stopped(tmp_path):
    settings = small_settings(num_samples=2)
    first = ScriptedEngine(by_prompt)
    maker = AnswerMaker(prompts(6), frozenset([2]), (END_OF_TURN_ID,), settings, ShardStore(tmp_path, "answers"))
    for totals in maker.run(first, lambda: len(first.requests) >= 4):
        assert totals.num_answers <= 4
    second = ScriptedEngine(by_prompt)
    maker = AnswerMaker(prompts(6), frozenset([2]), (END_OF_TURN_ID,), settings, ShardStore(tmp_path, "answers"))
    assert maker.num_missing == 7
    list(maker.run(second, never))
    assert maker.num_missing == 0
    keys = [request.key for request in (*first.requests, *second.requests)]
    assert sorted(keys) == sorted({(prompt, sample) for prompt in range(6) for sample in range(2)} - {(2, 1)})
    assert keys[0] == (2, 0), "held-out prompts come first"
    answers = {(answer.prompt, answer.sample): answer for answer in read_answers(ShardStore(tmp_path, "answers"))}
    assert answers[4, 1].answer_ids.tolist() == [4, 5, 6, END_OF_TURN_ID], "the end token is part of the answer"
    assert answers[4, 1].prompt_ids.tolist() == [10, 4]
    assert answers[4, 1].is_finished


def test_the_first_answer_is_greedy_and_the_others_are_spread_over_the_temperatures():
    settings = small_settings(num_samples=4)
    assert {temperature_of(prompt, 0, settings) for prompt in range(50)} == {0.0}
    others = [temperature_of(prompt, sample, settings) for prompt in range(100) for sample in range(1, 4)]
    assert 0.7 <= min(others) < 0.71
    assert 0.99 < max(others) < 1.0
    assert np.histogram(others, bins=3, range=(0.7, 1.0))[0].min() > 80


def test_answering_ends_with_the_token_budget(tmp_path):
    engine = ScriptedEngine(by_prompt)
    settings = small_settings(num_samples=1, max_answer_tokens=20)
    maker = AnswerMaker(prompts(30), frozenset(), (END_OF_TURN_ID,), settings, ShardStore(tmp_path, "answers"))
    list(maker.run(engine, never))
    assert len(engine.requests) == 5
    assert maker.num_missing == 0


def test_a_prompt_that_leaves_no_room_is_not_answered(tmp_path):
    long = [np.zeros(SEQUENCE_LENGTH - 3, np.int32), np.zeros(10, np.int32)]
    maker = AnswerMaker(long, frozenset(), (END_OF_TURN_ID,), small_settings(num_samples=1), ShardStore(tmp_path, "answers"))
    assert maker.num_missing == 1


def test_the_engine_answers_all_and_when_the_time_is_over_only_what_runs_and_the_next_group(tmp_path):
    engine = open_answer_engine(load_e3(tmp_path).model, context_length=64, max_running_requests=8)
    settings = small_settings(num_samples=1, max_new_tokens=3)
    for num_enough in (4, 60):
        maker = AnswerMaker(prompts(60), frozenset(), (END_OF_TURN_ID,), settings, ShardStore(tmp_path, "answers"))
        for totals in maker.run(engine, lambda maker=maker, enough=num_enough: maker.totals.num_answers >= enough):
            most_running, most_waiting = 8, 2
            assert num_enough == 60 or totals.num_answers < num_enough + 2 * most_running + most_waiting  # all that run may end at a time
    assert maker.totals.num_answers == 60
    assert len({answer.prompt for answer in read_answers(ShardStore(tmp_path, "answers"))}) == 60


# ---- prompts of the target's own ------------------------------------------------------------------------------------------


def test_own_prompts_are_kept_when_they_are_whole_and_new(tmp_path):
    texts = [
        ([*b"hello there", END_OF_TURN_ID], "stop"),
        ([*b"hello there", END_OF_TURN_ID], "stop"),  # again
        ([*b"never ends"], "length"),
        ([*b"ha" * 40, END_OF_TURN_ID], "stop"),  # a loop
        ([*b"with ", 257, *b" control", END_OF_TURN_ID], "stop"),
        ([*b"second one", END_OF_TURN_ID], "stop"),
    ]
    engine = ScriptedEngine(lambda request: texts[request.key])
    writer = SelfPromptWriter(
        np.array([1]), (END_OF_TURN_ID,), frozenset([257]), lambda ids: bytes(ids.tolist()).decode(), 2, 64, 0, ShardStore(tmp_path, "own")
    )
    list(writer.run(engine, never))
    assert writer.texts == ["hello there", "second one"]
    counts = writer.counts
    assert (counts.num_written, counts.num_repeated, counts.num_unfinished, counts.num_loops, counts.num_unfit) == (6, 1, 1, 1, 1)
    assert [record["text"] for record in ShardStore(tmp_path, "own").read()] == writer.texts
    assert json.dumps(list(ShardStore(tmp_path, "own").read())[1]["try"]) == "5", "a later call must not write the same texts again"
