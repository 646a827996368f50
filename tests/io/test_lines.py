"""Lines of a file: the newline byte alone divides, offsets stay those of the file, other formats are refused in one sentence."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.errors import UserError
from eaglecli.io.lines import check_format, read_lines

MESSY = Path(__file__).parent.parent / "data" / "messy"


def write(folder: Path, data: bytes, name: str = "input.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_byte_order_mark_and_carriage_returns_belong_to_no_line(tmp_path):
    lines = list(read_lines(write(tmp_path, b"\xef\xbb\xbf{}\r\n\r\n[1]\r\n")))
    assert [(line.data, line.number, line.byte_offset) for line in lines] == [(b"{}", 1, 3), (b"[1]", 3, 9)]


@pytest.mark.parametrize("blank", [b"", b"  ", b"\t", "\u00a0".encode(), " \u00a0 ".encode(), b"\r"])
def test_blank_lines_are_skipped_but_counted(tmp_path, blank):
    path = write(tmp_path, blank + b"\n1\n" + blank + b"\n" + blank + b"\n2\n" + blank + b"\n")
    assert [line.number for line in read_lines(path)] == [2, 5]


@given(st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=8))
def test_offsets_point_at_the_line_in_the_file(tmp_path_factory, chunks):
    data = b"\n".join(chunks)
    if data.startswith((b"\x1f\x8b", b"\xef\xbb\xbf")):
        return
    path = write(tmp_path_factory.mktemp("lines"), data)
    for line in read_lines(path):
        assert data[line.byte_offset :].startswith(line.data)
        assert data[: line.byte_offset].count(b"\n") == line.number - 1


def test_all_members_of_a_gzip_file_are_read(tmp_path):
    path = write(tmp_path, gzip.compress(b"1\n2\n") + gzip.compress(b"3\n"))
    assert [line.data for line in read_lines(path)] == [b"1", b"2", b"3"]


def test_a_cut_gzip_file_is_one_error():
    with pytest.raises(UserError, match="broken gzip archive"):
        list(read_lines(MESSY / "truncated.jsonl.gz"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("utf16le_bom.jsonl", "UTF-16"),
        ("cr_only.jsonl", "CR alone"),
        ("array_named.jsonl", "JSON array"),
        ("array.json", "JSON array"),
        ("single_object.json", "one JSON object over several lines"),
        ("wrapped_array.json", "key `data`"),
        ("prompts.csv", "CSV"),
        ("prompts.parquet", "Parquet"),
        ("plain_prompts.txt", "plain text"),
    ],
)
def test_a_file_of_another_format_is_one_error_that_names_it(name, words):
    with pytest.raises(UserError, match=words):
        check_format(MESSY / name)


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        check_format(tmp_path / "absent.jsonl")
