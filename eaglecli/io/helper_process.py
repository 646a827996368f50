"""A second Python process that makes one object and calls its methods: work that would take the interpreter from the engine's thread.

It is begun as a program of its own (nothing is inherited but one socket), touches no file for writing, and ends when its socket
does, so it ends with the process that began it, whatever ends that one. It lets the signals pass that ask for an end: what the run still
has to write needs it, and the run ends it then.
"""

import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from eaglecli.errors import ExitCode, UserError

END_TIMEOUT_S = 2.0  # for one whose socket is closed already
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = {path!r}; from eaglecli.io.helper_process import serve; serve({descriptor})"
)


class HelperProcess:
    """Calls go out one at a time, from one thread; what they take and give is pickled."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Begins the process, which makes `make(*arguments)` while the caller goes on. `make` is found by its name there.

        Raises UserError when the system gives no process.
        """
        self._connection, theirs = Pipe()
        with theirs:
            program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the helper; what it says before it ends unasked
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    start_new_session=True,
                )
            except OSError as error:
                message = f"a helper process of the run cannot be begun: {error.strerror}"
                raise UserError(message, "free memory or end other processes, then the same command goes on", ExitCode.INTERNAL) from error
        self._send((make, arguments))

    @property
    def process_id(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method gives. Raises what it raises, or what making the object raised; UserError when the process is gone."""
        self._send((method, arguments))
        try:
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        is_good, value = pickle.loads(answer)
        if not is_good:
            raise value
        return value

    def close(self) -> None:
        """Ends the process at once: nothing of it is left undone. A call that another thread waits for fails."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in a file system ends when that lets it
            self._process.wait(END_TIMEOUT_S)
        self._connection.close()
        self._said.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> UserError:
        try:
            ending = f"has ended with code {self._process.wait(END_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            ending = "does not answer"
        hint = "the same command goes on; if it ends so again, please report it"
        if self._process.returncode == -signal.SIGKILL:
            hint = "perhaps memory was short: free some, then the same command goes on"
        return UserError(f"a helper process of the run {ending}{self._last_words()}", hint, ExitCode.INTERNAL)

    def _last_words(self) -> str:
        if self._said.closed:
            return ""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        return f": {said.splitlines()[-1]}" if said else ""


def serve(descriptor: int) -> None:
    """The helper's side: until the other end is closed."""
    with Connection(descriptor) as connection:
        made, failure = None, None
        try:
            make, arguments = pickle.loads(connection.recv_bytes())
            made = make(*arguments)
        except EOFError:
            return
        except Exception as error:  # whoever calls first is told
            failure = error
        while True:
            try:
                connection.send_bytes(_answer(made, failure, connection.recv_bytes()))
            except (EOFError, OSError):  # nobody is there any more
                return


def _answer(made: Any, failure: Exception | None, message: bytes) -> bytes:
    try:
        if failure is not None:
            raise failure
        method, arguments = pickle.loads(message)
        return pickle.dumps((True, getattr(made, method)(*arguments)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return _pickled_failure(error)


def _pickled_failure(error: Exception) -> bytes:
    """As it is, if the other side can make it again, with the place that it comes from."""
    if not isinstance(error, UserError):
        error.add_note("in a helper process:\n" + "".join(traceback.format_exception(error)))
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((False, RuntimeError(repr(error))))
    return answer
