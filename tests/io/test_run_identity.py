"""What makes a run the same run: input, models, settings."""

import pytest

from eaglecli.config import resolve_settings
from eaglecli.io.fingerprint import CHUNK_BYTES, fingerprint_input, fingerprint_model
from eaglecli.io.run_identity import RunIdentity, compare_runs, identity_from_json, look_at_input, settings_that_change_text


def settings(**given):
    return resolve_settings(given, None, lambda device: device.replace("auto", "cpu"))


def values(**given) -> dict:
    return settings_that_change_text(settings(**given), "5/1/6")


@pytest.mark.parametrize("num_bytes", [1, 100, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("added", ["line\n", "x" * (2 * CHUNK_BYTES) + "\n"])
def test_a_file_that_grew_by_lines_is_seen_as_such_at_every_size(tmp_path, num_bytes, added):
    path = tmp_path / "a.jsonl"
    text = "a" * (num_bytes - 1) + "\n"
    path.write_text(text)
    before, _ = fingerprint_input(path)
    assert fingerprint_input(path, before) == (before, True)
    path.write_text(text + added)
    assert fingerprint_input(path, before)[1] is True
    path.write_text("b" + text[1:] + added)
    assert fingerprint_input(path, before)[1] is (num_bytes == 1 and text == "b")


@pytest.mark.parametrize(
    ("before", "after", "continues"),
    [
        ("a", "a\nb", True),
        ("a", "ab", False),
        ("a\n", "a\nb", True),
        ("", "a\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n", "", False),
    ],
)
def test_growth_begins_at_a_line_end(tmp_path, before, after, continues):
    path = tmp_path / "a.jsonl"
    path.write_text(before)
    earlier, _ = fingerprint_input(path)
    path.write_text(after)
    assert fingerprint_input(path, earlier)[1] is continues


def test_of_several_files_only_the_last_may_grow_and_more_may_follow(tmp_path):
    names = [str(tmp_path / name) for name in ("a", "b", "c")]
    for name in names:
        with open(name, "w") as stream:
            stream.write(f"{name}\n")
    earlier, _ = look_at_input(names[:2])
    assert look_at_input(names[:2], earlier)[1]
    assert look_at_input(names, earlier)[1]
    assert not look_at_input(names[:1], earlier)[1]
    assert not look_at_input(names[::-1], earlier)[1]
    with open(names[1], "a") as stream:
        stream.write("more\n")
    assert look_at_input(names[:2], earlier)[1]
    with open(names[0], "a") as stream:
        stream.write("more\n")
    assert not look_at_input(names[:2], earlier)[1]


def test_a_file_may_have_moved(tmp_path):
    (tmp_path / "a").write_text("x\n")
    earlier, _ = look_at_input([str(tmp_path / "a")])
    (tmp_path / "a").rename(tmp_path / "b")
    assert look_at_input([str(tmp_path / "b")], earlier)[1]


def test_what_was_added_to_a_compressed_file_is_a_change(tmp_path):
    import gzip

    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a\n"))
    earlier, _ = fingerprint_input(path)
    assert fingerprint_input(path, earlier)[1]
    path.write_bytes(path.read_bytes() + gzip.compress(b"\n"))
    assert not fingerprint_input(path, earlier)[1]


def test_a_change_anywhere_in_a_small_file_and_in_any_size_changes_the_fingerprint_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000_000))
    (tmp_path / "README.md").write_text("a")
    first = fingerprint_model(tmp_path)
    (tmp_path / "README.md").write_text("b")
    assert fingerprint_model(tmp_path) == first
    (tmp_path / "config.json").write_text("[]")
    second = fingerprint_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000_001))
    third = fingerprint_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000_000) + b"x")
    assert len({first, second, third, fingerprint_model(tmp_path)}) == 4


def test_settings_count_by_value_and_not_by_who_gave_them():
    assert values(temperature=0.0) == values()
    assert values(dtype="float32") == values(dtype="auto")
    assert values(max_running_requests=3, progress="none", page_size=4) == values()
    assert values(top_p=0.5) != values()


def test_a_cap_that_was_given_is_another_than_the_same_by_default():
    """The default shrinks to the room left, a given one makes the record bad."""
    assert values(max_new_tokens=512) != values()


def test_an_identity_survives_the_manifest():
    import json

    identity = RunIdentity((), values(stop_token_ids=(1, 2)), {"target": "x", "draft": None})
    back = identity_from_json(json.loads(json.dumps(identity.to_json())))
    assert compare_runs(back, identity, input_continues=True) == []


def test_differences_are_named():
    before = RunIdentity((), {"temperature": 0.0, "limit": 5}, {"target": "x"})
    now = RunIdentity((), {"temperature": 1.0, "limit": 3, "min_p": 0.1}, {"target": "y"})
    found = compare_runs(before, now, input_continues=False)
    assert [part.split(":")[0] for part in found] == ["input", "temperature", "limit", "min_p", "target"]
    raised = RunIdentity((), {"temperature": 0.0, "limit": None}, {})
    assert compare_runs(before, raised, input_continues=True) == []
