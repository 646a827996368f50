"""The fixture pairs, written and loaded once."""

import pytest

from tests.engine.harness import LoadedPair, load_pair
from tests.fixtures import write_cycle, write_e3, write_rand, write_twin


@pytest.fixture(scope="session")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return load_pair(write_cycle(tmp_path_factory.mktemp("cycle")))


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return load_pair(write_twin(tmp_path_factory.mktemp("twin")))


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return load_pair(write_rand(tmp_path_factory.mktemp("rand")))


@pytest.fixture(scope="session")
def e3(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return load_pair(write_e3(tmp_path_factory.mktemp("e3")), (2, 4, 5))


@pytest.fixture(scope="session", params=["cycle", "twin", "rand", "e3"])
def pair(request: pytest.FixtureRequest) -> LoadedPair:
    """Each of the four in turn."""
    return request.getfixturevalue(request.param)
