"""Formats: each is seen by its content, read in pieces, and a broken file is one sentence."""

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.errors import UserError
from eaglecli.io.input_sources import expand_inputs
from eaglecli.io.json_array import split_array
from eaglecli.io.scan import InputReader
from tests.io.reading import MESSY, codes, good, read, select

RECORDS = [{"id": number, "prompt": f"prompt {number} é"} for number in range(5)]
TEXTS = [record["prompt"] for record in RECORDS]
JSON_LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def zstd(data: bytes) -> bytes:
    import pyarrow

    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


def table(rows: list[dict]) -> "object":
    import pyarrow

    return pyarrow.Table.from_pylist(rows)


def write_arrow(path: Path, is_stream: bool) -> Path:
    import pyarrow

    make = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    data = table(RECORDS)
    with make(str(path), data.schema) as writer:
        writer.write_table(data, max_chunksize=2)
    return path


def texts(records) -> list[str]:
    assert not codes(records)
    return [record.text for record in records]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.jsonl", JSON_LINES, "JSON lines"),
        ("a", JSON_LINES, "JSON lines"),
        ("a.csv", JSON_LINES, "JSON lines"),
        ("a.gz", gzip.compress(JSON_LINES, mtime=0), "JSON lines, gzip"),
        ("a.gz", gzip.compress(JSON_LINES[:60], mtime=0) + gzip.compress(JSON_LINES[60:], mtime=0), "JSON lines, gzip"),
        ("a.zst", zstd(JSON_LINES), "JSON lines, zstd"),
        ("a.jsonl", zstd(JSON_LINES[:60]) + zstd(JSON_LINES[60:]), "JSON lines, zstd"),
        ("a.json", json.dumps(RECORDS).encode(), "a JSON array"),
        ("a.jsonl", b"\xef\xbb\xbf\n " + json.dumps(RECORDS, indent=2).encode(), "a JSON array"),
        ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode(), mtime=0), "a JSON array, gzip"),
        ("a.txt", "\n".join(TEXTS).encode(), "plain text, one prompt a line"),
        ("a.csv", ("prompt\r\n" + "\r\n".join(TEXTS)).encode(), "a CSV table"),
        ("a.csv.gz", gzip.compress(("prompt\n" + "\n".join(TEXTS)).encode(), mtime=0), "a CSV table, gzip"),
        ("a", ("id,prompt\n" + "\n".join(f"1,{text}" for text in TEXTS)).encode(), "a CSV table"),
        ("a", ("id;prompt\n" + "\n".join(f"1;{text}" for text in TEXTS)).encode(), "a CSV table, divided by `;`"),
        ("a", ("id\tprompt\n" + "\n".join(f"1\t{text}" for text in TEXTS)).encode(), "a TSV table"),
        ("a.jsonl", JSON_LINES.decode().encode("utf-16"), "JSON lines, converted to UTF-8"),
    ],
)
def test_content_decides_what_a_file_is(tmp_path, name, data, kind):
    reader = InputReader(select(write(tmp_path, name, data)))
    assert list(reader.scan.formats.values()) == [kind]
    assert texts(list(reader.records())) == TEXTS


