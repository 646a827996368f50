"""Layer ids of draft configs become boundaries of the target, whichever convention the file follows."""

import pytest

from eaglecli.errors import ModelError
from eaglecli.models.tap_layers import IdSource, default_boundaries, resolve_tap_layers


@pytest.mark.parametrize(
    ("num_layers", "boundaries"),
    [(16, (2, 8, 13)), (24, (2, 12, 21)), (32, (2, 16, 29)), (36, (2, 18, 33)), (61, (2, 30, 58)), (80, (2, 40, 77)), (94, (2, 47, 91))],
)
def test_default_boundaries_are_those_of_every_project(num_layers: int, boundaries: tuple[int, ...]) -> None:
    assert default_boundaries(num_layers) == boundaries
    assert resolve_tap_layers(None, "top level", 3, num_layers, "config").boundaries == boundaries


@pytest.mark.parametrize(
    ("ids", "source", "num_layers", "boundaries"),
    [
        ([2, 18, 33], "speculators", 36, (2, 18, 33)),
        ([1, 23, 44], "speculators", 48, (2, 24, 45)),  # only the other reading gives the default triple
        ([5, 10, 15], "speculators", 24, (5, 10, 15)),
        ([1, 46, 90], "eagle_config", 94, (2, 47, 91)),
        ([1, 11, 21], "eagle_config", 24, (2, 12, 22)),
        ([1, 17, 33], "eagle_config", 36, (2, 18, 34)),
        ([24, 30, 36], "eagle_config", 36, (24, 30, 36)),  # the highest id is the number of layers
        ([2, 30, 58], "eagle_config", 61, (2, 30, 58)),
        ([2, 9, 20], "eagle_config", 61, (2, 9, 20)),
        ([4, 9, 20], "eagle_config", 61, (5, 10, 21)),
        ([2, 16, 29], "top level", 32, (2, 16, 29)),
        ([1, 15, 28], "top level", 32, (2, 16, 29)),
        ([1, 9, 20], "top level", 32, (2, 10, 21)),
        ([4, 9, 20], "top level", 32, (4, 9, 20)),
    ],
)
def test_ids_are_read_by_where_they_stand_and_what_they_give(
    ids: list[int], source: IdSource, num_layers: int, boundaries: tuple[int, ...]
) -> None:
    assert resolve_tap_layers(ids, source, 3, num_layers, "config").boundaries == boundaries


def test_number_of_ids_must_be_the_number_of_fused_states() -> None:
    with pytest.raises(ModelError, match="fuses 3 target states, but 2 layers are tapped"):
        resolve_tap_layers([2, 4], "speculators", 3, 8, "config")


@pytest.mark.parametrize("ids", [[2, 4, 9], [-1, 4, 5]])
def test_ids_outside_the_target_are_refused(ids: list[int]) -> None:
    with pytest.raises(ModelError, match="do not exist in a target of 8 layers"):
        resolve_tap_layers(ids, "speculators", 3, 8, "config")
