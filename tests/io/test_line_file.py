"""Lines that are appended, cut, kept and put in order: nothing whole is lost, nothing torn stays."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.io.line_file import KeptLines, LineFile, _SeenKeys, read_in_order, read_kept_lines, replace_with


def line(index: int, sample: int = 0, text: str = "") -> str:
    return json.dumps({"index": index, "sample": sample, "text": text})


def write(path: Path, *keys: tuple[int, int], ordered: bool = False, kept: KeptLines | None = None) -> None:
    file = LineFile(path, kept)
    for index, sample in keys:
        file.append([(index, sample, line(index, sample).encode())])
    file.close(ordered)


def keys(path: Path) -> list[tuple[int, int]]:
    return [(found["index"], found["sample"]) for found in map(json.loads, path.read_bytes().splitlines())]


def test_lines_are_put_in_order_of_index_and_sample(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, (2, 0), (0, 1), (1, 0), (0, 0), ordered=True)
    assert keys(path) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    write(path, (2, 0), (0, 0))
    assert keys(path) == [(2, 0), (0, 0)]
    assert [found["index"] for found in read_in_order(path)] == [0, 2]


def test_what_was_kept_stays_and_what_follows_it_is_cut(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, (1, 0))
    path.write_bytes(path.read_bytes() + b'{"index": 7, "sam')
    kept = read_kept_lines(path, lambda _: None)
    assert (len(kept), kept.has_torn_tail, kept.num_dropped) == (1, True, 0)
    write(path, (0, 0), ordered=True, kept=kept)
    assert keys(path) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("bad", [b"\0\0\0\n", b"[1]\n", b'{"index": "1"}\n', b"\xff\n", b"\n"])
def test_a_damaged_line_is_dropped_and_the_others_are_kept(tmp_path, bad):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(0).encode() + b"\n" + bad + line(1).encode() + b"\n")
    kept = read_kept_lines(path, lambda _: None)
    assert (len(kept), kept.num_dropped) == (2, 1)
    LineFile(path, kept).close(ordered=False)
    assert keys(path) == [(0, 0), (1, 0)]


def test_the_first_of_two_lines_with_one_key_is_kept_and_shown(tmp_path):
    path, shown = tmp_path / "a.jsonl", []
    path.write_text(line(3, text="first") + "\n" + line(3, text="second") + "\n")
    assert read_kept_lines(path, shown.append).num_dropped == 1
    assert [found["text"] for found in shown] == ["first"]


def test_a_file_without_a_good_line_starts_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\0\n\0")
    write(path, (0, 0), kept=read_kept_lines(path, lambda _: None))
    assert keys(path) == [(0, 0)]
    assert len(read_kept_lines(tmp_path / "absent", lambda _: None)) == 0


@given(
    order=st.permutations([(index, sample) for index in range(5) for sample in range(2)]),
    cut=st.integers(min_value=0, max_value=400),
)
def test_wherever_a_file_is_cut_whole_lines_are_kept_and_the_rest_can_be_written_again(tmp_path_factory, order, cut):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    write(path, *order)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    seen = []
    kept = read_kept_lines(path, lambda found: seen.append((found["index"], found["sample"])))
    assert len(seen) == data.count(b"\n")
    write(path, *[key for key in order if key not in seen], ordered=True, kept=kept)
    assert keys(path) == sorted(order)


class FullDisk:
    """A raw stream on which only so many bytes have room."""

    def __init__(self, stream, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data) -> int:
        if self._stream.tell() >= self._room:
            raise OSError(28, "No space left on device")
        return self._stream.write(data[: self._room - self._stream.tell()])

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def test_on_a_full_disk_the_file_ends_with_the_last_whole_line(tmp_path):
    path = tmp_path / "a.jsonl"
    file = LineFile(path)
    file._stream = FullDisk(file._stream, 100)
    with pytest.raises(OSError, match="No space"):
        file.append([(index, 0, line(index).encode()) for index in range(10)])
    data = path.read_bytes()
    assert data.endswith(b"\n")
    assert keys(path) == [(index, 0) for index in range(data.count(b"\n"))]
    assert 0 < len(data) <= 100


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")

    def parts():
        yield b"new"
        raise error

    with pytest.raises(type(error)):
        replace_with(path, parts())
    assert os.listdir(tmp_path) == ["a.json"]
    assert path.read_text() == "old"


def test_closing_twice_does_nothing(tmp_path):
    file = LineFile(tmp_path / "a.jsonl")
    file.append([(index, 0, line(index).encode()) for index in (1, 0)])
    file.close(ordered=False)
    file.close(ordered=True)
    assert keys(tmp_path / "a.jsonl") == [(1, 0), (0, 0)]


def test_lines_far_apart_and_of_many_samples_are_each_known_by_index_and_sample(tmp_path):
    path = tmp_path / "lines.jsonl"
    pairs = [(0, 0), (0, 1), (65535, 0), (65536, 0), (2**40, 3), (-1, 0), (0, -2), (2, 2), (2, 3), (3, 99_999), (4, 34_463)]
    path.write_text("".join(json.dumps({"index": index, "sample": sample}) + "\n" for index, sample in pairs + pairs[::-1]))
    kept = read_kept_lines(path, lambda _: None)
    assert [tuple(row[:2]) for row in kept.table().tolist()] == pairs
    assert kept.num_dropped == len(pairs)


@given(st.lists(st.tuples(st.integers(-300, 300), st.integers(-5, 200_000) | st.integers(0, 5)), max_size=60))
def test_keys_are_seen_as_a_set_sees_them(pairs):
    seen, expected = _SeenKeys(), set()
    for pair in pairs:
        assert seen.add(*pair) == (pair not in expected)
        expected.add(pair)


@pytest.mark.parametrize(("num_records", "num_samples"), [(1_000_000, 1), (250_000, 4), (1000, 1000), (10, 10_000), (1, 100_000)])
def test_keys_take_a_megabyte_whether_records_or_samples_are_many(num_records, num_samples):
    seen = _SeenKeys()
    for index in range(0, num_records, 100):
        for sample in range(0, num_samples, 1 if index == 0 else 97):
            assert seen.add(index, sample)
    assert sum(map(len, seen._maps.values())) <= 2**20


def test_more_lines_than_are_looked_up_at_a_time_are_put_in_order(tmp_path):
    path = tmp_path / "lines.jsonl"
    file = LineFile(path)
    file.append([(index, 0, json.dumps({"index": index}).encode()) for index in range(9999, -1, -1)])
    file.close(ordered=True)
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == list(range(10000))
