"""How long a thread that comes back from waiting for the GPU may have to wait for the interpreter.

Reading and writing are threads of the same interpreter, or threads that pass blocks on to helper processes. Python lets a running
one go on for five milliseconds before it must make way, which is longer than an iteration of a small model: the GPU would stand
still whenever a prompt is encoded or a line written.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL_S = 0.0001


@contextmanager
def quick_thread_switches() -> Iterator[None]:
    """Threads make way for one another soon. Set for the whole process; set back at the end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
