"""Data sets by the `datasets` library: folders that `save_to_disk` wrote, and names on the hub, streamed.

Without a network (HF_HUB_OFFLINE=1) a hub name is looked for in the hub's local cache, then in that of `datasets`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglecli.errors import UserError
from eaglecli.io.arrow_rows import rows_of_batches
from eaglecli.io.rows import Row, excerpt_of

HUB_PREFIX = "hf://"
BATCH_ROWS = 256


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_saved_dataset(folder: Path, digest: Any = None) -> Iterator[Row]:
    """Rows of a saved data set. Raises UserError for one with several splits, or a broken one."""
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except Exception as error:  # a dozen kinds; each means the same to the user
        raise UserError(f"{folder} cannot be read as a saved data set: {_short(error)}", "save it anew with save_to_disk") from error
    if isinstance(saved, DatasetDict):
        if len(saved) != 1:
            raise UserError(f"{folder} holds the splits {', '.join(saved)}", f"name one: -i {folder / next(iter(saved), 'train')}")
        (saved,) = saved.values()
    if digest is not None:
        digest.update(saved._fingerprint.encode())
    tables = (table for start in range(0, len(saved), BATCH_ROWS) for table in [saved.with_format("arrow")[start : start + BATCH_ROWS]])
    return rows_of_batches(tables, str(folder))


def read_hub_dataset(name: str, digest: Any = None) -> Iterator[Row]:
    """Rows of `hf://name[:split]`, streamed. Raises UserError when it is not there."""
    repository, _, split = name.removeprefix(HUB_PREFIX).partition(":")
    data = _open_hub(name, repository, split)
    for number, fields in enumerate(data, start=1):
        row = Row(name, number, None, excerpt_of(fields), fields)
        if digest is not None:
            digest.update(row.raw.encode())
        yield row


def _open_hub(name: str, repository: str, split: str) -> Any:
    from datasets import disable_progress_bars, get_dataset_split_names, load_dataset

    disable_progress_bars()
    owner_and_name, config = _split_name(repository)
    place = _cached_copy(owner_and_name) or owner_and_name
    try:
        splits = [split] if split else get_dataset_split_names(place, config)
        if len(splits) == 1:
            return load_dataset(place, config, split=splits[0], streaming=True)
    except Exception as error:  # network, missing, gated, unknown split or config: the library's sentence says which
        raise UserError(
            f"{name} cannot be read: {_short(error)}", "check the name; without a network it must be in the local cache"
        ) from error
    raise UserError(f"{name} has the splits {', '.join(splits)}", f"name one: -i {name}:{splits[0]}")


def _split_name(repository: str) -> tuple[str, str | None]:
    """owner/name/config, owner/name or name."""
    parts = repository.split("/")
    return "/".join(parts[:2]), parts[2] if len(parts) > 2 else None


def _cached_copy(repository: str) -> str | None:
    """The folder of the hub's cache that holds it, when there must be no network."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not constants.HF_HUB_OFFLINE:
        return None
    try:
        return snapshot_download(repository, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):
        return None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
