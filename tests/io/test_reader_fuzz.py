"""The reader against a naive oracle: any bytes in, the same good records and the same bad lines out."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.io.reading import Record, good, read

texts = st.text(max_size=6) | st.sampled_from(["", " ", "\u200b", "\u2028", "a\r\nb", "\ud83d", "<|im_end|>", "{x}"])
prompts = texts | st.none() | st.integers(-3, 3) | st.lists(st.integers(0, 9), max_size=3)
ids = st.none() | st.integers() | texts | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
objects = st.fixed_dictionaries({}, optional={"prompt": prompts, "id": ids, "extra": st.lists(texts, max_size=2)})
json_lines = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"), objects, st.booleans()
)
other_lines = st.sampled_from([b"", b"  ", b"\t", "\u00a0".encode(), b"\r", b"null", b"[1]", b'"text"', b"{", b'{"prompt": "cut', b"\xff"])
files = st.builds(
    lambda lines, end, mark, crlf: mark + (b"\r\n" if crlf else b"\n").join(lines) + end,
    st.lists(json_lines | other_lines | st.binary(max_size=6), max_size=12),
    st.sampled_from([b"", b"\n", b"\n\n", b"\r\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.booleans(),
)


def naive_records(data: bytes) -> list[tuple[int, str | None, str | None]]:
    """(line, prompt or None, id as JSON or None) of every record, the simple way: whole file, one thing after the other."""
    found = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.decode("utf-8", "replace").strip():
            continue
        try:
            value = json.loads(line.decode("utf-8").rstrip("\r"))
        except (ValueError, RecursionError):
            found.append((number, None, None))
            continue
        prompt = value.get("prompt") if isinstance(value, dict) else None
        own_id = value.get("id") if isinstance(value, dict) else None
        is_good = isinstance(prompt, str) and is_unicode(prompt) and is_unicode(json.dumps(own_id, ensure_ascii=False)) and is_seen(prompt)
        id_json = None if own_id in (None, "") else json.dumps(own_id, ensure_ascii=False)
        found.append((number, prompt if is_good else None, id_json if is_good else None))
    return found


def is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_seen(text: str) -> bool:
    return any(not character.isspace() and character not in "\u200b\u200c\u200d\u2060\ufeff" for character in text)


def seen_records(records: list[Record]) -> list[tuple[int, str | None, str | None]]:
    kept = {record.key.index: record for record in good(records)}
    return [
        (record.key.line, kept[record.key.index].text, record.key.id_json if record.key.has_own_id else None)
        if record.key.index in kept
        else (record.key.line, None, None)
        for record in records
    ]


def check(folder: Path, data: bytes) -> None:
    path = folder / "input.jsonl"
    path.write_bytes(b'{"prompt": "first"}\n' + data)  # so that the file is JSON lines, whatever follows
    records = read(path)
    assert seen_records(records) == naive_records(path.read_bytes())
    assert [record.key.index for record in records] == list(range(len(records)))


@given(files)
def test_any_file_gives_the_records_that_a_naive_reader_sees(tmp_path_factory, data):
    """B46, B47, B49, B50, B58, B61."""
    check(tmp_path_factory.mktemp("fuzz"), data)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(files)
def test_a_great_many_files_give_the_records_that_a_naive_reader_sees(tmp_path_factory, data):
    check(tmp_path_factory.mktemp("fuzz"), data)
