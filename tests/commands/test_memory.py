"""Memory of the whole command: what it holds does not grow with the input."""

from pathlib import Path

import pytest

from benchmarks.million_records import run_command
from tests.fixtures import write_cycle

FEW, MANY = 500, 15_000
GROWTH_LIMIT_MB = 60  # a kept prompt, request or answer is kilobytes a record, and more than this


@pytest.mark.slow
def test_fifteen_thousand_records_take_hardly_more_memory_than_five_hundred(tmp_path: Path) -> None:
    target = write_cycle(tmp_path / "models").target_dir
    few, many = (run_command(tmp_path, target, count, "cpu") for count in (FEW, MANY))
    assert many.peak_mb - few.peak_mb < GROWTH_LIMIT_MB
    assert many.stats["engine"]["mean_running_requests"] > 10
