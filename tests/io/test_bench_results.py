"""Comparing two results, and the tables."""

import json

import pytest

from eaglecli.errors import UserError
from eaglecli.io.bench_results import compare_benches, read_bench
from eaglecli.io.bench_table import comparison_table


def bench(rates: dict[str, list[float]], **conditions: object) -> dict:
    items = [
        {"label": label, "output_throughput": sorted(values)[len(values) // 2], "repeats": [{"output_throughput": v} for v in values]}
        for label, values in rates.items()
    ]
    return {"configurations": items, "conditions": conditions}


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ([100.0, 101.0, 99.0], "same"),
        ([103.0, 104.0, 102.5], "faster"),
        ([97.0, 96.5, 97.5], "slower"),
        ([97.0, 90.0, 106.0], "same"),  # slower, but the repeats do not agree
        ([97.0], "slower"),
        ([98.5], "same"),
    ],
)
def test_a_difference_counts_when_it_is_large_and_sure(now, verdict):
    found = compare_benches(bench({"batch 1": [100.0, 99.5, 100.5]}), bench({"batch 1": now}))
    assert found.differences[0].verdict == verdict
    assert found.is_good == (verdict != "slower")


def test_what_only_one_of_them_has_is_named():
    found = compare_benches(bench({"a": [1.0], "b": [1.0]}, dtype="x"), bench({"a": [1.0], "c": [1.0]}, dtype="y"))
    assert (found.only_old, found.only_new) == (("b",), ("c",))
    assert found.changed_conditions == ("dtype: x then, y now",)
    assert max(map(len, comparison_table(found))) <= 80


def test_two_results_with_nothing_in_common_are_refused():
    with pytest.raises(UserError, match="in common"):
        compare_benches(bench({"a": [1.0]}), bench({"b": [1.0]}))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"configurations": [1]}', '{"configurations": [{"label": "x"}]}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    for path in (tmp_path, tmp_path / "bench.json"):
        with pytest.raises(UserError, match="--compare"):
            read_bench(path)


def test_a_result_is_read_from_its_directory(tmp_path):
    document = bench({"a": [1.0]})
    (tmp_path / "bench.json").write_text(json.dumps(document))
    assert read_bench(tmp_path) == document
