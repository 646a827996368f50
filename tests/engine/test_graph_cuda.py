"""Captured graphs on a GPU: equal to the padded stages run eagerly, bit for bit, and lossless through the whole engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
from eaglecli.engine.graph_sizes import graph_lengths
from eaglecli.engine.settings import PLAIN, Alternative, EngineSettings, SchedulingSettings, SpeculationSettings
from eaglecli.engine.speculation_policy import ScriptedPolicy
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import load_target
from tests.engine.harness import DEVICE, LoadedPair, Triple, draft_dir, make_engine, mixed_requests, oracle_plain, run, texts
from tests.engine.test_adjusted_logits import adjusting_requests
from tests.engine.test_logprobs import assert_follow_the_oracle

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8, 16)
TRIPLES: list[Triple | None] = [None, (4, 1, 5), (3, 2, 7), (5, 4, 16)]


class NotedGraph:
    """A graph that notes for which rows it is replayed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, max_length: int, replayed: list[int]) -> None:
        self.graph, self.max_length, self.replayed = graph, max_length, replayed

    def replay(self) -> None:
        self.replayed.append(self.max_length)
        self.graph.replay()


def captured_engine(pair: LoadedPair, triple: Triple | None, **settings: object) -> Engine:
    engine = make_engine(pair.target, pair.draft, triple, graph_sizes=SIZES, **{"max_running_requests": 17, **settings})
    reports = list(engine.capture())
    prefills = [report.num_tokens for report in reports if report.stage == "prefill"]
    assert prefills == [size.num_tokens for size in sorted(engine.prefill_sizes, reverse=True)]
    reports = [report for report in reports if report.stage != "prefill"]
    num_a_size = len(engine._runners) * len(graph_lengths(engine.settings.context_length))
    assert [report.num_requests for report in reports[::num_a_size]] == sorted(SIZES, reverse=True)
    assert all(
        report.num_tokens == report.num_requests * engine._runners[0].stage.tokens_per_request
        for report in reports
        if report.stage == "draft"
    )
    return engine


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_equal_the_padded_stages_at_every_batch_size_with_poison(
    twin: LoadedPair, triple: Triple | None, dtype: torch.dtype
) -> None:
    """B25: shrinking, then growing; graphs for short rows and for any."""
    target = load_target(twin.target.path, dtype, DEVICE, 1024)
    draft = load_draft(draft_dir(twin), target, dtype, DEVICE, 1024) if triple else None
    speculation = SpeculationSettings(*triple) if triple else PLAIN
    settings = EngineSettings(1024, 16384, max_running_requests=17, graph_sizes=SIZES, speculation=speculation)
    engine = Engine(target.model, draft.model if draft else None, settings)
    assert {report.max_length for report in engine.capture()} == {512, 1024}
    for count in [*range(17, 0, -1), *range(2, 18)]:
        check = engine.check_stages(count, seed=count)
        assert check.graph_differs == (() if count <= 16 else None), check
        assert check.poison_differs == (), check
        assert check.num_padding_differs == 0 or dtype != torch.float32, check


