"""Result files: whole lines as they come, input order at the end, text without its end token, failures said once."""

import json
import os
import threading

import numpy as np
import pytest

from eaglecli.errors import ExitCode, UserError
from eaglecli.io.accept_statistics import AnswerCounts
from eaglecli.io.line_file import LineFile
from eaglecli.io.records import RecordError, RecordKey
from eaglecli.io.result_lines import Answer, LineMaker
from eaglecli.io.results import ResultWriter


class Bytes:
    """Ids are bytes."""

    def decode(self, token_ids: np.ndarray) -> str:
        return bytes(token_ids.tolist()).decode("utf-8", errors="replace")


def key(index: int, id_json: str = '"x"') -> RecordKey:
    return RecordKey(index, id_json, "in.jsonl", index + 1, 10 * index)


def answer(index: int, text: bytes = b"ab", stop: int | None = None, id_json: str = '"x"') -> Answer:
    counts = AnswerCounts(len(text), 0, 0, 0, 0, [])
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    return Answer(key(index, id_json), ids, "stop" if stop is not None else "length", stop, 3, counts, 9, 0, 0.1, 0.2, 0.3)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@pytest.mark.parametrize("ordered", [True, False])
def test_lines_are_put_in_input_order_only_when_asked(tmp_path, ordered):
    writer = ResultWriter(tmp_path, LineMaker(Bytes(), None).lines)
    for index in (2, 0, 1):
        writer.put(answer(index, text=b"abc"[: index + 1]))
    writer.close(ordered)
    written = lines(tmp_path / "generations.jsonl")
    assert [line["index"] for line in written] == ([0, 1, 2] if ordered else [2, 0, 1])
    assert all(line["text"] == "abc"[: line["index"] + 1] for line in written)


def test_the_end_token_is_in_the_ids_and_not_in_the_text(tmp_path):
    writer = ResultWriter(tmp_path, LineMaker(Bytes(), None).lines)
    writer.put(answer(0, b"ab!", stop=ord("!")))
    writer.put(answer(1, b"!b!", stop=None))
    writer.close(True)
    first, second = lines(tmp_path / "generations.jsonl")
    assert (first["text"], first["token_ids"][-1], first["stop_reason"]) == ("ab", 33, 33)
    assert second["text"] == "!b!"


@pytest.mark.parametrize("id_json", ["9007199254740993", "7.0", '"7"', "true", '{"b": 1, "a": 2}', '"\\u2028"'])
def test_ids_are_written_as_they_came(tmp_path, id_json):
    writer = ResultWriter(tmp_path, LineMaker(Bytes(), None).lines)
    writer.put(answer(0, id_json=id_json))
    writer.close(True)
    (line,) = lines(tmp_path / "generations.jsonl")
    assert json.dumps(line["id"]) == json.dumps(json.loads(id_json))


def test_any_line_splitter_reads_the_output(tmp_path):
    writer = ResultWriter(tmp_path, LineMaker(Bytes(), None).lines)
    writer.put(answer(0, "a\u2028b\u2029c\u0085d".encode()))
    writer.close(True)
    (line,) = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a\u2028b\u2029c\u0085d"


def test_an_error_line_says_where_what_and_why(tmp_path):
    writer = ResultWriter(tmp_path, LineMaker(None, None).lines)
    writer.put(RecordError(key(4), "too_long", "why", "raw", 77))
    writer.close(True)
    (line,) = lines(tmp_path / "errors.jsonl")
    assert line == {
        **{"id": "x", "index": 4, "file": "in.jsonl", "line": 5, "byte_offset": 77},
        **{"code": "too_long", "message": "why", "raw": "raw"},
    }


def test_a_finished_line_is_on_disk_before_the_run_ends(tmp_path):
    writer = ResultWriter(tmp_path, LineMaker(Bytes(), None).lines)
    writer.put(answer(0))
    writer._queue.put(None)  # what close() does first
    writer._thread.join(timeout=10)
    assert len(lines(tmp_path / "generations.jsonl")) == 1


def test_a_bounded_number_of_results_waits_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("eaglecli.io.results.WINDOW", 2)
    may_write, is_put = threading.Event(), threading.Event()

    def make_lines(results):
        may_write.wait(10)
        return LineMaker(Bytes(), None).lines(results)

    writer = ResultWriter(tmp_path, make_lines)

    def put_many():
        for index in range(40):  # more than one block and what may wait
            writer.put(answer(index))
        is_put.set()

    threading.Thread(target=put_many, daemon=True).start()
    most_waiting = 0
    while not is_put.is_set():
        most_waiting = max(most_waiting, writer._queue.qsize())
        if most_waiting == 2:
            may_write.set()
    assert most_waiting == 2
    writer.close(True)
    assert [line["index"] for line in lines(tmp_path / "generations.jsonl")] == list(range(40))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence_and_never_a_hang(tmp_path):
    writer = ResultWriter(tmp_path, LineMaker(Bytes(), None).lines)
    writer._generations = LineFile(tmp_path / "other.jsonl")
    writer._generations._stream = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(UserError, match="cannot be written") as raised:
        for index in range(10_000):
            writer.put(answer(index, b"a" * 100))
        writer.close(True)
    assert raised.value.exit_code == ExitCode.INTERNAL
    with pytest.raises(UserError):
        writer.close(True)
