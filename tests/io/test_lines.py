"""Lines of a file: the newline byte alone divides, offsets stay those of the file."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.io.lines import Line, Transcoded, decode_line, split_lines
from eaglecli.io.records import RecordFault


def split(data: bytes) -> list[Line]:
    return list(split_lines(io.BytesIO(data)))


def test_byte_order_mark_and_carriage_returns_belong_to_no_line():
    """B46."""
    lines = split(b"\xef\xbb\xbf{}\r\n\r\n[1]\r\n")
    assert [(line.data, line.number, line.byte_offset) for line in lines] == [(b"{}", 1, 3), (b"[1]", 3, 9)]


@pytest.mark.parametrize("blank", [b"", b"  ", b"\t", "\u00a0".encode(), " \u00a0 ".encode(), b"\r"])
def test_blank_lines_are_skipped_but_counted(blank):
    """B47."""
    assert [line.number for line in split(blank + b"\n1\n" + blank + b"\n" + blank + b"\n2\n" + blank + b"\n")] == [2, 5]


@given(st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=8))
def test_offsets_point_at_the_line_in_the_file(chunks):
    data = b"\n".join(chunks)
    if data.startswith(b"\xef\xbb\xbf"):
        return
    for line in split(data):
        assert data[line.byte_offset :].startswith(line.data)
        assert data[: line.byte_offset].count(b"\n") == line.number - 1


def test_a_wrong_byte_is_named_with_its_place_in_the_file():
    with pytest.raises(RecordFault, match="not UTF-8: byte 0xe9 at byte 102") as raised:
        decode_line(Line(b"ab\xe9", 7, 100), "utf-8")
    assert raised.value.byte_offset == 102


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(1, 9))
def test_a_wide_encoding_is_converted_whatever_the_size_of_the_reads(text, size):
    stream = io.BufferedReader(Transcoded(io.BytesIO(text.encode("utf-16-le")), "utf-16-le"), size)
    assert stream.read().decode() == text
