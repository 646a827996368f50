"""Taking a run up again: nothing that was finished is lost or done twice, and the text is that of a run that was never stopped."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from eaglecli.errors import ExitCode
from tests.fixtures import write_rand

NUM_RECORDS = 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_rand(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Greedy and sampled records in turn, with a seed of their own or one that follows from the run's; one bad; one id twice."""
    path = tmp_path_factory.mktemp("input") / "input.jsonl"
    kinds = ({}, {"temperature": 0.8}, {"temperature": 1.0, "seed": 7})
    records = [{"id": number, "prompt": f"question {number}", **kinds[number % 3]} for number in range(NUM_RECORDS)]
    records[5]["id"] = 4
    records[9]["prompt"] = ""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def command(pair, source):
    """The arguments of a run into a directory."""

    def make(output: Path, *more: str, source: Path = source) -> list[str]:
        models = ["--target", str(pair.target_dir), "--draft", str(pair.draft_dir), "--device", "cpu"]
        sizes = ["--context-length", "256", "--max-new-tokens", "16", "--max-running-requests", "6"]
        return ["generate", "-i", str(source), "-o", str(output), *models, *sizes, *more]

    return make


@pytest.fixture(scope="module")
def whole(server, command, tmp_path_factory):
    """The uninterrupted run: its folder, and how long it took."""
    folder = tmp_path_factory.mktemp("whole")
    started = time.perf_counter()
    code, child = server.run(command(folder / "run"), folder)
    assert code == ExitCode.PARTIAL, child.stderr
    return folder / "run", time.perf_counter() - started


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def texts(folder: Path) -> set[tuple]:
    return {(line["index"], line["sample"], line["id"], line["text"]) for line in lines(folder / "generations.jsonl")}


def whole_lines(path: Path) -> set[bytes]:
    return set(path.read_bytes().split(b"\n")[:-1]) if path.exists() else set()


def kill_and_resume(server, command, whole, tmp_path, num_kills: int, seed: int) -> int:
    """Kills a run `num_kills` times at random moments and takes it up each time. Returns how often it was really cut short."""
    moments, output = random.Random(seed), tmp_path / "run"
    reference, seconds = whole
    num_cut, finished = 0, set()
    for _ in range(num_kills):
        child = server.start(command(output), tmp_path / "streams")
        time.sleep(moments.uniform(0, seconds / 3))
        child.send(signal.SIGKILL)
        num_cut += child.wait() == -signal.SIGKILL
        there = whole_lines(output / "generations.jsonl")
        assert finished <= there, "a finished line was lost or written anew"
        finished = there
    code, child = server.run(command(output), tmp_path / "streams")
    assert code == ExitCode.PARTIAL, child.stderr
    assert finished <= whole_lines(output / "generations.jsonl")
    assert texts(output) == texts(reference)
    assert [line["index"] for line in lines(output / "generations.jsonl")] == [n for n in range(NUM_RECORDS) if n != 9]
    assert [line["index"] for line in lines(output / "errors.jsonl")] == [9]
    return num_cut


def test_killed_three_times_the_texts_are_those_of_the_uninterrupted_run(server, command, whole, tmp_path):
    """B69, B34, issue 5: greedy and seeded alike."""
    assert kill_and_resume(server, command, whole, tmp_path, 3, seed=1) >= 1


@pytest.mark.slow
def test_killed_twenty_times_the_texts_are_those_of_the_uninterrupted_run(server, command, whole, tmp_path):
    for seed in (2, 3):
        assert kill_and_resume(server, command, whole, tmp_path / str(seed), 20, seed) >= 10
