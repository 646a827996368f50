"""Help on terminals of usual width: typer's table cuts option names there, so a plain list takes its place."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

TABLE_COLUMNS = 120  # from here on the table has room for every name
TEXT_COLUMN = 32  # where the text stands beside a name
LEAST_TEXT_COLUMNS = 36  # with less room than this the text goes below the name
MARKUP = re.compile(r"\[/?(bold|dim|italic)\]")


class ReadableHelpCommand(TyperCommand):
    """A command whose help page shows every option name in full at any width."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the page, as a list when the terminal has fewer than TABLE_COLUMNS columns."""
        columns = shutil.get_terminal_size().columns
        if columns >= TABLE_COLUMNS:
            super().format_help(ctx, formatter)
            return
        formatter.write("\n".join(_page(self, ctx, columns)) + "\n")


class ReadableHelpGroup(TyperGroup):
    """The same for a command that has commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See `ReadableHelpCommand`."""
        columns = shutil.get_terminal_size().columns
        if columns >= TABLE_COLUMNS:
            super().format_help(ctx, formatter)
            return
        commands = [(name, command.get_short_help_str(200)) for name, command in self.commands.items()]
        formatter.write("\n".join(_page(self, ctx, columns, commands)) + "\n")


def _page(command: Any, ctx: Any, columns: int, commands: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    yield from _wrapped(f"Usage: {ctx.command_path} [OPTIONS]{' COMMAND' if commands else ''}", columns)
    for paragraph in MARKUP.sub("", command.help or "").split("\n\n"):
        yield ""
        yield from _wrapped(paragraph, columns)
    panels = [(panel, [option.get_help_record(ctx) for option in options]) for panel, options in _panels(command.get_params(ctx))]
    for title, entries in [*panels, *([("Commands", commands)] if commands else [])]:
        yield from ("", f"{title}:")
        for name, text in entries:
            yield from _entry(name.replace("|", " | "), text, columns)
    for paragraph in (command.epilog or "").split("\n\n"):
        yield ""
        yield from _wrapped(paragraph, columns)


def _entry(name: str, text: str, columns: int) -> Iterator[str]:
    """The text beside the name when both have room, else below it."""
    below = columns < TEXT_COLUMN + LEAST_TEXT_COLUMNS
    indent = " " * (6 if below else TEXT_COLUMN)
    names, texts = _wrapped(name, columns, "  "), _wrapped(text, columns, indent)
    if not below and len(names) == 1 and len(names[0]) < TEXT_COLUMN - 1 and texts:
        texts[0] = names.pop().ljust(TEXT_COLUMN) + texts[0].lstrip()
    yield from names
    yield from texts


def _panels(options: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Options by panel, in the order in which the panels first appear."""
    panels: dict[str, list[Any]] = {}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    return list(panels.items())


def _wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    width = max(columns, 20)
    return textwrap.wrap(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
