"""Time left, by iterations and tokens."""

import pytest

from eaglecli.io.eta import EtaEstimator, Workload, clock


def work(iterations: int, tokens: int, left: float | None = 0.0, steps: float = 0.0, rows: int = 10, **more: float) -> Workload:
    return Workload(iterations, rows * iterations, 0, tokens, num_remaining_tokens=left, num_remaining_row_steps=steps, **more)


def test_a_steady_pace_gives_what_is_left_over_the_pace():
    eta = EtaEstimator(100.0)
    for second in range(1, 60):
        left = eta.seconds_left(work(5 * second, 50 * second, left=50.0 * (100 - second), steps=5.0 * (100 - second)), 100.0 + second)
        assert left == pytest.approx(100 - second)


def test_the_pace_of_late_counts_not_that_of_the_start():
    eta, iterations = EtaEstimator(0.0), 0
    for second in range(1, 201):
        iterations += 1 if second <= 100 else 100
        left = eta.seconds_left(work(iterations, 10 * iterations, left=10000.0, steps=1000.0), float(second))
    assert left == pytest.approx(10.0)


@pytest.mark.parametrize(("per_iteration", "per_token"), [(1.0, 0.0), (0.0, 0.1), (0.5, 0.05)])
def test_what_iterations_and_tokens_take_is_told_apart_when_batches_differ(per_iteration, per_token):
    eta, now, iterations, tokens, left = EtaEstimator(0.0), 0.0, 0, 0, None
    for step in range(100):
        num_rows = 2 if step // 10 % 2 else 30
        iterations, tokens = iterations + 1, tokens + num_rows
        now += per_iteration + per_token * num_rows
        left = eta.seconds_left(Workload(iterations, tokens, 0, tokens, 500.0, 0.0, 100.0), now)
    assert left == pytest.approx(100 * per_iteration + 500 * per_token, rel=0.1)


def test_prompts_still_to_come_take_time():
    without, with_prompts = (
        EtaEstimator(0.0).seconds_left(work(10, 100, left=100.0, steps=10.0, num_remaining_prompt_tokens=prompt), 10.0)
        for prompt in (0.0, 1000.0)
    )
    assert with_prompts > without > 0


def test_before_the_first_token_and_of_a_stream_nobody_knows():
    eta = EtaEstimator(0.0)
    assert eta.seconds_left(work(0, 0, left=100.0), 5.0) is None
    assert eta.seconds_left(work(1, 10, left=None), 6.0) is None


def test_memory_does_not_grow_with_the_time_that_a_run_takes():
    eta = EtaEstimator(0.0)
    for second in range(1, 20000):
        eta._take(work(second, second), float(second))
    assert len(eta._samples) < 500


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (360000, "100:00:00")])
def test_time_reads_as_a_clock(seconds, text):
    assert clock(seconds) == text
