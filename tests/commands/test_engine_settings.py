"""The settings of an engine, from those of a run: what it must hold for what is asked, within the memory that is there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eaglecli.commands import _engine_settings
from eaglecli.commands._engine_settings import engine_settings
from eaglecli.commands._open_engine import NO_NEEDS
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.config import resolve_settings, shipped_shapes
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.sampling_options import SamplingNeeds
from eaglecli.models.loader import read_target_description

CHAIN = SpeculationPlan(SpeculationSettings(3, 1, 4))
ROWS, PAGE, CONTEXT = 4, 16, 100
TINY = read_target_description(shipped_shapes()["tiny"])
SLOT_BYTES = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4


def settings_for(
    vocab_size: int = TINY.vocab_size, plan: SpeculationPlan = CHAIN, needs: SamplingNeeds = NO_NEEDS, longest: int | None = None
) -> EngineSettings:
    """Of a tiny target in float32, without a draft."""
    given = {"target": "tiny", "max_running_requests": ROWS, "page_size": PAGE, "context_length": CONTEXT}
    settings = resolve_settings(given, None, lambda _: "cpu")
    target = SimpleNamespace(config=replace(TINY, vocab_size=vocab_size), model=SimpleNamespace(dtype=torch.float32))
    return engine_settings(settings, target, None, plan, needs, (), longest)


def have_memory_for(monkeypatch: pytest.MonkeyPatch, num_slots: int, other_bytes: int = 0) -> None:
    monkeypatch.setattr(_engine_settings, "_free_bytes", lambda settings: num_slots * SLOT_BYTES + other_bytes)


@pytest.mark.parametrize(("num_wanted", "vocab_size", "expected"), [(None, 10, None), (5, 10, 5), (20, 10, 10)])
def test_no_more_log_probabilities_are_given_than_there_are_tokens(num_wanted, vocab_size, expected):
    assert settings_for(vocab_size, needs=SamplingNeeds(max_logprobs=num_wanted)).max_logprobs == expected


def test_the_cache_holds_every_row_at_its_longest_and_no_more(monkeypatch):
    have_memory_for(monkeypatch, 10_000)
    assert settings_for().max_total_tokens == ROWS * 112 + PAGE
    assert settings_for(longest=40).max_total_tokens == ROWS * 48 + PAGE
    assert settings_for(longest=45).max_total_tokens == ROWS * 64 + PAGE, "4 slots past the row's length may be written"
    assert settings_for(plan=SpeculationPlan(PLAIN), longest=47).max_total_tokens == ROWS * 48 + PAGE


def test_a_smaller_cache_is_made_where_memory_is_short_beside_the_tables_for_penalties(monkeypatch):
    have_memory_for(monkeypatch, 200, other_bytes=(ROWS + 1) * TINY.vocab_size * _engine_settings.BYTES_PER_ENTRY)
    assert settings_for(needs=SamplingNeeds(adjusts_logits=True)).max_total_tokens == 200
    assert settings_for().max_total_tokens > 200


def test_a_cache_that_holds_nothing_of_use_is_refused(monkeypatch):
    """A page is of use where the lengths are unknown; else a row of the longest must fit."""
    have_memory_for(monkeypatch, PAGE)
    assert settings_for().max_total_tokens == PAGE
    with pytest.raises(UserError) as raised:
        settings_for(longest=40)
    assert raised.value.exit_code == ExitCode.MEMORY
    have_memory_for(monkeypatch, PAGE - 1)
    with pytest.raises(UserError):
        settings_for()