def test_a_format_that_is_named_wins_over_content(tmp_path):
    path = write(tmp_path, "a.jsonl", b'{"prompt": "x"}\n')
    assert texts(read(path, input_format="text")) == ['{"prompt": "x"}']
    assert texts(read(write(tmp_path, "b.txt", b"prompt,n2\nx,y\n"), input_format="csv")) == ["x"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_files_of_both_forms_are_read(tmp_path, is_stream):
    assert texts(read(write_arrow(tmp_path / "a.arrow", is_stream))) == TEXTS


def test_a_parquet_file_is_read_batch_by_batch_and_rows_are_numbered(tmp_path):
    import pyarrow.parquet

    many = [{"id": number, "prompt": f"p{number}"} for number in range(700)]
    pyarrow.parquet.write_table(table(many), tmp_path / "a.parquet", row_group_size=300)
    records = read(tmp_path / "a.parquet")
    assert [(record.key.line, record.key.id_json, record.text) for record in records] == [
        (number + 1, str(number), f"p{number}") for number in range(700)
    ]
    assert records[0].key.byte_offset is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(JSON_LINES, mtime=0)[:-9], "broken gzip archive"),
        (zstd(JSON_LINES)[:-3], "is broken: Truncated"),
        (b"PAR1 and nothing more", "cannot be read as a table"),
        (b"ARROW1 and nothing more", "cannot be read as a table"),
        (b"PK\x03\x04rest", "zip archive"),
        (gzip.compress(b"PAR1....", mtime=0), "table inside a gzip archive"),
        (b'[{"prompt": "a"}, {"prompt": "b"', "breaks off"),
        (b'[{"prompt": "a"},\n{"prompt": "b"}] x', "text follows the end"),
        (JSON_LINES.decode().encode("utf-16")[:-1], "is not"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path, data, words):
    with pytest.raises(UserError, match=words):
        read(write(tmp_path, "a", data))


