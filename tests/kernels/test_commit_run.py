"""Accept, cut and commit in one go, against a loop that follows the words of the rule; kernel and reference alike."""

from dataclasses import dataclass, fields

import pytest
import torch

from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.commit_run import RowProgress, Status, commit_run_reference, commit_run_triton, empty_outputs
from tests.kernels.random_trees import DEVICE, int32, random_trees, walk_row

IMPLEMENTATIONS = pytest.mark.parametrize("commit", [commit_run_reference, commit_run_triton])
NUM_COLUMNS, NUM_STOP_IDS = 90, 3
UNTOUCHED = -7


def progress_of(lengths: list[int], limits: list[int], stop_ids: list[list[int]]) -> RowProgress:
    """Rows with distinct slots, and the dummy row behind them."""
    num_rows = len(lengths)
    table = torch.arange(1, num_rows * NUM_COLUMNS + 1, dtype=torch.int32, device=DEVICE).view(num_rows, NUM_COLUMNS)
    padded = [ids + [-1] * (NUM_STOP_IDS - len(ids)) for ids in [*stop_ids, []]]
    return RowProgress(
        lengths=int32([*lengths, 0]),
        limits=int32([*limits, 0]),
        verified_id=torch.tensor([UNTOUCHED] * num_rows + [0], device=DEVICE),
        finished=torch.tensor([False] * num_rows + [True], device=DEVICE),
        slot_table=torch.cat([table, torch.zeros_like(table[:1])]),
        stop_ids=torch.tensor(padded, device=DEVICE),
    )


def tree_of(tokens: torch.Tensor, parents: torch.Tensor) -> DraftTree:
    return DraftTree(tokens, parents, torch.zeros_like(parents), torch.zeros(0, dtype=torch.bool, device=DEVICE))


@dataclass(frozen=True)
class Expected:
    """What one row's run must leave."""

    tokens: list[int]
    path: list[int]
    num_emitted: int
    status: Status


def run_in_words(path: list[int], tokens: list[int], length: int, limit: int, stop_ids: list[int]) -> Expected:
    """Emit token by token until one is a stop id, the row is full, or no choice was possible."""
    num_emitted, status, room = 0, Status.RUNNING, max(limit - length - 1, 0)
    for token in tokens:
        if num_emitted == room:
            status = Status.LENGTH
            break
        if token < 0:
            status = Status.NUMERIC
            break
        num_emitted += 1
        if token in stop_ids:
            status = Status.STOP
            break
    if status is Status.RUNNING and num_emitted == room:
        status = Status.LENGTH
    return Expected(tokens, path, num_emitted, status)


def assert_committed(progress: RowProgress, before: RowProgress, out, line: int, row: int, expected: Expected, num_nodes: int) -> None:
    count, width = len(expected.tokens), out.tokens.shape[1]
    padding = [0] * (width - count)
    assert out.tokens[line].tolist() == expected.tokens + padding
    assert out.path[line].tolist() == expected.path + [-1] * (width - count)
    wider = [0] * (out.record.shape[1] - 3 - width)
    assert out.record[line].tolist() == expected.tokens + padding + wider + [count - 1, expected.num_emitted, expected.status]
    goes_on = expected.status is Status.RUNNING
    assert out.extend_lens[line].item() == (count if goes_on else 0)
    assert progress.finished[row].item() is not goes_on
    length = before.lengths[row].item()
    assert progress.lengths[row].item() == length + expected.num_emitted
    assert progress.verified_id[row].item() == max(expected.tokens[-1], 0)
    slots = before.slot_table[row].tolist()
    tail = slots[length : length + num_nodes]
    moved = [tail[node] for node in expected.path] + [tail[node] for node in range(num_nodes) if node not in expected.path]
    assert progress.slot_table[row].tolist() == slots[:length] + moved + slots[length + num_nodes :]


def copy_of(progress: RowProgress) -> RowProgress:
    return RowProgress(*(getattr(progress, field.name).clone() for field in fields(progress)))


