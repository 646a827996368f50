"""Memory of the front end: it does not grow with the number of records."""

import json
import subprocess
import sys

import pytest

GROWTH_LIMIT_BYTES = 200 << 20

MEASURE = """
import json, resource, sys
from eaglecli.io.prompts import InputSelection
from eaglecli.io.scan import InputReader
reader = InputReader(InputSelection((sys.argv[1],)))
count = sum(1 for _ in reader.records())
print(json.dumps([reader.scan.num_good, count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def write_records(path, num_records: int, as_array: bool) -> None:
    with path.open("w") as stream:
        stream.write("[" if as_array else "")
        for number in range(num_records):
            stream.write("," if as_array and number else "")
            stream.write(json.dumps({"id": f"record of mine {number}", "prompt": f"Prompt number {number}", "n2": None}) + "\n")
        stream.write("]" if as_array else "")


def peak_bytes(path, num_records: int, as_array: bool) -> int:
    write_records(path, num_records, as_array)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    num_good, count, peak = json.loads(done.stdout)
    assert num_good == count == num_records
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("as_array", [False, True])
def test_a_million_records_take_hardly_more_memory_than_a_thousand(tmp_path, as_array):
    few = peak_bytes(tmp_path / "few", 1_000, as_array)
    many = peak_bytes(tmp_path / "many", 1_000_000, as_array)
    assert many - few < GROWTH_LIMIT_BYTES, f"{(many - few) >> 20} MiB"
