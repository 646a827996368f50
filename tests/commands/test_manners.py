"""How the program behaves as a citizen of a terminal: help, version, streams, colours, logs, completion, suggestions."""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios

import pytest
from typer.testing import CliRunner

from eaglecli import __version__
from eaglecli.cli import app
from eaglecli.config import SETTINGS
from eaglecli.errors import ExitCode
from tests.commands.program import Program, write_records
from tests.fixtures import write_cycle

PANELS = ["Input", "Output", "Models", "Sampling", "Speculation", "Engine", "CUDA graphs", "Run control", "Debug"]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture
def program(pair, tmp_path):
    return Program(pair, write_records(tmp_path / "input.jsonl", [{"prompt": "a"}, {"prompt": ""}]), tmp_path / "run")


def invoke(*arguments: str, **environment: str):
    return CliRunner().invoke(app, list(arguments), env=environment)


def generate_help(columns: int) -> str:
    done = invoke("generate", "--help", COLUMNS=str(columns))
    assert done.exit_code == 0
    return ESCAPE.sub("", done.stdout)


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_the_help_page_names_every_option_in_full_within_its_width(columns):
    page = generate_help(columns)
    assert max(map(len, page.splitlines())) <= columns
    for name in SETTINGS:
        assert f"--{name.replace('_', '-')}" in page, name
    for flag in (
        "--dry-run",
        "--print-config",
        "--json",
        "--quiet",
        "--verbose",
        "--no-color",
        "--log-file",
        "--config",
        "--debug",
        "--help",
    ):
        assert flag in page


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_purpose_and_examples_come_first_panels_in_order_exit_codes_last(columns):
    page = " ".join(generate_help(columns).split())
    places = [page.index(text) for text in ("Usage", "Generate the target's text", "eaglecli generate -i prompts.jsonl")]
    headings = [re.search(rf"(─ {panel} ─)|({panel}: --?)|({panel}: -)", page) for panel in PANELS]
    assert all(headings), [panel for panel, found in zip(PANELS, headings, strict=True) if not found]
    places += [found.start() for found in headings if found]
    assert places[:3] == sorted(places[:3])
    assert places[2] < min(places[3:])
    assert page.rindex("interrupted") > max(places)
    assert "Default: 512" in page


@pytest.mark.parametrize("columns", [40, 80])
def test_the_first_page_lists_the_commands(columns):
    page = ESCAPE.sub("", invoke("--help", COLUMNS=str(columns)).stdout)
    assert max(map(len, page.splitlines())) <= columns
    assert "generate" in page
    assert "--install-completion" in page
    assert "--version" in page


@pytest.mark.parametrize("arguments", [[], ["--verbose"]])
def test_without_a_command_the_first_page_is_shown_and_the_code_says_usage(arguments):
    done = invoke(*arguments)
    assert done.exit_code == ExitCode.USAGE
    assert "generate" in done.output


