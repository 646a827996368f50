"""Kernels around the choice of tokens: adjusted logits, counts, log-probabilities; each against its reference and against a naive loop."""

from dataclasses import fields, replace

import pytest
import torch

from eaglecli.kernels.adjust_logits import AdjustmentTensors, adjust_logits_reference, adjust_logits_triton
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.count_tokens import count_tokens_reference, count_tokens_triton
from eaglecli.kernels.token_logprobs import logprob_columns, token_logprobs_reference, token_logprobs_triton
from tests.kernels.random_trees import DEVICE, int32, random_trees

ADJUST = pytest.mark.parametrize("adjust", [adjust_logits_reference, adjust_logits_triton])
COUNT = pytest.mark.parametrize("count", [count_tokens_reference, count_tokens_triton])
LOGPROBS = pytest.mark.parametrize("logprobs", [token_logprobs_reference, token_logprobs_triton])
INF = float("inf")


def random_tables(num_rows: int, vocab_size: int, seed: int) -> AdjustmentTensors:
    """Every row but the last asks for all of it."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return (low + (high - low) * torch.rand(num_rows, *shape, generator=generator)).to(DEVICE)

    occurred = torch.rand(num_rows, vocab_size, generator=generator) < 0.2
    counts = torch.where(occurred, torch.randint(1, 6, (num_rows, vocab_size), generator=generator), 0)
    return AdjustmentTensors(
        is_adjusted=torch.tensor([True] * (num_rows - 1) + [False], device=DEVICE),
        repetition_penalty=uniform(0.6, 1.7),
        presence_penalty=uniform(-2, 2),
        frequency_penalty=uniform(-2, 2),
        min_until=torch.randint(0, 20, (num_rows,), generator=generator).int().to(DEVICE),
        counts=counts.int().to(DEVICE),
        bias=uniform(-3, 3, vocab_size),
    )


def tree_with_mask(num_rows: int, num_nodes: int, seed: int) -> DraftTree:
    tokens, parents, _, _ = random_trees(num_rows, num_nodes, seed)
    mask = torch.eye(num_nodes, dtype=torch.bool).repeat(num_rows, 1, 1)
    for row in range(num_rows):
        for node in range(1, num_nodes):
            mask[row, node] |= mask[row, parents[row, node].item()]
    return DraftTree(tokens, parents, torch.zeros_like(parents), mask.to(DEVICE))


def naive(logits, tables: AdjustmentTensors, stop_ids, rows, position, tree: DraftTree | None) -> list[list[float]]:
    """One number at a time, in float64."""
    num_nodes = len(logits) // len(rows)
    adjusted = []
    for index, line in enumerate(logits.double().tolist()):
        batch_row, node = divmod(index, num_nodes)
        row = int(rows[batch_row])
        if tables.is_adjusted[row]:
            path = [int(tree.tokens[batch_row, m]) for m in range(1, num_nodes) if tree.ancestor_mask[batch_row, node, m]] if tree else []
            for token in range(len(line)):
                in_prompt, occurrences = int(tables.counts[row, token]) % 2, int(tables.counts[row, token]) // 2 + path.count(token)
                line[token] += float(tables.bias[row, token])
                if in_prompt or occurrences:
                    penalty = float(tables.repetition_penalty[row])
                    line[token] = line[token] / penalty if line[token] > 0 else line[token] * penalty
                line[token] -= float(tables.frequency_penalty[row]) * occurrences
                line[token] -= float(tables.presence_penalty[row]) if occurrences else 0.0
                if token in stop_ids[row].tolist() and position[index] < tables.min_until[row]:
                    line[token] = -INF
        adjusted.append(line)
    return adjusted


@ADJUST
@pytest.mark.parametrize("num_nodes", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_score_is_that_of_the_naive_loop(adjust, num_nodes: int, dtype: torch.dtype) -> None:
    """Without a tree (0), with a root alone, with a tree; rows in any order, the last one without options."""
    rows, tables = int32([3, 0, 2, 1]), random_tables(4, 150, seed=num_nodes)
    tree = tree_with_mask(4, num_nodes, seed=2) if num_nodes else None
    count = 4 * max(num_nodes, 1)
    logits = (4 * torch.randn(count, 150, generator=torch.Generator().manual_seed(1))).to(dtype).to(DEVICE)
    stop_ids = torch.tensor([[5, -1, -1], [77, 5, 149], [-1] * 3, [3, 4, 5]], device=DEVICE)
    position = torch.arange(count, dtype=torch.int32, device=DEVICE) % 20
    before = logits.clone()
    found = adjust(logits, tables, stop_ids, rows, position, tree)
    assert found.dtype == torch.float32
    expected = torch.tensor(naive(logits, tables, stop_ids, rows, position, tree), device=DEVICE)
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[: max(num_nodes, 1)], logits[: max(num_nodes, 1)].float()), "row 3 asks for nothing"
    assert torch.equal(logits, before)


@ADJUST
def test_a_row_longer_than_a_chunk_is_adjusted_to_its_end(adjust) -> None:
    tables = random_tables(2, 4100, seed=4)
    logits = torch.randn(1, 4100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    stop_ids = torch.tensor([[4099], [-1]], device=DEVICE)
    found = adjust(logits, replace(tables, min_until=tables.min_until + 99), stop_ids, int32([0]), int32([9]), None)
    assert found[0, 4099] == -INF
    expected = torch.tensor(naive(logits, replace(tables, min_until=tables.min_until + 99), stop_ids, int32([0]), int32([9]), None))
    torch.testing.assert_close(found.double().cpu(), expected.double(), atol=1e-5, rtol=1e-5)


@ADJUST
def test_bad_logits_stay_bad(adjust) -> None:
    tables = random_tables(2, 3, seed=0)
    logits = torch.tensor([[0.0, float("nan"), 1.0], [INF, 0.0, 0.0]], device=DEVICE)
    found = adjust(logits, tables, torch.full((2, 1), -1, device=DEVICE), int32([0, 0]), int32([5, 5]), None)
    assert found[0, 1].isnan() and found[1, 0] == INF


@ADJUST
def test_rows_that_do_not_fit_the_logits_are_a_value_error(adjust) -> None:
    stop_ids = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit 3 rows"):
        adjust(torch.zeros(3, 8, device=DEVICE), random_tables(2, 8, 0), stop_ids, int32([0]), int32([5] * 3), None)


@COUNT
def test_emitted_tokens_are_counted_each_time_they_occur(count) -> None:
    tables = random_tables(3, 12, seed=1)
    before = tables.counts.clone()
    record = int32([[4, 4, 7, 4, 3, 3, 0], [4, 4, 7, 4, 3, 4, 0], [9, 9, 9, 9, 3, 0, 1]])  # 4 tokens, accepted, emitted, status
    count(tables, int32([2, 0, 1]), record)
    added = (tables.counts - before).cpu()
    assert added[2].tolist() == [0] * 12  # asks for nothing
    assert added[0].tolist() == [0, 0, 0, 0, 6, 0, 0, 2, 0, 0, 0, 0]
    assert added[1].tolist() == [0] * 12  # nothing was emitted


def runs(num_rows: int, num_nodes: int, width: int, vocab_size: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num_rows * num_nodes, vocab_size, generator=generator)).to(dtype).to(DEVICE)
    tokens = torch.randint(0, vocab_size, (num_rows, width), generator=generator).to(DEVICE)
    path = torch.stack([torch.arange(width) + row % 2 for row in range(num_rows)])
    for row in range(num_rows):
        path[row, 1 + row % width :] = -1
    return logits, tokens, path.int().to(DEVICE)


@LOGPROBS
@pytest.mark.parametrize(("num_top", "vocab_size"), [(0, 300), (1, 300), (3, 2500), (20, 40), (5, 5)])
def test_logprobs_are_the_log_softmax_and_its_best(logprobs, num_top: int, vocab_size: int) -> None:
    logits, tokens, path = runs(4, 5, 4, vocab_size, torch.float32)
    logits[0, 7 % vocab_size] = logits[0].max()  # a tie
    rows, is_wanted = int32([2, 0, 4, 3]), torch.tensor([True, True, True, False, True], device=DEVICE)
    columns = logprob_columns(num_top)
    out = torch.full((4, 5 * columns), -99, dtype=torch.int32, device=DEVICE)
    logprobs(logits, rows, is_wanted, tokens, path, num_top, out)
    out = out.view(4, 5, columns).cpu()
    laws = logits.double().log_softmax(-1).cpu()
    for row in range(4):
        for step in range(5):
            node = int(path[row, step]) if step < 4 else -1
            if node < 0 or row == 3:
                assert (out[row, step] == -99).all(), "not asked for: left as it was"
                continue
            law = laws[row * 5 + node]
            record = out[row, step]
            values = record[1 + num_top :].view(torch.float32).double()
            best = sorted(range(vocab_size), key=lambda token: (-float(logits[row * 5 + node, token]), token))[:num_top]
            assert record[:1].view(torch.float32).item() == pytest.approx(law[tokens[row, step]].item(), abs=2e-5)
            assert record[1 : 1 + num_top].tolist() == best
            assert torch.allclose(values, law[best], atol=2e-5)


@LOGPROBS
def test_a_run_without_a_choice_at_its_end_is_no_fault(logprobs) -> None:
    logits, tokens, path = runs(1, 2, 2, 30, torch.float32)
    logits[1] = float("nan")
    path[0], tokens[0] = int32([0, 1]), torch.tensor([4, -1])
    out = torch.zeros(1, 2 * logprob_columns(2), dtype=torch.int32, device=DEVICE)
    logprobs(logits, int32([0]), torch.tensor([True], device=DEVICE), tokens, path, 2, out)
    assert out[0, 0].view(torch.float32).item() == pytest.approx(logits[0].log_softmax(-1)[4].item(), abs=1e-5)


@LOGPROBS
def test_a_record_without_room_is_a_value_error(logprobs) -> None:
    logits, tokens, path = runs(1, 2, 2, 30, torch.float32)
    with pytest.raises(ValueError, match="no room for 2 tokens and their 3 best"):
        out = torch.zeros(1, 13, dtype=torch.int32, device=DEVICE)
        logprobs(logits, int32([0]), torch.tensor([True], device=DEVICE), tokens, path, 3, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_equal_the_references(dtype: torch.dtype) -> None:
    num_rows, num_nodes, vocab_size = 64, 16, 49152
    tables, tree = random_tables(num_rows + 1, vocab_size, seed=1), tree_with_mask(num_rows, num_nodes, seed=3)
    logits, tokens, path = runs(num_rows, num_nodes, 6, vocab_size, dtype)
    rows, position = torch.randperm(num_rows).int().to(DEVICE), (torch.arange(num_rows * num_nodes) % 25).int().to(DEVICE)
    stop_ids = torch.randint(-1, vocab_size, (num_rows + 1, 16)).to(DEVICE)
    found = adjust_logits_triton(logits, tables, stop_ids, rows, position, tree)
    torch.testing.assert_close(found, adjust_logits_reference(logits, tables, stop_ids, rows, position, tree), atol=1e-5, rtol=1e-5)
    record = torch.randint(0, 6, (num_rows, 9), dtype=torch.int32, device=DEVICE)
    other = AdjustmentTensors(**{field.name: getattr(tables, field.name).clone() for field in fields(tables)})
    count_tokens_triton(tables, rows, record)
    count_tokens_reference(other, rows, record)
    assert torch.equal(tables.counts, other.counts)
    outs = [torch.zeros(num_rows, 6 * logprob_columns(20), dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for logprobs, out in zip((token_logprobs_triton, token_logprobs_reference), outs, strict=True):
        logprobs(logits, rows, tables.is_adjusted, tokens, path, 20, out)
    ours, theirs = (out.view(num_rows, 6, -1) for out in outs)
    assert torch.equal(ours[..., 1:21], theirs[..., 1:21])
    for columns in (slice(0, 1), slice(21, None)):
        ours_values, their_values = (out[..., columns].contiguous().view(torch.float32) for out in (ours, theirs))
        torch.testing.assert_close(ours_values, their_values, atol=1e-4, rtol=1e-5)
