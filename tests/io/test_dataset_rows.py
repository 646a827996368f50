"""Data sets by the `datasets` library: folders of save_to_disk, and hub names from a local cache without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eaglecli.errors import UserError
from eaglecli.io.input_sources import expand_inputs
from tests.io.reading import codes, read

ROWS = [{"id": number, "messages": [{"role": "user", "content": f"question {number}"}], "empty": None} for number in range(600)]


def dataset(rows):
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    return Dataset.from_list(rows)


def test_a_saved_data_set_is_read_with_its_types(tmp_path):
    folder = tmp_path / "saved"
    dataset(ROWS).save_to_disk(folder)
    records = read(*expand_inputs([str(folder)]))
    assert not codes(records)
    assert [record.key.id_json for record in records] == [str(number) for number in range(600)]
    assert [record.messages[0]["content"] for record in records] == [f"question {number}" for number in range(600)]


def test_of_several_splits_one_has_to_be_named(tmp_path):
    from datasets import DatasetDict

    folder = tmp_path / "saved"
    DatasetDict(train=dataset(ROWS[:3]), test=dataset(ROWS[3:4])).save_to_disk(folder)
    with pytest.raises(UserError, match="the splits train, test"):
        read(folder)
    assert len(read(*expand_inputs([str(folder / "test")]))) == 1


READ_HUB = """
import json, sys
from eaglecli.errors import UserError
from eaglecli.io.process_end import leave_process
from eaglecli.io.scan import InputReader
from eaglecli.io.prompts import InputSelection
for name in sys.argv[1:]:
    try:
        reader = InputReader(InputSelection((name,)))
        print(json.dumps([reader.scan.is_complete, [record.text for record in reader.records()]]))
    except UserError as error:
        print(json.dumps(error.message))
leave_process(0)  # as the program does: threads of pyarrow may still be alive
"""


def hub_cache(folder: Path, name: str, **splits: list[dict]) -> Path:
    """The layout of the hub's cache, with one Parquet file a split."""
    revision = "a" * 40
    root = folder / "hub" / f"datasets--{name.replace('/', '--')}"
    data = root / "snapshots" / revision / "data"
    data.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(revision)
    for split, rows in splits.items():
        dataset(rows).to_parquet(data / f"{split}-00000-of-00001.parquet")
    return folder


def test_hub_names_are_streamed_from_the_local_cache_without_a_network(tmp_path):
    rows = [{"prompt": f"p{number}"} for number in range(3)]
    home = hub_cache(tmp_path, "someone/mini", train=rows)
    hub_cache(tmp_path, "someone/split", train=rows, test=rows[:1])
    names = ["someone/mini", "someone/mini:train", "someone/mini:absent", "someone/split", "someone/split:test", "someone/nothing"]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READ_HUB, *(f"hf://{name}" for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    whole, named, wrong, several, test, nothing = map(json.loads, done.stdout.splitlines())
    assert whole == named == [False, ["p0", "p1", "p2"]]
    assert test == [False, ["p0"]]
    assert "absent" in wrong
    assert several.endswith("has the splits train, test") or several.endswith("has the splits test, train")
    assert nothing.startswith("hf://someone/nothing cannot be read")
