"""Attention backends are told apart by what they declare, never by name."""

import dataclasses

import pytest
import torch

from eaglecli.engine.attention_backend import BACKENDS, TORCH, TRITON, default_backend
from eaglecli.engine.engine import Engine
from eaglecli.engine.settings import EngineSettings, SpeculationSettings
from eaglecli.errors import UserError
from eaglecli.kernels.attention import attention_reference, attention_triton
from eaglecli.kernels.qkv_attention import qkv_attention_reference, qkv_attention_triton
from tests.engine.harness import LoadedPair, mixed_requests, outcomes, run

CPU = torch.device("cpu")


def engine_with(pair: LoadedPair, attention) -> Engine:
    settings = EngineSettings(context_length=128, max_total_tokens=4096, speculation=SpeculationSettings(3, 2, 6))
    return Engine(pair.target.model, pair.draft.model, settings, attention)


def test_the_default_goes_by_the_device():
    assert default_backend(CPU) is TORCH
    assert default_backend(torch.device("cuda")) is TRITON
    assert set(BACKENDS) == {"torch", "triton"}


@pytest.mark.parametrize("attention", [TRITON, dataclasses.replace(TORCH, accepts_slot_table=False)], ids=lambda backend: backend.name)
def test_a_backend_that_needs_what_is_not_there_is_refused(twin: LoadedPair, attention):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--attention-backend"):
            engine_with(twin, attention)


@pytest.mark.parametrize("needs_host_lengths", [True, False])
def test_only_a_backend_without_need_of_host_lengths_has_an_iteration_in_flight(twin: LoadedPair, needs_host_lengths):
    engine = engine_with(twin, dataclasses.replace(TORCH, needs_host_lengths=needs_host_lengths))
    for request in mixed_requests(4, max_prompt=20):
        engine.add(request)
    pending = []
    while not engine.is_idle:
        engine.step()
        pending.append(len(engine._readback._pending))
    assert max(pending) == (0 if needs_host_lengths else 1)
    assert not engine.can_capture or torch.cuda.is_available()


def test_overlapped_iterations_give_the_same_text(twin: LoadedPair):
    """The host's bound of lengths holds with an iteration in flight; the rows run in vain are counted."""
    requests = mixed_requests(12, seed=11, max_prompt=30, max_cap=20, stop_token_ids=tuple(range(0, 320, 20)))
    lengths = []

    def attend(q, k_cache, v_cache, inputs, scale, window):
        lengths.append(inputs.max_prefix_len - int(inputs.prefix_lens.max()))
        return attention_reference(q, k_cache, v_cache, inputs, scale, window)

    expected = outcomes(run(engine_with(twin, TORCH), requests))
    overlapped = engine_with(twin, dataclasses.replace(TORCH, needs_host_lengths=False, attend=attend))
    assert outcomes(run(overlapped, requests)) == expected
    assert min(lengths) >= 0 and max(lengths) > 0
    assert overlapped.counts.num_wasted_row_steps > 0


def test_the_chosen_backend_computes_every_forward(twin: LoadedPair):
    engine_calls = []

    def attend(*arguments):
        engine_calls.append(arguments[3].max_query_len)
        return attention_reference(*arguments)

    engine = engine_with(twin, dataclasses.replace(TORCH, name="own", attend=attend))
    run(engine, mixed_requests(2, max_prompt=9, max_cap=8))
    assert {2, 6, 4} <= set(engine_calls)  # tree steps, verify, extend; and the prompts
    assert engine.summary()["attention_backend"] == "own"


def test_stages_rotate_and_store_with_attention_where_a_backend_can_but_prompts_do_not(twin: LoadedPair):
    """Segments of a prompt see what others store in the same forward."""
    requests = mixed_requests(6, seed=7, max_prompt=30, max_cap=12)
    expected = outcomes(run(engine_with(twin, TORCH), requests))
    lengths = []

    def attend_qkv(*arguments):
        lengths.append(arguments[5].max_query_len)
        return qkv_attention_reference(*arguments)

    engine = engine_with(twin, dataclasses.replace(TORCH, attend_qkv=attend_qkv))
    assert outcomes(run(engine, requests)) == expected
    assert {*lengths} == {2, 6, 4}  # tree steps, verify, extend
    assert engine.check_stages(3, seed=0).is_exact


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default there, which all other tests run")
def test_the_compiled_backends_launches_give_the_same_text_when_interpreted(twin: LoadedPair):
    requests = mixed_requests(2, seed=3, max_prompt=20, max_cap=6)
    expected = outcomes(run(engine_with(twin, TORCH), requests))
    interpreted = dataclasses.replace(TRITON, attend=attention_triton, attend_qkv=qkv_attention_triton, needs_cuda=False)
    assert outcomes(run(engine_with(twin, interpreted), requests)) == expected
