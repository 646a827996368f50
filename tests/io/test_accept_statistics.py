"""Every formula by hand on small counts; the worked example that tells six tools apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglecli.io.accept_statistics import DEFINITIONS, AcceptTotals, AnswerCounts, describe_answer


def answer(accepts: list[int], cut: int = 0, proposed_per_step: int = 4, **extra) -> AnswerCounts:
    steps, accepted = len(accepts), sum(accepts)
    return AnswerCounts(1 + accepted + steps - cut, steps, accepted, proposed_per_step * steps, cut, np.array(accepts, np.int16), **extra)


def totals(*answers: AnswerCounts, num_steps: int = 4) -> AcceptTotals:
    result = AcceptTotals(num_steps)
    for counts in answers:
        result.add(counts)
    return result


def test_the_worked_example_has_one_value_for_each_formula_in_use():
    described = totals(answer([2] * 50), answer([1] * 5)).describe()
    assert described["accept_length"] == pytest.approx(160 / 55)
    assert described["accept_length_delivered"] == pytest.approx(162 / 55)
    assert described["accept_length_macro"] == pytest.approx((151 / 50 + 11 / 5) / 2)
    assert described["accept_length_trt"] == pytest.approx((151 / 51 + 11 / 6) / 2)


def test_what_a_run_says_are_figures_each_of_which_is_defined():
    described = totals(answer([2, 1])).describe()
    assert not [name for name, value in described.items() if isinstance(value, str)]
    undefined = set(described) - set(DEFINITIONS) - {"identity"}
    assert undefined <= {"spec_num_correct_drafts", "spec_verify_ct", "spec_num_cut_tokens"}  # defined under their letters


def test_one_record_carries_the_counts_that_reproduce_its_ratios():
    spec = describe_answer(answer([4, 0, 2], cut=1), num_steps=4)
    assert (spec["spec_verify_ct"], spec["spec_num_correct_drafts"], spec["spec_num_cut_tokens"]) == (3, 6, 1)
    assert spec["accept_length"] == 3.0
    assert spec["spec_accept_length"] == pytest.approx(9 / 3)
    assert spec["accept_length_trt"] == pytest.approx(9 / 4)
    assert spec["spec_accept_rate"] == pytest.approx(6 / 12)
    assert spec["depth_accept_rate"] == pytest.approx(6 / 12)
    assert spec["spec_correct_drafts_histogram"] == [1, 0, 1, 0, 1]
    assert spec["accept_rate_per_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_in_a_tree_the_accept_rate_divides_by_nodes_and_the_depth_rate_by_steps():
    spec = describe_answer(answer([2, 2], proposed_per_step=15), num_steps=4)
    assert spec["spec_accept_rate"] == pytest.approx(4 / 30)
    assert spec["depth_accept_rate"] == pytest.approx(4 / 8)


def test_an_answer_of_the_prefill_token_alone_has_no_ratios_and_divides_by_nothing():
    spec = describe_answer(answer([]), num_steps=4)
    assert spec["accept_length"] is None
    assert spec["accept_rate_per_position"] == []
    assert totals(answer([])).describe()["accept_length"] is None


def test_counts_that_do_not_close_are_flagged():
    wrong = AnswerCounts(10, 2, 4, 8, 0, np.array([2, 2]))
    assert totals(answer([2, 2]), wrong).describe()["identity"] == {"holds": False, "num_violations": 1}


@pytest.mark.parametrize(("end", "length"), [(0, None), (1, 5.0), (5, 5.0), (6, 3.0), (None, 11 / 3)])
def test_the_length_to_the_end_token_counts_steps_up_to_the_one_that_delivers_it(end, length):
    described = totals(answer([4, 0, 4], first_end_position=end)).describe()
    assert described["accept_length_to_eos"] == (None if length is None else pytest.approx(length))


@given(st.lists(st.lists(st.integers(0, 4), max_size=20), max_size=6))
def test_rates_never_rise_with_the_position_and_the_length_stays_within_its_bounds(runs):
    described = totals(*(answer(accepts) for accepts in runs)).describe()
    rates = described["accept_rate_per_position"]
    assert rates == sorted(rates, reverse=True)
    assert described["identity"]["holds"]
    if described["accept_length"] is not None:
        assert 1 <= described["accept_length"] <= 5
        assert described["accept_length"] == pytest.approx(1 + sum(rates))