@IMPLEMENTATIONS
@pytest.mark.parametrize(("num_nodes", "num_steps"), [(1, 0), (2, 1), (8, 7), (13, 4)])
def test_random_runs_leave_what_the_rule_says(commit, num_nodes: int, num_steps: int) -> None:
    num_rows = 12
    tokens, parents, chosen, allowed = random_trees(num_rows, num_nodes, seed=num_nodes)
    chosen[::5, 0] = -1
    generator = torch.Generator().manual_seed(num_nodes)
    lengths = torch.randint(0, NUM_COLUMNS - num_nodes, (num_rows,), generator=generator).tolist()
    limits = [length + 1 + extra for length, extra in zip(lengths, [20, 1, 2, 3, 20, 20] * 2, strict=True)]
    stop_ids = [[], [], [], [1], [77, 3], [2, 4]] * 2
    before = progress_of(lengths, limits, stop_ids)
    progress, out = copy_of(before), empty_outputs(num_rows, num_steps, num_steps + 2, torch.device(DEVICE))
    rows = torch.randperm(num_rows, generator=generator).int().to(DEVICE)
    commit(progress, rows, before.lengths[rows], chosen, tree_of(tokens, parents), allowed, out)
    for line, row in enumerate(rows.tolist()):
        path, emitted = walk_row(*(part[line].tolist() for part in (tokens, parents, chosen, allowed)), num_steps)
        expected = run_in_words(path, emitted, lengths[row], limits[row], stop_ids[row])
        assert_committed(progress, before, out, line, row, expected, num_nodes)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("token", "limit", "stop_ids", "expected"),
    [
        (5, 20, [], (1, Status.RUNNING)),
        (5, 12, [], (1, Status.LENGTH)),
        (5, 12, [9, 5], (1, Status.STOP)),  # the last token that fits is a stop id: stop, not length
        (-1, 20, [], (0, Status.NUMERIC)),  # the padding of the stop ids is no stop id
    ],
)
def test_the_first_token_after_a_prompt_is_a_run_of_the_root_alone(commit, token: int, limit: int, stop_ids, expected) -> None:
    before = progress_of([0], [limit], [stop_ids])
    progress, out = copy_of(before), empty_outputs(1, 0, 4, torch.device(DEVICE))
    commit(progress, int32([0]), int32([10]), torch.tensor([[token]], device=DEVICE), None, None, out)
    assert out.record.tolist() == [[token, 0, 0, 0, 0, *expected]]
    assert progress.lengths.tolist() == [10 + expected[0], 0]
    assert progress.verified_id.tolist() == [max(token, 0), 0]
    assert progress.finished.tolist() == [expected[1] is not Status.RUNNING, True]
    assert torch.equal(progress.slot_table, before.slot_table)


@IMPLEMENTATIONS
def test_the_dummy_row_named_many_times_changes_nothing(commit) -> None:
    tokens, parents, chosen, allowed = random_trees(4, 8, seed=1)
    before = progress_of([5, 6], [40, 40], [[], []])
    progress, out = copy_of(before), empty_outputs(4, 7, 8, torch.device(DEVICE))
    rows = int32([2, 1, 2, 2])
    commit(progress, rows, before.lengths[rows], chosen, tree_of(tokens, parents), allowed, out)
    for field in fields(progress):
        kept, was = getattr(progress, field.name), getattr(before, field.name)
        assert torch.equal(kept[[0, 2]], was[[0, 2]]), field.name
    assert out.extend_lens.tolist()[0] == out.extend_lens.tolist()[2] == 0
    assert progress.lengths[1] > 6


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_nodes", "num_steps"), [(256, 64, 7), (1024, 8, 5)])
def test_the_compiled_kernel_equals_the_reference(num_rows: int, num_nodes: int, num_steps: int) -> None:
    tokens, parents, chosen, allowed = random_trees(num_rows, num_nodes, seed=num_rows)
    lengths = [7 * row % (NUM_COLUMNS - num_nodes) for row in range(num_rows)]
    progress = progress_of(lengths, [length + 1 + row % 9 for row, length in enumerate(lengths)], [[row % 6] for row in range(num_rows)])
    expected_progress, rows = copy_of(progress), torch.randperm(num_rows).int().to(DEVICE)
    out, expected = (empty_outputs(num_rows, num_steps, num_steps + 1, torch.device(DEVICE)) for _ in range(2))
    arguments = progress.lengths[rows], chosen, tree_of(tokens, parents), allowed
    commit_run_triton(progress, rows, *arguments, out)
    commit_run_reference(expected_progress, rows, *arguments, expected)
    for record, other in ((out, expected), (progress, expected_progress)):
        assert all(torch.equal(getattr(record, field.name), getattr(other, field.name)) for field in fields(other))


@IMPLEMENTATIONS
def test_nodes_without_a_tree_are_a_value_error(commit) -> None:
    progress = progress_of([5], [40], [[]])
    with pytest.raises(ValueError, match="2 nodes and runs of 2 tokens need a tree"):
        out = empty_outputs(1, 1, 2, torch.device(DEVICE))
        commit(progress, int32([0]), int32([5]), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), None, None, out)


@IMPLEMENTATIONS
def test_a_record_too_narrow_for_the_run_is_a_value_error(commit) -> None:
    progress, (tokens, parents, chosen, allowed) = progress_of([5], [40], [[]]), random_trees(1, 4, seed=0)
    with pytest.raises(ValueError, match="no room for 4 tokens"):
        out = empty_outputs(1, 3, 3, torch.device(DEVICE))
        commit(progress, int32([0]), int32([5]), chosen, tree_of(tokens, parents), allowed, out)