@pytest.mark.parametrize("triple", [None, (4, 1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_graphs_equal_the_padded_stage_at_every_size_with_poison(
    twin: LoadedPair, triple: Triple | None, dtype: torch.dtype
) -> None:
    target = load_target(twin.target.path, dtype, DEVICE, 256)
    draft = load_draft(draft_dir(twin), target, dtype, DEVICE, 256) if triple else None
    speculation = SpeculationSettings(*triple) if triple else PLAIN
    sizes = {"max_running_requests": 70, "chunked_prefill_size": 1000, "graph_sizes": SIZES, "speculation": speculation}
    engine = Engine(target.model, draft.model if draft else None, EngineSettings(256, 16384, **sizes))
    list(engine.capture())
    assert {size.num_rows for size in engine.prefill_sizes} == {8, 64, 70}
    for size in engine.prefill_sizes:
        for seed in range(3):
            check = engine.check_prefill(size, seed)
            assert (check.graph_differs, check.poison_differs) == ((), ()), check
            assert check.num_padding_differs == 0 or dtype != torch.float32, check


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_float32_text_with_graphs_is_the_oracles(pair: LoadedPair, triple: Triple | None) -> None:
    requests = mixed_requests(20, seed=9, max_cap=20)
    engine = captured_engine(pair, triple, context_length=256)
    assert texts(run(engine, requests)) == oracle_plain(pair, requests)
    summary = engine.summary()
    by_requests = {int(size): count for size, count in summary["iterations_by_requests"].items()}
    expected = sum(count for size, count in by_requests.items() if size <= 16) / summary["num_iterations"]
    assert summary["graph_hit_rate"] == pytest.approx(expected)
    assert summary["stages"]["prefill"]["eager_runs"] == 0 < summary["stages"]["prefill"]["graph_runs"]


@pytest.mark.parametrize("triple", [None, (3, 2, 7)], ids=str)
def test_rows_that_outgrow_the_graphs_for_short_rows_keep_their_text(twin: LoadedPair, triple: Triple | None) -> None:
    requests = [
        replace(request, prompt_ids=np.resize(request.prompt_ids, 470 + 4 * index))
        for index, request in enumerate(mixed_requests(12, seed=4, max_cap=60))
    ]
    expected = texts(run(make_engine(twin.target, twin.draft, triple, context_length=1024, max_running_requests=17), requests))
    engine = captured_engine(twin, triple, context_length=1024)
    replayed: list[int] = []
    for runner in engine._runners:
        for size in SIZES:
            for length, graph in runner._graphs[size]:
                runner.add_graph(size, length, NotedGraph(graph, length, replayed))  # type: ignore[arg-type]
    assert texts(run(engine, requests)) == expected
    assert {*replayed} == {512, 1024}


@pytest.mark.parametrize("triple", [None, (4, 1, 5)], ids=str)
def test_the_steady_loop_never_waits_for_the_device_but_for_its_record(twin: LoadedPair, triple: Triple | None) -> None:
    engine = captured_engine(twin, triple, context_length=256)
    for request in mixed_requests(8, seed=2, max_prompt=20, max_cap=60):
        engine.add(request)
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not engine.is_idle:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("triple", [None, (4, 1, 5)], ids=str)
def test_rows_grow_and_are_preempted_and_resumed_without_a_wait_but_for_records(twin: LoadedPair, triple: Triple | None) -> None:
    hopeful = SchedulingSettings(growth_tokens=4, pledged_share=0.0)
    engine = captured_engine(twin, triple, context_length=256, page_size=4, max_total_tokens=260, scheduling=hopeful)
    requests = mixed_requests(8, seed=2, max_prompt=40, max_cap=60)
    assert texts(run(engine, requests)) == oracle_plain(twin, requests)
    assert engine.summary()["num_preemptions"] > 0
    for request in requests:
        engine.add(request)
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not engine.is_idle:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("triple", [None, (4, 1, 5), (3, 2, 7)], ids=str)
def test_graphs_serve_rows_that_ask_for_adjusted_logits_and_logprobs(twin: LoadedPair, triple: Triple | None) -> None:
    """B36, B53: graph equals eager with poison, the text is the oracle's, and the steady loop still waits for its record alone."""
    engine = captured_engine(twin, triple, context_length=256, adjusts_logits=True, max_logprobs=20)
    for count in (17, 16, 5, 1, 9):
        check = engine.check_stages(count, seed=count)
        assert check.is_exact and check.num_padding_differs == 0, check
    requests = adjusting_requests(20, seed=9)
    requests = [replace(request, sampling=replace(request.sampling, logprobs=(None, 0, 5)[request.key % 3])) for request in requests]
    found = run(engine, requests)
    assert texts(found) == oracle_plain(twin, requests)
    assert_follow_the_oracle(twin, found)
    for request in requests[:8]:
        engine.add(request)
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not engine.is_idle:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_smaller_sizes_live_in_the_memory_of_the_largest(twin: LoadedPair) -> None:
    """B28: growth is bounded."""
    engine = make_engine(twin.target, twin.draft, (3, 2, 7), graph_sizes=tuple(range(1, 17)), context_length=256)
    sizes: dict[int, int] = {}
    for report in (report for report in engine.capture() if report.stage != "prefill"):
        sizes[report.num_requests] = sizes.get(report.num_requests, 0) + report.num_bytes
    assert sum(sizes.values()) <= max(sizes[16], 1 << 21) * 3


def test_a_backend_that_needs_host_lengths_captures_nothing(twin: LoadedPair) -> None:
    settings = EngineSettings(128, 2048, graph_sizes=SIZES)
    assert not Engine(twin.target.model, None, settings, TORCH).can_capture


def captured_modes(pair: LoadedPair, seed: int) -> Engine:
    """An engine that changes at random between a chain, plain decoding and a tree, all captured."""
    modes = [SpeculationSettings(4, 1, 5), PLAIN, SpeculationSettings(3, 3, 8)]
    settings = EngineSettings(
        256,
        16384,
        max_running_requests=16,
        graph_sizes=SIZES,
        speculation=modes[0],
        alternatives=tuple(Alternative(m, 16) for m in modes[1:]),
    )
    engine = Engine(pair.target.model, pair.draft.model, settings)
    list(engine.capture())
    random = np.random.default_rng(seed)
    engine.policy = ScriptedPolicy(lambda num_requests: int(random.integers(3)))
    return engine


def test_changing_modes_by_graph_leaves_the_text_as_it_is(pair: LoadedPair) -> None:
    requests = mixed_requests(20, seed=9, max_cap=30)
    engine = captured_modes(pair, seed=1)
    assert texts(run(engine, requests)) == oracle_plain(pair, requests)
    assert engine.summary()["graph_hit_rate"] == 1.0
    for mode in range(3):
        check = engine.check_stages(5, seed=3, mode_number=mode)
        assert check.is_exact and check.graph_differs == ()
    costs = engine.measure_costs()
    assert {mode for mode, _ in costs} == {0, 1, 2} and min(costs.values()) > 0


def test_the_draft_catches_up_without_a_wait_for_the_device(twin: LoadedPair) -> None:
    engine = captured_modes(twin, seed=2)
    engine.measure_costs()  # compiles what a catch-up needs
    for request in mixed_requests(8, seed=2, max_prompt=20, max_cap=60):
        engine.add(request)
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not engine.is_idle:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
