"""Draft proposals: order, ids, log-probabilities, bad numbers; kernel against reference."""

from dataclasses import replace

import pytest
import torch

from eaglecli.kernels.draft_topk import DraftCandidates, draft_topk, draft_topk_reference, draft_topk_triton
from eaglecli.kernels.philox import gumbel_noise_reference
from tests.kernels.sampling_rows import DEVICE, sampling_rows

INF, NAN = float("inf"), float("nan")
IMPLEMENTATIONS = pytest.mark.parametrize("propose", [draft_topk_reference, draft_topk_triton])
GREEDY, SAMPLED = (0.0, -1, 1.0, 0.0), (0.7, -1, 1.0, 0.0)
TOLERANCE = {"rtol": 0, "atol": 2e-4 if DEVICE == "cuda" else 2e-5}


def positions(count: int) -> torch.Tensor:
    return torch.arange(7, 7 + count, dtype=torch.int32, device=DEVICE)


def propose_rows(propose, logits: list[list[float]], k: int, setting=GREEDY, num_valid: int | None = None) -> DraftCandidates:
    rows = torch.tensor(logits, device=DEVICE)
    return propose(rows, k, sampling_rows(*[setting] * len(logits)), positions(len(logits)), None, num_valid or rows.shape[1])


def assert_same(out: DraftCandidates, expected: DraftCandidates) -> None:
    assert out.token.tolist() == expected.token.tolist()
    torch.testing.assert_close(out.log_q, expected.log_q, **TOLERANCE)


@IMPLEMENTATIONS
def test_greedy_rows_propose_the_most_probable_with_ties_lowest_id_first(propose) -> None:
    out = propose_rows(propose, [[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]], 4)
    assert out.token.tolist() == [[1, 3, 2, 4]]
    expected = torch.log_softmax(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0]), 0)[[1, 3, 2, 4]]
    torch.testing.assert_close(out.log_q[0].cpu(), expected, **TOLERANCE)


@IMPLEMENTATIONS
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("temperature", [1e-9, 0.7, 30.0])  # the last one times the noise is far above what exp can hold
def test_sampled_rows_are_ordered_and_scored_by_the_logits_and_the_noise_of_the_target_id(
    propose, mapped: bool, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2100, generator=generator).to(DEVICE)
    token_map = torch.randperm(5000, generator=generator)[:2100].sort().values.to(DEVICE) if mapped else None
    ids = token_map if mapped else torch.arange(2100, device=DEVICE)
    sampling = sampling_rows(*[(temperature, -1, 1.0, 0.0)] * 3)
    noise = gumbel_noise_reference(sampling.seed, sampling.sample, positions(3), ids)
    perturbed = logits.double() + temperature * noise
    best = perturbed.argsort(dim=1, descending=True)[:, :5]
    out = propose(logits, 5, sampling, positions(3), token_map, 2100)
    assert out.token.tolist() == ids[best].tolist()
    expected = torch.log_softmax(perturbed, 1).gather(1, best).float()
    torch.testing.assert_close(out.log_q, expected, rtol=0, atol=TOLERANCE["atol"] * max(1.0, temperature))


