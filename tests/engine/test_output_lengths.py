"""Expected lengths of outputs from finished, cut and unfinished ones."""

import numpy as np
import pytest

from eaglecli.engine.output_lengths import OutputLengths

LONGEST = 4096


def learnt(lengths: np.ndarray, cap: int, running: np.ndarray | None = None) -> OutputLengths:
    table = OutputLengths(LONGEST)
    for length in lengths:
        table.observe(int(min(length, cap)), bool(length <= cap))
    table.refresh(np.zeros(0, np.int64) if running is None else running)
    return table


def remaining(table: OutputLengths, done: int, cap: int) -> float:
    return float(table.remaining(np.array([done]), np.array([cap]))[0])


def test_before_anything_was_seen_an_output_runs_to_its_cap():
    table = OutputLengths(LONGEST)
    assert table.expected(512) == 512
    assert remaining(table, 100, 512) == 412


@pytest.mark.parametrize("mean", [3, 40, 300])
@pytest.mark.parametrize("cap", [16, 256, 4096])
def test_the_mean_under_any_cap_is_found_from_outputs_cut_at_another(mean, cap):
    lengths = np.random.default_rng(0).geometric(1 / mean, 3000)
    table = learnt(lengths, cap=max(cap, 256))
    assert table.expected(cap) == pytest.approx(np.minimum(lengths, cap).mean(), rel=0.1, abs=0.6)


def test_what_is_left_counts_from_the_length_reached():
    lengths = np.concatenate([np.full(500, 20), np.full(500, 1000)])
    table = learnt(lengths, LONGEST)
    assert table.expected(2000) == pytest.approx(510, rel=0.1)
    assert remaining(table, 100, 2000) == pytest.approx(900, rel=0.15)


def test_outputs_that_go_on_keep_the_first_finished_ones_from_making_all_look_short():
    finished = np.full(20, 10)
    assert learnt(finished, LONGEST, running=np.full(60, 200)).expected(512) > 5 * learnt(finished, LONGEST).expected(512) / 2


@pytest.mark.parametrize("done", [0, 7, 4000, 4096])
def test_an_output_that_goes_on_has_a_token_to_come_and_none_past_its_cap(done):
    table = learnt(np.full(5000, 3), LONGEST)
    assert 1 <= remaining(table, done, LONGEST) <= max(1, LONGEST - done)


def test_the_table_is_made_anew_when_a_quarter_more_was_seen():
    table = OutputLengths(LONGEST)
    nobody = np.zeros(0, np.int64)
    assert not table.refresh(nobody)
    num_refreshes = 0
    for _ in range(2000):
        table.observe(10, True)
        num_refreshes += table.refresh(nobody)
    assert 15 < num_refreshes < 45
    assert table.expected(512) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("done", [0, 30, 200])
def test_tokens_summed_over_the_steps_that_they_are_kept_for_are_half_of_the_mean_square(done):
    lengths = np.random.default_rng(1).geometric(1 / 100, 5000)
    left = np.minimum(lengths[lengths > done], 400) - done
    found = learnt(lengths, LONGEST).token_steps(np.array([done]), np.array([400]))
    assert found[0] == pytest.approx((left**2 / 2).mean(), rel=0.15)
