"""The process ends with its own code, whatever would go wrong while the interpreter is taken apart."""

import os
import subprocess
import sys

import pytest

from eaglecli.errors import ExitCode

START = """
import atexit, os, sys
from eaglecli.io.process_end import leave_process
class AbortsAtTheEnd:
    def __del__(self):
        os.abort()
kept = AbortsAtTheEnd()
"""


def leave(code: str, start: str = START, **streams) -> subprocess.CompletedProcess:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams = {"stdout": subprocess.PIPE, **streams}
    return subprocess.run([sys.executable, "-c", start + code], check=False, text=True, env=buffered, **streams)


def test_what_was_said_arrives_callbacks_run_and_nothing_is_taken_apart():
    done = leave("atexit.register(print, 'callback')\nprint('said')\nleave_process(3)")
    assert done.stdout == "said\ncallback\n"
    assert done.returncode == 3


def test_the_console_script_leaves_like_this():
    done = leave("from eaglecli.cli import main\nsys.argv = ['eaglecli', '--version']\nmain()")
    assert done.stdout.startswith("eaglecli")
    assert done.returncode == ExitCode.OK


@pytest.mark.parametrize(("code", "expected"), [(0, ExitCode.INTERNAL), (3, 3)])
def test_words_that_do_not_reach_a_full_disk_are_no_success(code, expected):
    with open("/dev/full", "w") as full:
        assert leave(f"print('said')\nleave_process({code})", stdout=full).returncode == expected


def test_a_reader_who_left_changes_no_code():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert leave("print('said')\nleave_process(0)", stdout=writing).returncode == 0
    finally:
        os.close(writing)


def test_a_stream_that_is_closed_or_was_never_there_changes_no_code():
    assert leave("sys.stdout.close()\nsys.stderr = None\nleave_process(0)").returncode == 0
