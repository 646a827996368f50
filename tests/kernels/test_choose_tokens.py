"""The choosing rule: greedy, filters, ties, non-finite rows; kernel against reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eaglecli.kernels.choose_tokens import SamplingTensors, choose_tokens, choose_tokens_reference, choose_tokens_triton
from tests.kernels.sampling_rows import DEVICE, exact_law, many_samples, sampling_rows

INF, NAN = float("inf"), float("nan")
IMPLEMENTATIONS = pytest.mark.parametrize("choose", [choose_tokens_reference, choose_tokens_triton])
GREEDY = (0.0, -1, 1.0, 0.0)
MIXED = [
    GREEDY, (1.0, -1, 1.0, 0.0), (0.5, 5, 0.9, 0.0), (1e-9, -1, 1.0, 0.1), (1.0, 3, 0.5, 0.0), (1.0, -1, 0.8, 0.05), (2.0, 20, 0.7, 0.01),
    (1.0, 7, 0.99, 0.0), (0.7, 0, 0.95, 0.0), (1.3, 2099, 0.1, 0.0), (0.3, 2100, 0.0, 0.0), (1.0, 100, 1.0, 0.3), (1.7, 50, 0.9, 1.0),
]  # fmt: skip


def positions(count: int) -> torch.Tensor:
    return torch.arange(100, 100 + count, dtype=torch.int32, device=DEVICE)


def choose_rows(choose, logits: list[list[float]], *settings: tuple[float, int, float, float]) -> torch.Tensor:
    return choose(torch.tensor(logits, device=DEVICE), sampling_rows(*settings), positions(len(settings)))


@IMPLEMENTATIONS
def test_greedy_takes_the_lowest_of_equal_maxima(choose) -> None:
    chosen = choose_rows(choose, [[0.0, 3.0, 1.0, 3.0, 3.0], [-0.0, 0.0, -1.0, 0.0, -INF]], GREEDY, GREEDY)
    assert chosen.tolist() == [1, 0]


@IMPLEMENTATIONS
def test_a_row_with_nan_or_inf_or_nothing_has_no_choice(choose) -> None:
    logits = [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF] * 3, [-INF, 5.0, -INF]]
    for setting in (GREEDY, (1.0, 2, 0.9, 0.1)):
        chosen = choose_rows(choose, logits, *[setting] * 4)
        assert chosen.tolist() == [-1, -1, -1, 1]


@IMPLEMENTATIONS
def test_a_tiny_temperature_takes_the_maximum_of_huge_logits(choose) -> None:
    chosen = choose_rows(choose, [[-3e38, 3e38, 2e38], [1.0, 1.0, 1.5]], (1e-9, -1, 1.0, 0.0), (1e-9, 2, 0.5, 0.5))
    assert chosen.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("logits", "setting", "kept"),
    [
        ([1.0, 2.0, 2.0, 2.0, 0.0], (1.0, 2, 1.0, 0.0), {1, 2}),  # exactly k of the equal ones, lowest ids first
        ([2.0, 0.0, 2.0, 2.0, 2.0], (1.0, 4, 0.5, 0.0), {0, 2}),  # top-p cuts into the ties that top-k left
        ([2.0, 2.0, 2.0, 2.0, 2.0], (1.0, 3, 0.99, 0.0), {0, 1, 2}),  # and never past them
        ([1.0] * 8, (1.0, -1, 0.5, 0.0), {0, 1, 2, 3}),  # a sum that just reaches top_p is enough
        ([1.0] * 8, (1.0, -1, 0.51, 0.0), {0, 1, 2, 3, 4}),
        ([0.0, 5.0, 4.9], (1.0, -1, 0.0, 0.0), {1}),  # at least one
        ([0.0, 5.0, 4.9], (1.0, 1, 1.0, 0.0), {1}),
        ([np.log(0.5), np.log(0.25), np.log(0.2), np.log(0.05)], (1.0, -1, 1.0, 0.3), {0, 1, 2}),
        ([np.log(0.5), np.log(0.25), np.log(0.2), np.log(0.05)], (1.0, 3, 0.9, 0.0), {0, 1, 2}),  # of what top-k left: 0.75 / 0.95 < 0.9
        ([np.log(0.5), np.log(0.25), np.log(0.2), np.log(0.05)], (1.0, 3, 0.78, 0.0), {0, 1}),
        ([0.0, -0.0, -1.0], (1.0, 1, 1.0, 0.0), {0}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_should(logits: list[float], setting, kept: set[int]) -> None:
    temperature, top_k, top_p, min_p = setting
    sampling = many_samples(150, temperature, top_k, top_p, min_p)
    rows = torch.tensor(logits, dtype=torch.float32, device=DEVICE).repeat(150, 1)
    expected = choose_tokens_reference(rows, sampling, positions(150))
    assert set(expected.tolist()) == kept
    count = 150 if DEVICE == "cuda" else 4
    few = many_samples(count, temperature, top_k, top_p, min_p)
    assert torch.equal(choose_tokens_triton(rows[:count], few, positions(count)), expected[:count])


@IMPLEMENTATIONS
def test_a_row_does_not_depend_on_its_neighbours(choose) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sampling, position = sampling_rows(*MIXED[:6]), positions(6)
    together = choose(logits, sampling, position)
    for row in (1, 4):
        alone = replace(sampling, rows=sampling.rows[row : row + 1])
        assert choose(logits[row : row + 1], alone, position[row : row + 1]) == together[row]


@IMPLEMENTATIONS
def test_rows_of_logits_find_the_settings_of_their_row(choose) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    settings = sampling_rows(*MIXED[:5])
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    for_each = replace(settings, rows=rows.repeat_interleave(2))
    assert torch.equal(choose(logits, replace(settings, rows=rows, repeats=2), positions(6)), choose(logits, for_each, positions(6)))


@pytest.mark.parametrize(
    ("dtype", "kind", "settings"),
    [
        (torch.float32, "ties", MIXED),
        (torch.float32, "mostly -inf", MIXED[2:4]),
        (torch.float16, "distinct", MIXED[4:7]),
        (torch.bfloat16, "distinct", MIXED[:3]),
        (torch.bfloat16, "ties", MIXED[5:8]),
        (torch.float32, "chunks", [GREEDY, (1.0, -1, 1.0, 0.0), (0.4, -1, 1.0, 0.0), (1e-9, -1, 1.0, 0.0)]),
    ],
)
def test_the_kernel_equals_the_reference(dtype: torch.dtype, kind: str, settings: list) -> None:
    logits = 3 * torch.randn(len(settings), 9000 if kind == "chunks" else 2100, generator=torch.Generator().manual_seed(1))
    if kind in ("ties", "chunks"):
        logits = logits.round()
    if kind == "mostly -inf":
        logits[:, 3:] = -INF
    logits = logits.to(dtype).to(DEVICE)
    sampling, position = sampling_rows(*settings), positions(len(settings))
    out, expected = choose_tokens_triton(logits, sampling, position), choose_tokens_reference(logits, sampling, position)
    assert out.tolist() == expected.tolist()


def test_the_lowest_of_equal_maxima_wins_across_chunks_and_a_bad_chunk_spoils_the_row() -> None:
    logits = torch.zeros(4, 9000, device=DEVICE)
    logits[0, [8200, 4100, 8999]] = 1.0
    logits[1, 8500] = NAN
    logits[2, 4500] = INF
    logits[3, :8190] = -INF
    greedy = sampling_rows(*[GREEDY] * 4)
    assert choose_tokens_triton(logits, greedy, positions(4)).tolist() == [4100, -1, -1, 8190]
    plain = replace(greedy, temperature=torch.ones_like(greedy.temperature))
    out, expected = choose_tokens_triton(logits, plain, positions(4)), choose_tokens_reference(logits, plain, positions(4))
    assert out.tolist() == expected.tolist()


def test_hints_change_nothing_where_they_are_true() -> None:
    logits = torch.randn(6, 50, device=DEVICE)
    greedy, plain = sampling_rows(*[GREEDY] * 6), sampling_rows(*[(0.8, -1, 1.0, 0.0)] * 6)
    for sampling, hinted in (
        (greedy, replace(greedy, any_sampled=False, any_filtered=False)),
        (plain, replace(plain, any_filtered=False)),
    ):
        out, expected = (choose_tokens(logits, each, positions(6)) for each in (hinted, sampling))
        assert torch.equal(out, expected)


def test_rows_of_a_padded_head_are_read_with_their_stride() -> None:
    padded = torch.randn(4, 64, device=DEVICE)
    padded[:, 60:] = 100.0
    sampling = sampling_rows(*MIXED[:4])
    out, expected = (choose(padded[:, :60], sampling, positions(4)) for choose in (choose_tokens_triton, choose_tokens_reference))
    assert torch.equal(out, expected)


@IMPLEMENTATIONS
def test_no_rows_give_no_tokens(choose) -> None:
    empty = many_samples(0, 1.0)
    assert choose(torch.zeros(0, 8, device=DEVICE), empty, positions(0)).shape == (0,)


@IMPLEMENTATIONS
def test_settings_of_too_few_rows_are_a_value_error(choose) -> None:
    with pytest.raises(ValueError, match="do not fit 3 rows"):
        choose(torch.zeros(3, 8, device=DEVICE), sampling_rows(GREEDY, GREEDY), positions(3))


def test_the_exact_law_of_the_tests_is_right_where_it_is_obvious() -> None:
    logits = np.log([0.5, 0.25, 0.2, 0.05])
    np.testing.assert_allclose(exact_law(logits, 1.0), [0.5, 0.25, 0.2, 0.05])
    np.testing.assert_allclose(exact_law(logits, 1.0, top_k=2), [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(exact_law(logits, 1.0, top_p=0.8), [0.5 / 0.95, 0.25 / 0.95, 0.2 / 0.95, 0])
    np.testing.assert_allclose(exact_law(logits, 0.5, min_p=0.2), [0.8, 0.2, 0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
def test_the_compiled_kernel_equals_the_reference_on_real_vocabularies(dtype: torch.dtype, vocab_size: int) -> None:
    settings = MIXED * 16
    logits = (3 * torch.randn(len(settings), vocab_size, generator=torch.Generator().manual_seed(2))).to(dtype).to("cuda")
    sampling: SamplingTensors = sampling_rows(*settings)
    position = positions(len(settings))
    out, expected = choose_tokens_triton(logits, sampling, position), choose_tokens_reference(logits, sampling, position)
    # Approximate exp and log may decide a near-tie otherwise.
    assert (out != expected).float().mean() <= 0.01
    greedy = sampling.temperature == 0
    assert torch.equal(out[greedy], expected[greedy])
