"""The one exception that users see without a traceback, and the exit codes of every command."""

import enum


class ExitCode(enum.IntEnum):
    """Process exit codes, the same for every command."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    PARTIAL = 3
    NOTHING_DONE = 4
    MODEL = 5
    MEMORY = 6
    CHECK_FAILED = 7
    INTERRUPTED = 130
    TERMINATED = 143


class UserError(Exception):
    """A foreseeable failure: one sentence of what and where, an optional hint of what to do.

    `exit_code` is what the process returns; it belongs to the error, not to whoever catches it.
    """

    def __init__(self, message: str, hint: str = "", exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


class ModelError(UserError):
    """A target or draft that cannot be loaded, or that do not fit each other."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, ExitCode.MODEL)
