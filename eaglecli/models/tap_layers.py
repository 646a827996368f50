"""Which hidden states of the target an EAGLE-3 draft was trained on.

*Boundary* b is the residual stream after b decoder layers of the target: 0 is the embedding, N the state before the
final norm. Files name the same states in two ways, as boundaries (vLLM, speculators) or as the number of the layer that
yields them (SpecForge, SGLang, NVIDIA: boundary - 1), and do not say which. The rules here follow from where a
file keeps the list and from the default that all projects share: boundaries 2, N // 2, N - 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eaglecli.errors import ModelError

IdSource = Literal["speculators", "eagle_config", "top level"]


@dataclass(frozen=True)
class TapLayers:
    """The chosen boundaries and why they were chosen, for the summary line."""

    boundaries: tuple[int, ...]
    reason: str


def default_boundaries(num_target_layers: int) -> tuple[int, int, int]:
    """The boundaries that every project uses when a file names none."""
    return 2, num_target_layers // 2, num_target_layers - 3


def resolve_tap_layers(ids: Sequence[int] | None, source: IdSource, num_states: int, num_target_layers: int, where: str) -> TapLayers:
    """Turn the layer ids of a draft config into boundaries of a target with `num_target_layers` layers.

    `num_states` is the number of states that the fusion layer takes. Raises ModelError when the ids do not fit it or the target.
    """
    if ids is None:
        taps = TapLayers(default_boundaries(num_target_layers), "default 2, N//2, N-3")
    else:
        taps = _read_ids(tuple(ids), source, num_target_layers)
    check_boundaries(taps.boundaries, num_states, num_target_layers, where)
    return taps


def check_boundaries(boundaries: Sequence[int], num_states: int, num_target_layers: int, where: str) -> None:
    """Raise ModelError unless there is one boundary inside the target for each of the states that the draft fuses."""
    if len(boundaries) != num_states:
        raise ModelError(
            f"{where}: fc.weight fuses {num_states} target states, but {len(boundaries)} layers are tapped ({_join(boundaries)})",
            "name them with --draft-config-overrides '{\"tap_boundaries\": [...]}'",
        )
    if min(boundaries) < 0 or max(boundaries) > num_target_layers:
        raise ModelError(
            f"{where}: tapped layers {_join(boundaries)} do not exist in a target of {num_target_layers} layers",
            "this draft was made for a deeper target",
        )


def _read_ids(ids: tuple[int, ...], source: IdSource, num_target_layers: int) -> TapLayers:
    as_boundaries = TapLayers(ids, f"{source} ids {_join(ids)} read as boundaries")
    as_layers = TapLayers(tuple(number + 1 for number in ids), f"{source} ids {_join(ids)} read as outputs of those layers")
    if max(ids, default=0) == num_target_layers:
        return as_boundaries
    chosen, other = (as_layers, as_boundaries) if _names_layers(ids, source) else (as_boundaries, as_layers)
    default = default_boundaries(num_target_layers)
    if chosen.boundaries != default and other.boundaries == default:
        return TapLayers(other.boundaries, other.reason + ", which gives the default triple")
    return chosen


def _names_layers(ids: tuple[int, ...], source: IdSource) -> bool:
    if source == "speculators":
        return False
    first = ids[0] if ids else -1
    return first == 1 or (source == "eagle_config" and first != 2)


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
