"""What the checks of stages share: what they find, random rows, snapshots by name, comparison bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from eaglecli.engine.row_state import RowState
from eaglecli.kernels.adjust_logits import AdjustmentTensors

HUGE = 2**30


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the ways to run one random batch agree: names of what differs, in the order of the data flow."""

    graph_differs: tuple[str, ...] | None  # None: this size is not captured
    poison_differs: tuple[str, ...]
    num_padding_differs: int  # rows whose text is not that of the unpadded run
    padding_difference: float  # largest, of what the check looks at

    @property
    def is_exact(self) -> bool:
        """Graph and poison changed nothing."""
        return not self.graph_differs and not self.poison_differs


Snapshot = dict[str, torch.Tensor]


def write_random_rows(
    state: RowState,
    vocab_size: int,
    rows: np.ndarray,
    table: np.ndarray,
    lengths: np.ndarray,
    limits: np.ndarray,
    random: np.random.Generator,
) -> None:
    """Give `rows` int64 [n] these slots [n, C], lengths and limits [n], and random settings, last tokens and candidates."""
    count, topk = len(rows), state.draft_token.shape[1]
    temperature = np.where(random.random(count) < 0.5, 0.0, random.uniform(0.3, 1.5, count))
    values = {
        "slot_table": table,
        "lengths": lengths,
        "limits": limits,
        "verified_id": random.integers(0, vocab_size, count),
        "finished": np.zeros(count, bool),
        "temperature": temperature,
        "top_k": random.choice([-1, 20], count),
        "top_p": random.choice([1.0, 0.8], count),
        "min_p": random.choice([0.0, 0.05], count),
        "seed": random.integers(0, 2**62, count),
        "sample": random.integers(0, 3, count),
        "draft_token": np.stack([random.permutation(vocab_size)[:topk] for _ in range(count)]),
        "draft_log_q": -np.sort(random.exponential(2.0, (count, topk)), 1),
    }
    index = torch.from_numpy(rows).to(state.lengths.device)
    for name, value in values.items():
        tensor = getattr(state, name)
        tensor[index] = torch.from_numpy(np.ascontiguousarray(value)).to(tensor.device, tensor.dtype)
    state.stop_ids[index] = -1
    if state.adjustments is not None:
        _write_random_adjustments(state.adjustments, index, lengths, random)
    if state.wants_logprobs is not None:
        state.wants_logprobs[index] = torch.from_numpy(random.random(count) < 0.5).to(index.device)


def _write_random_adjustments(tables: AdjustmentTensors, rows: torch.Tensor, lengths: np.ndarray, random: np.random.Generator) -> None:
    """Half of the rows ask for all of it; a tenth of the vocabulary has occurred."""
    count, vocab_size = len(lengths), tables.counts.shape[1]
    values = {
        "is_adjusted": random.random(count) < 0.5,
        "repetition_penalty": random.uniform(0.7, 1.5, count),
        "presence_penalty": random.uniform(-1, 1, count),
        "frequency_penalty": random.uniform(-1, 1, count),
        "min_until": lengths + random.integers(0, 4, count),
        "counts": np.where(random.random((count, vocab_size)) < 0.1, random.integers(1, 5, (count, vocab_size)), 0),
        "bias": np.where(random.random((count, vocab_size)) < 0.05, random.uniform(-4, 4, (count, vocab_size)), 0.0),
    }
    for name, value in values.items():
        tensor = getattr(tables, name)
        tensor[rows] = torch.from_numpy(value).to(tensor.device, tensor.dtype)


def spoil(tensor: torch.Tensor, where: torch.Tensor | slice) -> None:
    """Put numbers there that spoil whatever reads them."""
    tensor[where] = torch.nan if tensor.is_floating_point() else True if tensor.dtype == torch.bool else HUGE


def restore(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy values back by name."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, -0 is not 0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.dtype.itemsize]) if tensor.is_floating_point() else tensor


def differing(expected: Snapshot, found: Snapshot) -> tuple[str, ...]:
    """Names of what is not equal bit for bit."""
    return tuple(name for name in expected if not torch.equal(_bits(expected[name]), _bits(found[name])))
