"""The fixture pairs of the engine's tests."""

from tests.engine.conftest import cycle, e3, rand, twin

__all__ = ["cycle", "e3", "rand", "twin"]
