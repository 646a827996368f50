"""What a terminal can show, told from the stream and from the variables that all programs honour.

NO_COLOR and FORCE_COLOR (any value that is not empty), TERM=dumb, and rich's TTY_COMPATIBLE and TTY_INTERACTIVE (1 or 0).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Terminal:
    """`colors`: escape sequences for colours; `moves`: a line may be written over, as a progress bar does."""

    colors: bool
    moves: bool


def describe_terminal(is_terminal: bool, environment: Mapping[str, str], no_color: bool = False) -> Terminal:
    """The one place where it is decided: `no_color` is the flag, which goes before everything."""
    compatible = _switch(environment, "TTY_COMPATIBLE", is_terminal)
    capable = compatible and environment.get("TERM") != "dumb"
    colors = capable or bool(environment.get("FORCE_COLOR"))
    if no_color or environment.get("NO_COLOR"):
        colors = False
    return Terminal(colors, _switch(environment, "TTY_INTERACTIVE", capable))


def _switch(environment: Mapping[str, str], name: str, otherwise: bool) -> bool:
    value = environment.get(name)
    return value == "1" if value in ("0", "1") else otherwise
