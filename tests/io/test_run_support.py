"""The run directory, prefetching and the console."""

import gc
import io
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from eaglecli.errors import ExitCode, UserError
from eaglecli.io.console import Console, visible
from eaglecli.io.eta import Workload
from eaglecli.io.garbage_pauses import seldom_garbage_pauses
from eaglecli.io.prefetch import Prefetch
from eaglecli.io.progress import Progress
from eaglecli.io.run_directory import RunDirectory, check_output, default_run_directory
from eaglecli.io.thread_switching import quick_thread_switches


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text("{}\n")
    return path


@pytest.mark.parametrize("name", ["out.jsonl", "out.json", "out.parquet"])
def test_a_file_name_as_output_is_refused(tmp_path, source, name):
    with pytest.raises(UserError, match="writes a directory"):
        check_output(tmp_path / name, source, False)


def test_a_directory_that_holds_something_needs_overwrite(tmp_path, source):
    output = tmp_path / "run"
    output.mkdir()
    check_output(output, source, False)
    (output / "generations.jsonl").write_text("x")
    with pytest.raises(UserError, match="not empty") as raised:
        check_output(output, source, False)
    assert "--overwrite" in raised.value.hint
    check_output(output, source, True)


@pytest.mark.parametrize("name", ["manifest.json", "bench.json", "results.jsonl"])
def test_an_earlier_run_is_gone_on_with_only_by_who_can(tmp_path, source, name):
    output = tmp_path / "run"
    output.mkdir()
    (output / name).write_text("{}")
    for takes_up in (False,) if name == "manifest.json" else (False, True):
        with pytest.raises(UserError, match="holds an earlier run") as raised:
            check_output(output, source, False, takes_up=takes_up)
        assert raised.value.exit_code == ExitCode.USAGE
    check_output(output, source, True, takes_up=False)
    if name == "manifest.json":
        check_output(output, source, False)


def test_an_output_that_is_or_holds_the_input_is_refused(tmp_path, source):
    with pytest.raises(UserError):
        check_output(source, source, True)
    inside = tmp_path / "run" / "generations.jsonl"
    inside.parent.mkdir()
    inside.write_text("{}\n")
    with pytest.raises(UserError, match="overwrite the input"):
        check_output(inside.parent, inside, True)


def test_overwriting_removes_our_files_and_no_others(tmp_path):
    (tmp_path / "generations.jsonl").write_text("old")
    (tmp_path / "notes.md").write_text("mine")
    with RunDirectory(tmp_path) as folder:
        assert (tmp_path / "generations.jsonl").exists(), "opening alone removes nothing"
        folder.clear()
    assert not (tmp_path / "generations.jsonl").exists()
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_one_run_at_a_time_holds_a_directory(tmp_path):
    with RunDirectory(tmp_path), pytest.raises(UserError, match="another run"):
        RunDirectory(tmp_path)
    with RunDirectory(tmp_path):
        pass


def test_json_files_are_replaced_as_a_whole(tmp_path):
    with RunDirectory(tmp_path) as folder:
        folder.write_json("stats.json", {"a": "é"})
        with pytest.raises(ValueError):
            folder.write_json("stats.json", {"a": float("nan")})
    assert json.loads((tmp_path / "stats.json").read_text()) == {"a": "é"}


def test_the_default_directory_is_named_by_target_and_input(tmp_path):
    assert str(default_run_directory("org/My-Model", tmp_path / "mt bench.jsonl.gz")) == "runs/My-Model-mt_bench"
    assert str(default_run_directory("org/My-Model", Path("-"))) == "runs/My-Model-stdin"


def test_prefetch_reads_ahead_no_further_than_its_window():
    taken = []

    def source():
        for number in range(100):
            taken.append(number)
            yield [number]

    prefetch = Prefetch(source(), window=5)
    items = iter(prefetch)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.05)
    assert len(taken) <= 3 + 5 + 1
    prefetch.close()
    assert "eaglecli-reader" not in [thread.name for thread in threading.enumerate()]


def test_prefetch_hands_over_all_items_and_then_the_exception():
    def source():
        yield [0, 1]
        raise UserError("broken")

    items = iter(Prefetch(source(), window=5))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(UserError, match="broken"):
        next(items)


