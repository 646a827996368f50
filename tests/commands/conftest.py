"""One server for all tests that start the program as a process."""

import pytest

from tests.commands.fork_server import ForkServer


@pytest.fixture(scope="session")
def server():
    """Started by the first test that asks for it: importing everything once takes seconds."""
    with ForkServer() as running:
        yield running
