"""Packed extend inputs against an obvious loop; every element written, none from a neighbour."""

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from eaglecli.kernels.create_extend_spec_info import (
    ExtendInfo,
    create_extend_spec_info,
    create_extend_spec_info_reference,
    create_extend_spec_info_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("create", [create_extend_spec_info_reference, create_extend_spec_info_triton])
NUM_NODES, NUM_COLUMNS = 11, 64


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New buffers are filled with the largest integer, so an element that is not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_inputs(num_rows: int, width: int, seed: int = 0, lens: list[int] | None = None) -> tuple:
    """Rows without tokens are as the engine has them: dummy row, length 0; their tokens and path are poison."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    extend_lens = integers(0, width + 1, num_rows) if lens is None else torch.tensor(lens, dtype=torch.int32)
    past_end = torch.arange(width) >= extend_lens[:, None]
    tokens = integers(1, 10**6, num_rows, width, dtype=torch.int64).masked_fill(past_end, 2**62)
    path = integers(0, NUM_NODES, num_rows, width).masked_fill(past_end, -1)
    lengths = integers(0, NUM_COLUMNS - width, num_rows).masked_fill(extend_lens == 0, 0)
    rows = torch.randperm(num_rows, generator=generator, dtype=torch.int32).masked_fill(extend_lens == 0, num_rows)
    table = integers(1, 10**6, num_rows + 1, NUM_COLUMNS)
    table[-1] = 0
    return (*(part.to(DEVICE) for part in (tokens, extend_lens, lengths, rows, table, path)), NUM_NODES)


def pack_in_a_loop(tokens, extend_lens, lengths, rows, table, path, num_nodes) -> dict[str, list[int]]:
    tokens, extend_lens, lengths, rows, table, path = (part.tolist() for part in (tokens, extend_lens, lengths, rows, table, path))
    names = [field.name for field in fields(ExtendInfo)]
    out: dict[str, list[int]] = {name: [] for name in names}
    out["query_start"].append(0)
    for b, extend_len in enumerate(extend_lens):
        for j in range(extend_len):
            out["input_ids"].append(tokens[b][j])
            out["positions"].append(lengths[b] + j)
            out["out_slots"].append(table[rows[b]][lengths[b] + j])
            out["feature_index"].append(b * num_nodes + path[b][j])
        out["query_start"].append(len(out["input_ids"]))
        out["last_index"].append(len(out["input_ids"]) - 1 if extend_len else 0)
        out["verified_id"].append(tokens[b][extend_len - 1] if extend_len else 0)
        out["proposal_positions"].append(lengths[b] + extend_len + 1)
    for name in ("input_ids", "positions", "out_slots", "feature_index"):
        out[name] += [0] * (len(tokens) * len(tokens[0]) - len(out[name]))
    return out


def as_lists(info: ExtendInfo) -> dict[str, list[int]]:
    return {field.name: getattr(info, field.name).tolist() for field in fields(info)}


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 8), (3, 2), (16, 6), (300, 4), (1024, 8)])
def test_the_packing_equals_a_loop_up_to_1024_rows(num_rows: int, width: int) -> None:
    inputs = random_inputs(num_rows, width)
    assert as_lists(create_extend_spec_info(*inputs)) == pack_in_a_loop(*inputs)


@pytest.mark.parametrize(
    ("num_rows", "width"),
    [(1, 1), (1, 8), (5, 3), (17, 6), (260, 2), *(pytest.param(b, 8, marks=pytest.mark.gpu) for b in (64, 256, 257, 1024))],
)
def test_the_kernel_equals_a_loop(num_rows: int, width: int) -> None:
    inputs = random_inputs(num_rows, width, seed=num_rows)
    out = create_extend_spec_info_triton(*inputs)
    assert as_lists(out) == pack_in_a_loop(*inputs)
    expected = create_extend_spec_info_reference(*inputs)
    assert all(getattr(out, field.name).dtype == getattr(expected, field.name).dtype for field in fields(out))


@IMPLEMENTATIONS
@pytest.mark.parametrize("lens", [[0, 0, 0], [3, 3, 3], [0, 3, 0], [1, 0, 2], [0, 0, 1]])
def test_finished_rows_take_no_room_and_leave_no_trace(create, lens: list[int]) -> None:
    inputs = random_inputs(3, 3, lens=lens)
    assert as_lists(create(*inputs)) == pack_in_a_loop(*inputs)


@IMPLEMENTATIONS
def test_the_ids_are_the_whole_accepted_run_and_each_pairs_with_the_node_before_it(create) -> None:
    tokens, path = torch.tensor([[5, 6, 7], [8, 0, 0]], device=DEVICE), torch.tensor([[0, 2, 4], [0, -1, -1]], device=DEVICE)
    table = torch.arange(40, dtype=torch.int32, device=DEVICE).view(2, 20)
    lens, lengths, rows = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([3, 1], [10, 4], [1, 0]))
    info = create(tokens, lens, lengths, rows, table, path.int(), 5)
    assert info.input_ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert info.positions.tolist() == [10, 11, 12, 4, 0, 0]
    assert info.out_slots.tolist() == [30, 31, 32, 4, 0, 0]
    assert info.feature_index.tolist() == [0, 2, 4, 5, 0, 0]
    assert (info.query_start.tolist(), info.last_index.tolist(), info.verified_id.tolist()) == ([0, 3, 4], [2, 3], [7, 8])
    assert info.proposal_positions.tolist() == [14, 6]


@IMPLEMENTATIONS
def test_lengths_of_another_dtype_are_a_value_error(create) -> None:
    tokens, extend_lens, lengths, *rest = random_inputs(2, 3)
    with pytest.raises(ValueError, match="lengths"):
        create(tokens, extend_lens, lengths.long(), *rest)
