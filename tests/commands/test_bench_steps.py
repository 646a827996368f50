"""Which steps of a pass are decode steps of a full batch."""

import pytest

from eaglecli.commands._bench_run import Pass, StepLog
from eaglecli.io.accept_statistics import AcceptTotals


@pytest.mark.parametrize(("runs_ahead", "expected"), [(False, [1.0, 2.0, 4.0]), (True, [1.0, 4.0])])
def test_where_a_step_waits_for_the_one_before_the_one_after_a_prefill_is_left_out_too(runs_ahead, expected):
    log = StepLog()
    #         seconds, requests, prompt tokens, output tokens of each step: prefills in steps 0 and 3
    for step in [(9.0, 2, 8, 2), (5.0, 2, 0, 2), (1.0, 2, 0, 2), (8.0, 2, 4, 2), (2.0, 2, 0, 2), (4.0, 2, 0, 2), (3.0, 1, 0, 1)]:
        before = [values[-1] if values else 0 for values in (log.end_s, log.prompt_tokens, log.output_tokens)]
        log.end_s.append(before[0] + step[0])
        log.in_flight.append(step[1])
        log.prompt_tokens.append(before[1] + step[2])
        log.output_tokens.append(before[2] + step[3])
    window = Pass((), AcceptTotals(1), log, 32.0, 0.0, 0.0, 7, runs_ahead).steady_window(2)
    assert window.decode_step_s.tolist() == expected
    assert (window.seconds, window.num_steps, window.num_output_tokens) == (15.0, 4, 8)
