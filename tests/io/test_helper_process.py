"""A helper process: calls and what they raise, and that it never outlives who began it."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

import eaglecli.io.helper_process as helper_process
from eaglecli.errors import ExitCode, ModelError, UserError
from eaglecli.io.helper_process import HelperProcess


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)


class Counter:
    def __init__(self, start):
        self.value = start

    def add(self, number):
        self.value += number
        return self.value

    def fail(self, kind):
        raise {"user": ModelError("what", "hint"), "value": ValueError("odd"), "own": Unpicklable(1, 2)}[kind]


def refuse_to_be_made():
    raise UserError("not today", "tomorrow")


def is_there(process_id: int) -> bool:
    """A process that has ended and was not waited for yet counts as gone."""
    try:
        with open(f"/proc/{process_id}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(process_id: int) -> None:
    end = time.monotonic() + 20
    while is_there(process_id):
        assert time.monotonic() < end, "the helper is still there"
        time.sleep(0.01)


@pytest.fixture
def counter():
    helper = HelperProcess(Counter, 5)
    yield helper
    helper.close()


def test_calls_reach_one_object_in_another_process(counter):
    assert [counter.call("add", 1), counter.call("add", 2)] == [6, 8]
    assert is_there(counter.process_id)
    assert counter.process_id != os.getpid()


def test_what_a_call_raises_is_raised_here_and_the_helper_goes_on(counter):
    with pytest.raises(ModelError) as raised:
        counter.call("fail", "user")
    assert (raised.value.message, raised.value.hint, raised.value.exit_code) == ("what", "hint", ExitCode.MODEL)
    with pytest.raises(ValueError, match="odd") as raised:
        counter.call("fail", "value")
    assert "in fail" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Unpicklable"):
        counter.call("fail", "own")
    assert counter.call("add", 1) == 6


def test_a_failure_to_make_the_object_is_told_to_the_first_call():
    helper = HelperProcess(refuse_to_be_made)
    with pytest.raises(UserError, match="not today"):
        helper.call("anything")
    helper.close()


def test_a_helper_that_was_killed_is_one_sentence(counter):
    counter.call("add", 1)
    os.kill(counter.process_id, 9)
    wait_until_gone(counter.process_id)
    for _ in range(2):
        with pytest.raises(UserError, match="ended with code -9") as raised:
            counter.call("add", 1)
    assert raised.value.exit_code == ExitCode.INTERNAL


def test_a_helper_that_cannot_begin_says_why_and_one_that_is_not_given_is_a_sentence(monkeypatch):
    monkeypatch.setattr(helper_process, "_PROGRAM", "import sys; {path!r}, {descriptor}; sys.exit('no such thing')")
    helper = HelperProcess(Counter, 5)
    with pytest.raises(UserError, match="ended with code 1: no such thing"):
        helper.call("add", 1)
    helper.close()

    def refuse(*arguments, **named):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(helper_process.subprocess, "Popen", refuse)
    with pytest.raises(UserError, match="cannot be begun: Resource temporarily unavailable"):
        HelperProcess(Counter, 5)


def test_a_helper_lets_signals_pass_that_ask_for_an_end(counter):
    counter.call("add", 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(counter.process_id, number)
    assert counter.call("add", 1) == 7


def test_closing_ends_the_process_and_may_be_done_twice(counter):
    counter.call("add", 1)
    counter.close()
    assert not is_there(counter.process_id)
    counter.close()


def test_a_helper_ends_with_its_process_even_if_that_is_killed():
    program = (
        f"import sys, time; sys.path[:] = {sys.path!r}\n"
        "from eaglecli.io.helper_process import HelperProcess\n"
        "helper = HelperProcess(list)\nhelper.call('append', 1)\nprint(helper.process_id, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        helper_id = int(process.stdout.readline())
        assert is_there(helper_id)
        process.kill()
    wait_until_gone(helper_id)
