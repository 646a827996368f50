"""What a difference is called, on answers that were changed by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from eaglecli.engine.draft import EagleDrafter
from eaglecli.verification import reference_run
from eaglecli.verification.checks import check_balance
from eaglecli.verification.difference import judge
from eaglecli.verification.report import Findings
from tests.engine.harness import LoadedPair
from tests.verification.small_run import Size, examined, generate

CHAIN = (3, 1, 4)
SMALL = Size(2, 10)


@pytest.fixture(scope="module")
def runs(twin: LoadedPair):
    return generate(twin, None, SMALL), generate(twin, CHAIN, SMALL)


def changed(completions: dict, key: int, **fields: object) -> dict:
    return {**completions, key: dataclasses.replace(completions[key], **fields)}


def other_token(completions: dict, key: int, place: int, token: int) -> dict:
    ids = completions[key].output_ids.copy()
    ids[place] = token
    return changed(completions, key, output_ids=ids)


def kinds(found: Findings, check: str) -> list[str]:
    return [item.kind for item in found.differences if item.check == check]


@pytest.mark.parametrize(
    ("gap", "limit", "kind"),
    [(0.0, 0.0, "tie"), (5e-4, 1e-3, "numeric"), (1e-3, 1e-3, "bug"), (float("nan"), 1.0, "bug"), (1e-9, 0.0, "bug")],
)
def test_a_difference_has_a_name(gap, limit, kind):
    assert judge(gap, limit) == kind


@pytest.mark.parametrize("key", [0, 1], ids=["greedy", "sampled"])
def test_another_token_is_a_bug_in_the_text_and_of_the_choice(twin, runs, key):
    plain, drafted = runs
    token = (int(drafted[key].output_ids[4]) + 1) % 256
    found = examined(twin, CHAIN, plain, other_token(drafted, key, 4, token))
    assert not found.is_good and found.num_equal == found.num_texts - 1
    (difference,) = (item for item in found.differences if item.check == "text")
    assert (difference.place, difference.key, difference.kind) == (4, key, "bug")
    assert difference.gap > 1e-3 == difference.limit
    assert "bug" in kinds(found, "choice")


def test_the_same_difference_is_numeric_where_numbers_move_that_much_B29(twin, runs, monkeypatch):
    plain, drafted = runs
    monkeypatch.setattr(reference_run, "LEAST_LIMIT", 100.0)
    token = (int(drafted[0].output_ids[4]) + 1) % 256
    found = examined(twin, CHAIN, plain, other_token(drafted, 0, 4, token))
    assert kinds(found, "text") == ["numeric"]
    assert found.is_good and found.to_json()["counts"]["text"] == {"tie": 0, "numeric": 1, "bug": 0}


def test_a_draft_that_is_fed_wrongly_is_found_even_if_every_step_can_be_excused(twin, runs, monkeypatch):
    monkeypatch.setattr(reference_run, "LEAST_LIMIT", 1e6)
    monkeypatch.setattr(EagleDrafter, "extend", lambda *_: None)
    size = Size(3, 24)
    found = examined(twin, CHAIN, generate(twin, None, size), generate(twin, CHAIN, size))
    assert set(kinds(found, "acceptance")) == {"numeric"}
    assert found.num_fewer > 10 * found.num_more
    assert kinds(found, "balance") == ["bug"] and not found.is_good


@pytest.mark.parametrize(
    ("fewer", "more", "found"),
    [
        *[(0, 0, 0), (20, 0, 0), (21, 0, 1), (0, 21, 1), (60, 40, 0), (300, 180, 1)],
        *[(520, 510, 0), (25_300, 24_700, 0), (26_000, 24_000, 1)],  # past the largest float
    ],
)
def test_a_balance_is_lost_only_when_chance_cannot_do_it(fewer, more, found):
    assert len(list(check_balance(fewer, more))) == found


def test_two_candidates_of_one_score_are_a_tie(twin, runs):
    plain, drafted = runs
    head = twin.target.model.head_weight
    token = int(drafted[0].output_ids[-1])
    twin_token = next(other for other in range(256) if other not in drafted[0].output_ids)
    saved = head[twin_token].clone()
    head.data[twin_token] = head.data[token]
    try:
        found = examined(twin, CHAIN, plain, other_token(drafted, 0, len(drafted[0].output_ids) - 1, twin_token))
    finally:
        head.data[twin_token] = saved
    assert kinds(found, "text") == ["tie"]


def test_a_text_that_ends_early_is_a_bug(twin, runs):
    plain, drafted = runs
    shorter = plain[0].output_ids[:-1]
    found = examined(twin, CHAIN, changed(plain, 0, output_ids=shorter, num_verify_steps=8, accept_counts=np.zeros(8, np.int16)), drafted)
    assert kinds(found, "text") == ["bug"]


def test_counts_that_do_not_close_are_a_bug(twin, runs):
    plain, drafted = runs
    found = examined(twin, CHAIN, plain, changed(drafted, 0, num_accepted_drafts=drafted[0].num_accepted_drafts + 1))
    assert kinds(found, "counts") == ["bug"]


def test_an_answer_that_ended_in_an_error_is_not_verified(twin, runs):
    plain, drafted = runs
    found = examined(twin, CHAIN, plain, changed(drafted, 0, error="the target's logits are not finite after 3 tokens"))
    assert not found.is_good
    assert found.errors == ["prompt 0: the target's logits are not finite after 3 tokens"]
    assert found.num_texts == len(plain) - 1


def test_bad_numbers_of_the_draft_are_no_bug_B44(twin):
    """They cost acceptance, and the tree is grown again with the same ones."""
    weight = twin.draft.model.fc_weight
    saved = weight.clone()
    weight.data[3, 5] = torch.nan
    try:
        found = examined(twin, (2, 2, 5), generate(twin, None, SMALL), generate(twin, (2, 2, 5), SMALL))
    finally:
        weight.data.copy_(saved)
    assert found.is_good and found.num_equal == found.num_texts
