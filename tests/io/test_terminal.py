"""What a terminal can show."""

import pytest

from eaglecli.io.terminal import Terminal, describe_terminal


@pytest.mark.parametrize(
    ("is_terminal", "variables", "no_color", "expected"),
    [
        (True, {}, False, Terminal(colors=True, moves=True)),
        (False, {}, False, Terminal(colors=False, moves=False)),
        (True, {"TERM": "dumb"}, False, Terminal(colors=False, moves=False)),
        (True, {"NO_COLOR": "1"}, False, Terminal(colors=False, moves=True)),
        (True, {"NO_COLOR": ""}, False, Terminal(colors=True, moves=True)),
        (True, {}, True, Terminal(colors=False, moves=True)),
        (False, {"FORCE_COLOR": "1"}, False, Terminal(colors=True, moves=False)),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, Terminal(colors=False, moves=False)),
        (False, {"FORCE_COLOR": "1"}, True, Terminal(colors=False, moves=False)),
        (False, {"TTY_COMPATIBLE": "1"}, False, Terminal(colors=True, moves=True)),
        (True, {"TTY_COMPATIBLE": "0"}, False, Terminal(colors=False, moves=False)),
        (True, {"TTY_INTERACTIVE": "0"}, False, Terminal(colors=True, moves=False)),
    ],
)
def test_flag_and_variables_in_their_order(is_terminal, variables, no_color, expected):
    assert describe_terminal(is_terminal, variables, no_color) == expected
