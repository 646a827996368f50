"""Fewer and shorter pauses for Python's search for garbage.

What models and libraries leave behind are hundreds of thousands of objects that stay. Looking through them all takes 0.1 to 0.2
seconds, in which nothing feeds the GPU, and requests that wait make it due every few thousand records. Counted references free
nearly everything anyway.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (20_000, 10, 100)  # young objects are looked through in about a millisecond; all of them after twenty million


@contextmanager
def seldom_garbage_pauses() -> Iterator[None]:
    """What is there already is not looked through inside. For the whole process; as before at the end."""
    before = gc.get_threshold()
    gc.collect()  # what is dead already may hold memory of the device
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
