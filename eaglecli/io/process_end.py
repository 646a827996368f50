"""The end of the process: everything is on disk, and the interpreter is not taken apart."""

import atexit
import os
import sys
from typing import NoReturn

from eaglecli.errors import ExitCode


def leave_process(code: int) -> NoReturn:
    """Ends the process with `code`, or with INTERNAL where what was said last does not reach its reader.

    Threads of libraries outlive their work: pyarrow's drop the file of a streamed data set at a moment of their own, and one
    that meets a closing interpreter aborts the process (apache/arrow issues 33975 and 45214). A run that is complete would end
    with code 134 (1 of 600 starts, `benchmarks/RESULTS.md`, run 14). Callbacks of `atexit` run as ever.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except BrokenPipeError:  # the reader left: nothing more can be said there
            pass
        except OSError:
            code = code or ExitCode.INTERNAL
    os._exit(code)