def test_plain_lines_say_how_long_it_will_take_by_tokens():
    stream = io.StringIO()
    progress = Progress(Console(stream=stream), "plain", total=9, interval_s=0.01, look=lambda: Workload(10, 10, 0, 1000, 1e9, 0.0, 1e6))
    while "left" not in stream.getvalue():
        time.sleep(0.01)
    progress.close()
    assert re.search(r"0/9 records, [\d.]+ token/s, \d+:\d\d(:\d\d)? left", stream.getvalue())


def test_a_bar_shows_rates_and_steps_aside_for_a_line():
    stream = io.StringIO()
    console = Console(stream=stream)
    progress = Progress(console, "bar", total=2)
    progress.record_done(10, 2.5)
    console.warning("mind this")
    progress.record_done(10, 2.5)
    progress.close()
    console.note("after")
    assert "accept length 2.50" in stream.getvalue()
    assert "token/s" in stream.getvalue()
    assert "\nwarning: mind this\n" in stream.getvalue().replace("\r", "\n")
    assert stream.getvalue().endswith("after\n")


@pytest.mark.parametrize(("mode", "quiet"), [("auto", False), ("none", False), ("bar", True)])
def test_without_a_terminal_or_when_quiet_no_bar_moves(mode, quiet):
    stream = io.StringIO()
    progress = Progress(Console(stream=stream, quiet=quiet), mode, total=1)
    progress.record_done(10, None)
    progress.close()
    assert stream.getvalue() == ""


def test_plain_lines_come_every_few_seconds_although_nothing_finishes():
    stream = io.StringIO()
    progress = Progress(Console(stream=stream), "plain", total=9, already_done=4, interval_s=0.01)
    progress.record_done(10, 2.5)
    deadline = time.monotonic() + 10
    while stream.getvalue().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.close()
    first, second, *_ = stream.getvalue().splitlines()
    assert first.startswith("5/9 records, ")
    assert second.startswith("5/9 records, ")
    assert "accept length 2.50" in second


class Gone(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_message_that_nobody_can_read_ends_nothing():
    log = io.StringIO()
    console = Console(stream=Gone())
    console.attach_log(log)
    console.warning("one")
    console.attach_log(Gone())
    console.warning("two")
    console.attach_log(log)
    console.note("three")
    assert log.getvalue() == "warning: one\nthree\n"


def test_details_are_shown_with_verbose_alone_and_are_always_in_the_log():
    for verbose, quiet, shown in ((False, False, ""), (True, False, "detail\n"), (True, True, "")):
        stream, log = io.StringIO(), io.StringIO()
        console = Console(stream=stream, verbose=verbose, quiet=quiet)
        console.attach_log(log)
        console.detail("detail")
        assert (stream.getvalue(), log.getvalue()) == (shown, "detail\n")


def test_nothing_from_the_data_steers_the_terminal():
    assert visible("a\x1b[31mb\u202ec\x00é🙂") == "a\\x1b[31mb\\u202ec\\x00é🙂"


def test_lines_said_before_the_log_is_there_come_into_it():
    stream, log = io.StringIO(), io.StringIO()
    console = Console(stream=stream, quiet=True)
    console.note("first")
    console.attach_log(log)
    console.warning("second")
    assert log.getvalue() == "first\nwarning: second\n"
    assert stream.getvalue() == "warning: second\n"


def test_the_traceback_goes_to_the_screen_only_with_debug():
    for debug in (False, True):
        stream, log = io.StringIO(), io.StringIO()
        console = Console(stream=stream, debug=debug)
        console.attach_log(log)
        console.trace(ValueError("inside"))
        assert ("ValueError: inside" in stream.getvalue()) is debug
        assert "ValueError: inside" in log.getvalue()


def test_threads_make_way_soon_while_generating_and_as_before_afterwards():
    before = sys.getswitchinterval()
    with pytest.raises(ValueError), quick_thread_switches():
        assert sys.getswitchinterval() < before / 10
        raise ValueError
    assert sys.getswitchinterval() == before


def test_objects_that_were_there_are_left_out_of_the_search_for_garbage_until_the_end():
    before = gc.get_threshold()
    with pytest.raises(KeyError), seldom_garbage_pauses():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > before[0]
        raise KeyError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