@IMPLEMENTATIONS
def test_greedy_rows_beside_sampled_ones_keep_every_bit(propose) -> None:
    logits = torch.randn(2, 2100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mixed, greedy = sampling_rows(GREEDY, SAMPLED), replace(sampling_rows(GREEDY, GREEDY), any_sampled=False)
    out, expected = (propose(logits, 5, sampling, positions(2), None, 2100) for sampling in (mixed, greedy))
    assert torch.equal(out.token[0], expected.token[0]) and torch.equal(out.log_q[0], expected.log_q[0])
    assert not torch.equal(out.log_q[1], expected.log_q[1])


@IMPLEMENTATIONS
@pytest.mark.parametrize("setting", [GREEDY, SAMPLED])
def test_padding_rows_of_the_head_are_never_proposed_and_have_no_share(propose, setting) -> None:
    out = propose_rows(propose, [[0.0, 1.0, 9.0, NAN], [-INF, -INF, INF, 50.0]], 2, setting, num_valid=2)
    assert [sorted(row) for row in out.token.tolist()] == [[0, 1], [0, 1]]
    torch.testing.assert_close(out.log_q[0].exp().sum().cpu(), torch.tensor(1.0), **TOLERANCE)
    assert out.log_q[1].tolist() == [-INF, -INF]


@IMPLEMENTATIONS
@pytest.mark.parametrize("setting", [GREEDY, SAMPLED, (1e-9, -1, 1.0, 0.0), (3e38, -1, 1.0, 0.0)])
@pytest.mark.parametrize(
    "row",
    [
        [NAN] * 6,
        [INF] * 6,
        [-INF] * 6,
        [0.0] * 6,
        [NAN, INF, -INF, 0.0, INF, 1.0],
        [-INF, 2.0, -INF, NAN, -INF, -INF],
        [3e38, -3e38, 0.0] * 2,
    ],  # fmt: skip
)
def test_bad_numbers_still_give_distinct_ids_and_no_nan(propose, setting, row: list[float]) -> None:
    for k in (1, 4, 6):
        out = propose_rows(propose, [row], k, setting)
        assert len(set(out.token[0].tolist())) == k
        assert set(out.token[0].tolist()) <= set(range(6))
        assert not out.log_q.isnan().any()
        assert (out.log_q <= 0).all()
        assert out.log_q.exp().sum() <= 1.001


@IMPLEMENTATIONS
def test_nan_counts_as_minus_inf_and_inf_as_the_largest_number(propose) -> None:
    out = propose_rows(propose, [[NAN, 0.0, INF, 1.0, INF], [NAN, 0.0, 1.0, -INF, 2.0]], 4)
    assert out.token.tolist() == [[2, 4, 3, 1], [4, 2, 1, 0]]
    torch.testing.assert_close(out.log_q[0, :2].exp().cpu(), torch.tensor([0.5, 0.5]), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("k", "mapped", "ties"), [(1, False, False), (4, True, False), (10, False, True), (3, True, True)])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, k: int, mapped: bool, ties: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = 3 * torch.randn(4, 2100, generator=generator)
    logits = (logits.round() if ties else logits).to(dtype).to(DEVICE)
    token_map = torch.randperm(9000, generator=generator)[:2100].to(DEVICE) if mapped else None
    sampling = sampling_rows(GREEDY, SAMPLED, (1.5, 5, 0.9, 0.1), (0.1, -1, 1.0, 0.0))
    arguments = (logits, k, sampling, positions(4), token_map, 2090)
    assert_same(draft_topk_triton(*arguments), draft_topk_reference(*arguments))


@IMPLEMENTATIONS
def test_proposals_written_into_rows_stand_at_the_rows_asked_and_leave_the_others(propose) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 50, generator=generator).to(DEVICE)
    settings = sampling_rows(GREEDY, SAMPLED, GREEDY, SAMPLED, SAMPLED)
    rows = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    asked = replace(settings, rows=rows, repeats=2)
    expected = propose(logits, 3, replace(settings, rows=rows.repeat_interleave(2)), positions(4), None, 50)
    assert_same(propose(logits, 3, asked, positions(4), None, 50), expected)
    kept = DraftCandidates(torch.full((5, 3), 7.0, device=DEVICE), torch.full((5, 3), 7, device=DEVICE))
    expected = propose(logits[:2], 3, replace(settings, rows=rows), positions(2), None, 50)
    propose(logits[:2], 3, replace(settings, rows=rows), positions(2), None, 50, kept)
    assert_same(DraftCandidates(kept.log_q[[3, 0]], kept.token[[3, 0]]), expected)
    assert (kept.token[[1, 2, 4]] == 7).all()
    assert (kept.log_q[[1, 2, 4]] == 7).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize(("k", "num_valid"), [(0, 4), (5, 4), (2, 9)])
def test_more_ids_than_there_are_is_a_value_error(propose, k: int, num_valid: int) -> None:
    with pytest.raises(ValueError, match="k <= num_valid"):
        propose(torch.zeros(1, 8, device=DEVICE), k, sampling_rows(GREEDY), positions(1), None, num_valid)


def test_a_short_token_map_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="token_map"):
        draft_topk(torch.zeros(1, 8, device=DEVICE), 2, sampling_rows(GREEDY), positions(1), torch.arange(7, device=DEVICE), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("columns", "mapped"), [(32_000, True), (128_256, False)])
def test_the_compiled_kernel_equals_the_reference_on_real_vocabularies(dtype: torch.dtype, columns: int, mapped: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(128, columns, generator=generator)).to(dtype).to("cuda")
    token_map = torch.randperm(128_256, generator=generator)[:columns].sort().values.to("cuda") if mapped else None
    sampling = sampling_rows(*[GREEDY, SAMPLED] * 64)
    arguments = (logits, 8, sampling, positions(128), token_map, columns)
    out, expected = draft_topk_triton(*arguments), draft_topk_reference(*arguments)
    assert (out.token != expected.token).float().mean() <= 0.01  # approximate logarithms may swap near-ties
    assert torch.equal(out.token[::2], expected.token[::2])
    torch.testing.assert_close(out.log_q, expected.log_q, **TOLERANCE)  # near-ties have near scores