def test_the_version_is_one_line_and_verbose_what_a_bug_report_needs():
    assert invoke("--version").stdout == f"eaglecli {__version__}\n"
    for arguments in (("--version", "--verbose"), ("--verbose", "--version")):
        first, *rest = invoke(*arguments).stdout.splitlines()
        found = dict(line.split(": ", 1) for line in rest)
        assert first == f"eaglecli {__version__}"
        assert {"python", "torch", "triton", "transformers", "cuda", "driver", "gpu", "commit"} <= set(found)
        assert all(found.values())


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["generate", "--temprature", "0"], "--temperature"),
        (["generate", "--overwite"], "--overwrite"),
        (["generat"], "generate"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(arguments, suggestion):
    done = invoke(*arguments)
    assert done.exit_code == ExitCode.USAGE
    assert suggestion in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_of_a_config_file_is_answered_with_the_nearest(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_error_rat: 0.5\n")
    done = invoke("generate", "--config", str(path), "-i", "x")
    assert (done.exit_code, "max_error_rate" in done.stderr) == (ExitCode.USAGE, True)


def test_standard_output_holds_one_json_object_and_nothing_else(program):
    done = program.run("--json")
    assert json.loads(done.stdout)["schema_version"] == 1
    assert done.stdout.count("\n") == 1
    assert program.run("--json", "-q", "--overwrite").stderr.startswith("warning: ")


def test_verbose_names_each_failed_record_and_quiet_says_less_than_nothing_special(program):
    plain, verbose = program.run(), program.run("-v", "--overwrite")
    assert "empty prompt" not in plain.stderr
    assert "line 2: empty prompt" in verbose.stderr
    quiet = program.run("-q", "--overwrite")
    assert (quiet.stdout, [line.split(":")[0] for line in quiet.stderr.splitlines()]) == ("", ["warning"])


def test_the_log_file_gets_every_message_also_of_a_command_that_is_refused(program, tmp_path):
    log = tmp_path / "all.log"
    program.run("-q", "--log-file", str(log))
    assert "1 done, 1 failed" in log.read_text()
    assert "line 2: empty prompt" in log.read_text(), "the log holds the details that the screen does not show"
    program.run("-q", "--log-file", str(log), "--temperature", "1")
    assert "temperature: 0.0 -> 1.0" in log.read_text()
    assert log.read_text().index("1 done") < log.read_text().index("temperature: 0.0")
    refused = program.run("--log-file", str(tmp_path))
    assert (refused.exit_code, refused.stderr.count("error: ")) == (ExitCode.USAGE, 1)


@pytest.mark.parametrize(
    ("variables", "arguments", "colored"),
    [
        ({}, [], False),
        ({"FORCE_COLOR": "1"}, [], True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, [], False),
        ({"FORCE_COLOR": "1"}, ["--no-color"], False),
        ({"NO_COLOR": ""}, [], False),
    ],
)
def test_colours_follow_the_variables_and_the_flag_goes_first(monkeypatch, variables, arguments, colored):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    done = invoke("generate", "--target", "x", "-i", "/no/such/file", *arguments, **variables)
    assert ("\x1b[" in done.stderr) is colored


def test_without_a_terminal_no_bar_moves(program):
    done = program.run()
    assert "\r" not in done.stderr
    assert "\x1b[" not in done.stderr


def test_a_bar_moves_on_a_terminal_unless_it_is_dumb(program):
    for terminal, moves in (("xterm", True), ("dumb", False)):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        pid = os.fork()
        if pid == 0:
            _run_on_terminal(follower, terminal, program.arguments("--overwrite"))
        os.close(follower)
        said = _read_all(leader)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ExitCode.PARTIAL, said
        assert ("records [" in said) is moves
        assert ("\x1b[33;1mwarning" in said) is moves


def _run_on_terminal(follower: int, terminal: str, arguments: list[str]) -> None:
    os.dup2(follower, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.environ["TERM"] = terminal
    try:
        app(arguments)
    except SystemExit as leaving:
        os._exit(int(leaving.code or 0))


def _read_all(leader: int) -> str:
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:  # the other side is closed
        pass
    os.close(leader)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("eaglecli generate --dry", 2, "--dry-run"),
        ("eaglecli generate --output-format ", 3, "openai-batch"),
        ("eaglecli generate --config ", 3, "smollm2-135m"),
        ("eaglecli gen", 1, "generate"),
    ],
)
def test_the_shell_completes_options_choices_and_configs(words, index, expected):
    variables = {"_EAGLECLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    done = CliRunner().invoke(app, [], prog_name="eaglecli", env=variables)
    assert expected in done.stdout.split()


def test_the_shell_completes_run_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "one" / "manifest.json").write_text("{}")
    variables = {"_EAGLECLI_COMPLETE": "complete_bash", "COMP_WORDS": "eaglecli generate -o ", "COMP_CWORD": "3"}
    done = CliRunner().invoke(app, [], prog_name="eaglecli", env=variables)
    assert done.stdout.split() == ["runs/one"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative-num-draft-tokens", "0"], "at least 2"),
        (["--speculative-num-draft-tokens", "1"], "at least 2"),
        (["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "99"], "more than the tree"),
        (["--speculative-num-steps", "5", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "4"], "cannot hold the root"),
        (["--speculative-num-steps", "0"], "at least 1"),
        (["--speculative-eagle-topk", "0"], "at least 1"),
        (["--speculative-num-steps", "5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "9"], "steps + 1 = 6"),
        (["--page-size", "0"], "at least 1"),
        (["--temperature", "-1"], "from 0 up"),
        (["--dtype", "int3"], "int3"),
        (["--max-errors", "-1"], "at least 0"),
        (["--max-error-rate", "1.5"], "from 0 up to 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_rule_before_weights_are_read(program, arguments, words):
    """B72."""
    done = program.run("--target", "no-such-model", *arguments)
    assert done.exit_code == ExitCode.USAGE
    assert words in " ".join(done.stderr.split())
    assert not program.output.exists()


def test_more_branches_than_the_draft_vocabulary_has_are_refused(program):
    """B72."""
    triple = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "400", "--speculative-num-draft-tokens", "500"]
    done = program.run(*triple)
    assert done.exit_code == ExitCode.USAGE
    assert "400 branches (--speculative-eagle-topk) is more than the draft's vocabulary of 320" in " ".join(done.stderr.split())
