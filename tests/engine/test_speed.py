"""Floors, clocks and simulated acceptance: what a bench knows from the engine."""

import numpy as np
import pytest
import torch

from eaglecli.commands._bench_run import in_simulated_step
from eaglecli.config import shipped_shapes
from eaglecli.engine.device_speed import DeviceSpeed, measure_device
from eaglecli.engine.floor import iteration_work
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.engine.stage_clock import StageClock
from eaglecli.errors import UserError
from eaglecli.models.draft_fit import shape_only_model
from eaglecli.models.dummy_draft import build_dummy_draft, dummy_draft_fit
from eaglecli.models.eagle3 import Eagle3Draft
from eaglecli.models.loader import load_target, read_target_description
from eaglecli.models.rope import RopeTables
from eaglecli.models.target import TargetModel
from tests.engine.harness import DEVICE, LoadedPair, make_engine, random_prompts, requests_of, run

FAST_PRODUCTS = DeviceSpeed(copy_bytes_per_s=1.0, weight_bytes_per_s=4.8e12, flops=1e30)


def llama_8b() -> tuple[TargetModel, Eagle3Draft]:
    """Shapes without memory."""
    config = read_target_description(shipped_shapes()["llama-3.1-8b"])
    fit = dummy_draft_fit(config)
    nothing = torch.empty(0, config.hidden_size, device="meta")
    head = torch.empty(fit.num_head_rows, config.hidden_size, dtype=torch.bfloat16, device="meta")
    draft = Eagle3Draft(fit.config, RopeTables(nothing, nothing), nothing, head, None, torch.bfloat16, "meta")
    return TargetModel(config, torch.bfloat16, "meta", 16, own_head=True), draft


def test_the_floor_of_a_known_model_is_the_one_worked_out_by_hand():
    """Llama-3.1-8B on an H200 at full bandwidth: 3.13 ms plain, 3.62, 3.93 and 4.24 ms with 3, 5 and 7 steps."""
    target, draft = llama_8b()
    plain = iteration_work(target, None, PLAIN)
    assert plain.weight_bytes == pytest.approx(15.01e9, rel=0.001)
    assert plain.floor_s(FAST_PRODUCTS, 1, 0, 1.0) * 1e3 == pytest.approx(3.13, abs=0.005)
    for num_steps, expected_ms in ((3, 3.62), (5, 3.93), (7, 4.24)):
        work = iteration_work(target, draft, SpeculationSettings(num_steps, 1, num_steps + 1))
        assert work.floor_s(FAST_PRODUCTS, 1, 0, 1.0) * 1e3 == pytest.approx(expected_ms, abs=0.01)


def test_a_large_batch_is_bound_by_its_products_and_a_long_context_by_its_cache():
    target, _ = llama_8b()
    plain = iteration_work(target, None, PLAIN)
    assert plain.target.cache_bytes_per_token == 131_072
    slow_products = DeviceSpeed(1.0, 1e30, 1e12)
    assert plain.floor_s(slow_products, 256, 0, 1.0) == pytest.approx(256 * 2 * 15.01e9 / 2 / 1e12, rel=0.001)
    more = plain.floor_s(FAST_PRODUCTS, 8, 1000, 1.0) - plain.floor_s(FAST_PRODUCTS, 8, 0, 1.0)
    assert more == pytest.approx(8 * 1000 * 131_072 / 4.8e12)


def test_an_eagle_1_draft_reads_its_fc_in_every_step(twin: LoadedPair, e3: LoadedPair):
    for pair, every_step in ((twin, True), (e3, False)):
        work = iteration_work(pair.target.model, pair.draft.model, SpeculationSettings(3, 1, 4))
        fc = pair.draft.model.checkpoint_views()["fc.weight"].numel()
        assert work.draft.num_fc_values == (fc if every_step else 0)
        assert work.extend.num_fc_values == fc


def test_the_dummy_draft_has_the_shapes_of_its_description():
    target = load_target(shipped_shapes()["tiny"], torch.float32, DEVICE, 64, "dummy")
    fit = dummy_draft_fit(target.config)
    expected = {name: view.shape for name, view in shape_only_model(fit.config).checkpoint_views().items()}
    draft = build_dummy_draft(fit, target, torch.float32, DEVICE, 64)
    assert {name: view.shape for name, view in draft.model.checkpoint_views().items()} == expected
    assert all(torch.isfinite(view).all() for view in draft.model.checkpoint_views().values())


def test_the_device_has_a_speed():
    speed = measure_device(DEVICE, torch.float32)
    assert min(speed.copy_bytes_per_s, speed.weight_bytes_per_s, speed.flops) > 1e6


@pytest.mark.parametrize("triple", [(5, 1, 6), (4, 2, 10)])
def test_simulated_steps_have_the_mean_that_was_asked_for_and_counts_close(e3: LoadedPair, triple):
    engine = make_engine(e3.target, e3.draft, triple, max_running_requests=3, simulated_accept_length=2.5)
    requests = in_simulated_step(requests_of(random_prompts([9, 20, 33, 5]), max_new_tokens=51), 2.5)
    found = run(engine, requests)
    for completion in found.values():
        assert len(completion.output_ids) == 51
        assert set(completion.accept_counts[:-1].tolist()) <= {1, 2}
        assert abs(1 + completion.accept_counts.mean() - 2.5) <= 0.06


def test_a_simulated_length_out_of_reach_is_refused():
    for length in (0.9, 4.1):
        with pytest.raises(UserError, match="--simulate-acc-len"):
            EngineSettings(64, 64, speculation=SpeculationSettings(3, 1, 4), simulated_accept_length=length)


def test_a_clock_sees_every_stage_once_an_iteration_and_none_without_it(e3: LoadedPair):
    engine = make_engine(e3.target, e3.draft, (3, 1, 4), max_running_requests=2)
    clock = StageClock(DEVICE)
    engine.measure_stages(clock)
    run(engine, requests_of(random_prompts([4, 40]), max_new_tokens=9))
    engine.measure_stages(None)
    spans, num_iterations = clock.spans(), engine.counts.num_iterations
    assert {name: len(span.seconds) for name, span in spans.items()} == {
        "prefill": 1,
        "draft": num_iterations,
        "verify": num_iterations,
        "extend": num_iterations,
    }
    assert all((span.seconds > 0).all() for span in spans.values())
    assert np.all(spans["draft"].end_s <= spans["verify"].begin_s + 1e-5)
    run(engine, requests_of(random_prompts([4]), max_new_tokens=9))
    assert len(clock.spans()["verify"].seconds) == num_iterations


def test_output_tokens_are_counted_as_they_are_delivered(e3: LoadedPair):
    engine = make_engine(e3.target, e3.draft, (3, 2, 6), max_running_requests=2)
    found = run(engine, requests_of(random_prompts([4, 9, 17]), max_new_tokens=14))
    assert engine.counts.num_output_tokens == sum(len(completion.output_ids) for completion in found.values())
