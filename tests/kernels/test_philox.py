"""Philox draws against published vectors, Gumbel numbers against float64 and their law."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from eaglecli.kernels.philox import (
    gumbel_from_uint32,
    gumbel_noise,
    gumbel_noise_dense,
    gumbel_noise_reference,
    gumbel_noise_triton,
    gumbel_of_draw,
    philox4x32,
    philox_uint32,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-4 if DEVICE == "cuda" else 4e-6  # the GPU's logarithm is approximate
EDGE_DRAWS = [0, 1, 2**24 - 1, 2**24, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]


def rows(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds of both signs, sample numbers, positions."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    sample = torch.randint(0, 2**31 - 1, (num_rows,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, 131_072, (num_rows,), generator=generator, dtype=torch.int32)
    return seeds.to(DEVICE), sample.to(DEVICE), position.to(DEVICE)


@triton.jit
def _gumbel_of_draw_kernel(draw_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, gumbel_of_draw(tl.load(draw_ptr + index).to(tl.uint32)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: list[int], key: list[int], expected: str) -> None:
    lanes = philox4x32(*(torch.tensor([word]) for word in counter + key))
    assert " ".join(f"{lane.item():08x}" for lane in lanes) == expected


def test_the_key_is_the_seed_and_the_counter_is_token_group_position_sample() -> None:
    seed, sample, position, token = 0x0123456789ABCDEF, 7, 1000, 4 * 31_000 + 2
    lanes = philox4x32(*(torch.tensor([word]) for word in (31_000, position, sample, 0, 0x89ABCDEF, 0x01234567)))
    draw = philox_uint32(torch.tensor([seed]), torch.tensor([sample]).int(), torch.tensor([position]).int(), torch.tensor([token]))
    assert draw.item() == lanes[2].item()


def test_noise_differs_between_seeds_samples_positions_and_tokens() -> None:
    seed, sample, position = torch.tensor([1, 2, 1, 1, 1 + 2**32]), torch.tensor([0, 0, 1, 0, 0]).int(), torch.tensor([5, 5, 5, 6, 5]).int()
    draws = philox_uint32(seed, sample, position, torch.arange(8))
    assert draws.unique().numel() == draws.numel()


def test_shared_ids_row_ids_and_the_dense_path_agree() -> None:
    seed, sample, position = rows(3)
    ids = torch.arange(37, device=DEVICE)
    shared = gumbel_noise(seed, sample, position, ids)
    assert torch.equal(shared, gumbel_noise(seed, sample, position, ids.repeat(3, 1)))
    torch.testing.assert_close(gumbel_noise_dense(seed, sample, position, 37), shared, rtol=0, atol=NEAR)


def test_gumbel_numbers_equal_float64_over_the_whole_range() -> None:
    draws = np.concatenate([EDGE_DRAWS, np.random.default_rng(0).integers(0, 2**32, 10_000), 2 ** np.arange(32)])
    v = np.minimum((draws + 0.5) * 2.0**-32, 1 - 2.0**-24)
    out = gumbel_from_uint32(torch.from_numpy(draws)).double().numpy()
    assert np.abs(out + np.log(-np.log1p(-v))).max() < 1e-4


def test_the_extreme_draws_give_finite_noise() -> None:
    draws = torch.tensor(EDGE_DRAWS)
    reference = gumbel_from_uint32(draws)
    assert reference.isfinite().all()
    assert reference[0] > 22.0 and reference[-1] < -2.8
    out = torch.empty(8, device=DEVICE)
    _gumbel_of_draw_kernel[(1,)](draws.to(DEVICE), out, BLOCK=8)
    torch.testing.assert_close(out.cpu(), reference, rtol=0, atol=NEAR)


@pytest.mark.parametrize("vocab_size", [1, 6, 1024, 1027])
def test_the_dense_kernel_equals_the_reference(vocab_size: int) -> None:
    seed, sample, position = rows(3, seed=1)
    expected = gumbel_noise_reference(seed, sample, position, torch.arange(vocab_size, device=DEVICE))
    torch.testing.assert_close(gumbel_noise_triton(seed, sample, position, None, vocab_size), expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize("per_row", [False, True])
def test_the_kernel_on_scattered_ids_equals_the_reference(per_row: bool) -> None:
    seed, sample, position = rows(3, seed=2)
    ids = torch.randint(0, 200_000, (3, 50) if per_row else (50,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = gumbel_noise_reference(seed, sample, position, ids)
    torch.testing.assert_close(gumbel_noise_triton(seed, sample, position, ids, 50), expected, rtol=0, atol=NEAR)


def test_a_sample_number_of_another_dtype_is_a_value_error() -> None:
    seed, sample, position = rows(2)
    with pytest.raises(ValueError, match="sample"):
        gumbel_noise_triton(seed, sample.long(), position, None, 8)


def assert_gumbel_law(num_rows: int) -> None:
    """Counts beyond thresholds on both sides lie within five standard deviations: num_rows x 10^6 draws."""
    thresholds = torch.tensor([-2.5, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0], device=DEVICE)
    counts = torch.zeros(len(thresholds), dtype=torch.float64, device=DEVICE)
    for row in range(num_rows):
        noise = gumbel_noise_dense(
            torch.tensor([11], device=DEVICE), torch.tensor([0], device=DEVICE).int(), torch.tensor([row], device=DEVICE).int(), 10**6
        )[0]
        counts += torch.stack([(noise > threshold).sum() for threshold in thresholds])
    num_draws = num_rows * 10**6
    above = -np.expm1(-np.exp(-thresholds.double().cpu().numpy()))
    deviation = (counts.cpu().numpy() - num_draws * above) / np.sqrt(num_draws * above * (1 - above))
    assert np.abs(deviation).max() < 5.0, deviation


def test_ten_million_draws_follow_the_gumbel_law_into_the_tails() -> None:
    assert_gumbel_law(10)


@pytest.mark.slow
def test_a_hundred_million_draws_follow_the_gumbel_law_into_the_tails() -> None:
    assert_gumbel_law(100)