def test_an_array_keeps_its_good_records_when_one_is_bad(tmp_path):
    """B49."""
    data = b'[\n {"prompt": "a"},\n {"prompt": \'b\'},\n [1, 2],\n "text",\n null,\n\n {"prompt": "c, ]}"}\n]\n'
    records = read(write(tmp_path, "a.json", data))
    assert [record.text for record in good(records)] == ["a", "c, ]}"]
    assert codes(records) == {3: "invalid_json", 4: "not_object", 5: "not_object", 6: "not_object"}
    assert records[-1].key.line == 8
    assert data[records[-1].key.byte_offset :].startswith(b'{"prompt": "c')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.text('"\\[]{},é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(json_values, min_size=1, max_size=6), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 7))
def test_elements_of_any_array_are_cut_as_a_json_parser_cuts_them(values, indent, ascii_only, chunk_bytes):
    class Trickle(io.BytesIO):
        def read(self, size=-1):
            return super().read(chunk_bytes)

    document = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    data = document.encode("utf-8", errors="replace")
    if b"?" in data and "?" not in document:
        return  # half a surrogate pair has no bytes
    lines = list(split_array(Trickle(data), "a.json"))
    assert [json.loads(line.data) for line in lines] == json.loads(data)
    for line in lines:
        assert data[line.byte_offset :].startswith(line.data)
        assert data[: line.byte_offset].count(b"\n") == line.number - 1


def test_a_row_with_bytes_that_are_no_text_spoils_no_other(tmp_path):
    """B46."""
    records = read(write(tmp_path, "a.csv", b"id,prompt\n1,good\n2,b\xe9d\n3,good\n"))
    assert codes(records) == {3: "encoding"}
    assert "byte 0xe9" in records[1].message
    assert texts(read(tmp_path / "a.csv", encoding="latin-1")) == ["good", "béd", "good"]


def test_a_quote_that_is_never_closed_is_a_bad_row_that_names_its_line(tmp_path):
    records = read(write(tmp_path, "a.csv", b'id,prompt\n1,good\n2,"open\n3,swallowed\n'))
    assert codes(records) == {3: "invalid_json"}
    assert "never closed" in records[1].message


def test_numbers_of_sampling_options_are_read_from_the_text_of_a_table(tmp_path):
    data = b"prompt,temperature,max_tokens,seed\nx,0.5,7,\ny,hot,7,\n"
    first, second = read(write(tmp_path, "a.csv", data))
    assert first.options == {"temperature": 0.5, "max_new_tokens": 7}
    assert (second.code, "`temperature`" in second.message) == ("bad_option", True)


def test_a_field_longer_than_any_buffer_is_read(tmp_path):
    """B50."""
    long = "x" * (3 << 20)
    assert texts(read(write(tmp_path, "a.csv", f"prompt\n{long}\n".encode()))) == [long]
    assert texts(read(write(tmp_path, "a.jsonl", json.dumps({"prompt": long}).encode()))) == [long]
    assert texts(read(write(tmp_path, "a.json", json.dumps([{"prompt": long}, {"prompt": long}]).encode()))) == [long, long]


def test_a_long_first_line_with_an_array_inside_is_a_record(tmp_path):
    record = {"prompt": "x", "items": [{"a": 1}], "padding": "x" * (1 << 17)}
    assert texts(read(write(tmp_path, "a.jsonl", json.dumps(record).encode() + b"\n"))) == ["x"]


def test_several_files_are_read_in_order_and_a_glob_is_sorted(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path, f"{name}.jsonl", json.dumps({"prompt": name}).encode())
    last = write(tmp_path, "z.txt", b"z\n")
    records = read(*expand_inputs([str(last), str(tmp_path / "*.jsonl")]))
    assert [record.text for record in records] == ["z", "a", "b", "c"]
    assert [record.key.index for record in records] == [0, 1, 2, 3]
    assert [Path(record.key.file).name for record in records] == ["z.txt", "a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_file_whose_name_has_the_signs_of_a_glob_is_that_file(tmp_path):
    path = write(tmp_path, "a[1].jsonl", JSON_LINES)
    assert expand_inputs([str(path)]) == (str(path),)


@pytest.mark.parametrize(
    ("value", "words"),
    [("absent.jsonl", "does not exist"), ("absent-*.jsonl", "matches no file"), (".", "is a directory"), ("hf://", "names no data set")],
)
def test_an_input_that_is_not_there_is_one_sentence(value, words):
    with pytest.raises(UserError, match=words):
        expand_inputs([value])


class Standard:
    """Standard input as a pipe that gives few bytes at a time."""

    def __init__(self, data: bytes, is_terminal: bool = False) -> None:
        self.buffer = Standard.Pipe(data)
        self.isatty = lambda: is_terminal

    class Pipe(io.BytesIO):
        def read1(self, size=-1):
            return super().read1(min(size, 7) if size and size > 0 else 7)


@pytest.mark.parametrize(
    "data",
    [
        JSON_LINES,
        gzip.compress(JSON_LINES, mtime=0),
        zstd(JSON_LINES),
        json.dumps(RECORDS).encode(),
        b"id,prompt\n" + "".join(f"1,{text}\n" for text in TEXTS).encode(),
    ],
)
def test_standard_input_is_read_once_and_counted_as_it_comes(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", Standard(data))
    reader = InputReader(select(*expand_inputs(["-"])))
    assert not reader.scan.is_complete
    assert texts(list(reader.records())) == TEXTS
    assert (reader.scan.is_complete, reader.scan.num_good) == (True, 5)


def test_an_empty_standard_input_is_known_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Standard(b""))
    scan = InputReader(select("-")).scan
    assert (scan.is_complete, scan.num_records) == (True, 0)


def test_a_terminal_as_standard_input_gives_a_hint_and_no_hang(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Standard(b"", is_terminal=True))
    with pytest.raises(UserError, match="is a terminal"):
        expand_inputs(["-"])


@pytest.mark.parametrize("data", [b"PAR1rest", b"ARROW1rest"])
def test_a_table_that_needs_seeking_is_refused_from_a_pipe(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", Standard(data))
    with pytest.raises(UserError, match="has to be read from a file"):
        InputReader(select("-"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_read_once(tmp_path):
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(JSON_LINES,))
    writer.start()
    assert texts(read(*expand_inputs([str(pipe)]))) == TEXTS
    writer.join()


@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=2, max_size=2), max_size=6))
def test_any_table_that_python_writes_is_read_back(tmp_path_factory, rows):
    import csv

    path = tmp_path_factory.mktemp("table") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt", "id"])
        writer.writerows(rows)
    records = read(path, allow_blank=True)
    assert [record.text for record in good(records)] == [text for text, name in rows]


def test_all_messy_files_are_read_without_another_exception():
    for path in MESSY.iterdir():
        for name in ("auto", "csv", "tsv", "text", "parquet", "tokens", "openai-batch"):
            try:
                read(path, input_format=name)
            except UserError as error:
                assert "\n" not in error.message
