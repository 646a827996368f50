"""Which records are taken: shards part the input, samples name ids, a shuffle seed picks at random, and indices stay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglecli.errors import UserError
from eaglecli.io.record_choice import parse_samples, parse_shard
from eaglecli.io.scan import InputReader
from tests.io.reading import read, select


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("choice") / "input.jsonl"
    lines = [f'{{"id": {number}, "prompt": "p{number}"}}' for number in range(20)]
    lines[7], lines[9] = "{", '{"id": "7", "prompt": "text"}'
    path.write_text("\n".join(lines))
    return path


def indices(records):
    return [record.key.index for record in records]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.none() | st.integers(0, 9), st.integers(0, 8), st.none() | st.integers(1, 20))
def test_shards_part_what_offset_and_limit_choose(source, count, seed, offset, limit):
    base = {"offset": offset, "limit": limit, "shuffle_seed": seed}
    whole = indices(read(source, choice=base))
    assert len(whole) == min(20 - offset, limit or 20)
    parts = [indices(read(source, choice={**base, "shard": (number, count)})) for number in range(1, count + 1)]
    assert sorted(sum(parts, [])) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shuffle_seed_picks_others_and_keeps_the_order_of_the_input(source):
    picks = [tuple(indices(read(source, choice={"limit": 5, "shuffle_seed": seed}))) for seed in range(8)]
    assert len(set(picks)) > 4
    assert all(list(pick) == sorted(pick) for pick in picks)
    assert picks[0] == tuple(indices(read(source, choice={"limit": 5, "shuffle_seed": 0})))


def test_the_scan_counts_what_is_chosen(source):
    scan = InputReader(select(source, choice={"shard": (2, 2)})).scan
    assert (scan.num_good, scan.num_bad) == (9, 1)
    assert InputReader(select(source, choice={"limit": 3, "shuffle_seed": 4})).scan.num_records == 3


def test_samples_are_ids_as_text_or_as_json(source):
    assert indices(read(source, choice={"samples": frozenset(["7", "3", "record-7"])})) == [3, 7, 9]
    assert indices(read(source, choice={"samples": frozenset(['"7"'])})) == [9]


def test_samples_come_from_a_file_too(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("a b\n\nc\n")
    assert parse_samples([f"@{path}", "d,e"]) == {"a b", "c", "d", "e"}
    with pytest.raises(UserError, match="cannot be read"):
        parse_samples([f"@{tmp_path / 'absent'}"])


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/2", ""])
def test_a_shard_counts_from_one(text):
    with pytest.raises(ValueError, match="i from 1 to n"):
        parse_shard(text)
    assert parse_shard("4/4") == (4, 4)


def test_a_stream_cannot_be_shuffled():
    with pytest.raises(UserError, match="cannot be shuffled"):
        InputReader(select("-", choice={"shuffle_seed": 1}))
