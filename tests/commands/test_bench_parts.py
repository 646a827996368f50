"""What `eaglecli bench` makes of its passes: steady windows, warm-up, repeats, floors and stages, on figures made by hand."""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eaglecli.commands import _bench_measure, _bench_run, _bench_stages
from eaglecli.commands._answers import counts_of
from eaglecli.commands._bench_engine import BenchEngine
from eaglecli.commands._bench_prompts import BenchData
from eaglecli.commands._bench_run import Pass, StepLog, WarmUp, warm_up
from eaglecli.commands._bench_settings import BenchConfiguration, BenchOptions
from eaglecli.commands._bench_stages import StageTimes, time_stages
from eaglecli.commands._speculation import SpeculationPlan
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.engine.stage_clock import StageSpans
from eaglecli.io.accept_statistics import AcceptTotals

CHAIN = SpeculationSettings(3, 1, 4)


def log_of(seconds: Sequence[float], in_flight: Sequence[int], prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> StepLog:
    """A log of steps that took so long."""
    counts = (array("q", values) for values in (in_flight, prompt_tokens, output_tokens))
    return StepLog(array("d", np.cumsum(seconds).tolist()), *counts)


def pass_of(log: StepLog | None = None, completions: Sequence[Completion] = (), elapsed_s: float = 1.0, **counts: float) -> Pass:
    totals = AcceptTotals(CHAIN.num_steps)
    for completion in completions:
        totals.add(counts_of([completion], ()))
    log, counts = log or StepLog(), {"waited_s": 0.0, "statistics_s": 0.0, "num_iterations": 1, **counts}
    return Pass(completions=tuple(completions), totals=totals, log=log, elapsed_s=elapsed_s, **counts)


SECONDS, OUTPUTS = [1, 2, 0.5, 4, 8, 0.25, 16, 32], [1, 2, 4, 7, 9, 12, 16, 17]


def test_a_steady_window_lies_between_the_end_of_the_first_decode_step_and_that_of_the_last_full_one():
    window = pass_of(log_of(SECONDS, [2] * 7 + [1], [10] + [20] * 7, OUTPUTS)).steady_window(2)
    assert (window.seconds, window.num_steps, window.num_output_tokens) == (28.25, 4, 16 - 4)
    assert window.decode_step_s.tolist() == [4, 8, 0.25, 16]
    assert window.throughput == 12 / 28.25


def test_a_refill_belongs_to_the_steady_window_but_is_no_decode_step():
    window = pass_of(log_of(SECONDS, [2] * 7 + [1], [10, 20, 20, 20, 25, 25, 25, 25], OUTPUTS)).steady_window(2)
    assert (window.seconds, window.num_steps, window.num_output_tokens) == (28.25, 4, 12)
    assert {4, 16} <= {*window.decode_step_s.tolist()} <= {4, 0.25, 16}  # the step after a prefill may have waited for it


@pytest.mark.parametrize(("in_flight", "prompt_tokens"), [([1] * 8, [20] * 8), ([2] * 8, [*range(10, 18)]), ([2] + [1] * 7, [20] * 8)])
def test_without_full_steps_behind_a_decode_step_there_is_no_steady_window(in_flight, prompt_tokens):
    window = pass_of(log_of(SECONDS, in_flight, prompt_tokens, OUTPUTS)).steady_window(2)
    assert (window.throughput, window.num_steps, len(window.decode_step_s)) == (None, 0, 0)


def requests_of(*sizes: tuple[int, int]) -> tuple[Request, ...]:
    """Of (prompt tokens, most new tokens)."""
    return tuple(
        Request(key, np.full(length, key, np.int32), SamplingParams(max_new_tokens=cap)) for key, (length, cap) in enumerate(sizes)
    )


def script_warm_up(monkeypatch: pytest.MonkeyPatch, rates: Sequence[float]) -> list[Sequence[Request]]:
    """Let windows have these rates; what they were asked to run."""
    rest, asked = iter(rates), []

    def scripted(engine, requests, batch_size, end_token_ids):
        asked.append(requests)
        return SimpleNamespace(output_throughput=next(rest))

    monkeypatch.setattr(_bench_run, "run_pass", scripted)
    return asked


def test_a_warm_up_window_is_one_wave_with_the_longest_prompt_first_and_short_answers(monkeypatch):
    asked = script_warm_up(monkeypatch, [1.0])
    warm_up(None, requests_of((5, 64), (6, 65), (9, 1000), (7, 3), (8, 40)), 4, 1)
    assert [(request.key, len(request.prompt_ids), request.sampling.max_new_tokens) for request in asked[0]] == [
        (2, 9, 64),
        (0, 5, 64),
        (1, 6, 64),
        (3, 7, 3),
    ]


@pytest.mark.parametrize(
    ("num_warmups", "rates", "num_windows", "agreed"),
    [
        (None, [100, 96, 100, 103, 110], 4, True),
        (None, [100, 104, 107.2, 200], 3, True),  # 3 % of the faster one
        (None, [103, 100, 97, 94, 91.2, 50], 2, True),
        (None, [200, 100, 104, 107, 107], 4, True),
        (None, [100, 103.2, 100, 103.2, 100, 103.2, 100, 103.2, 103.2], 8, False),
        (2, [100, 90, 90], 2, None),
        (3, [100, 100, 100, 100], 3, None),
        (0, [], 0, None),
    ],
)
def test_windows_follow_one_another_until_two_agree_or_the_given_number_is_there(monkeypatch, num_warmups, rates, num_windows, agreed):
    asked = script_warm_up(monkeypatch, rates)
    found = warm_up(None, requests_of((5, 5)), 1, num_warmups)
    assert (found.windows, found.agreed, len(asked)) == (tuple(rates[:num_windows]), agreed, num_windows)


class Work:
    """A floor of a quarter of a second, whatever it is asked."""

    weight_bytes = 123

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def floor_s(self, *asked: object) -> float:
        self.asked.append(asked)
        return 0.25


class Counters:
    """An engine of which nothing is seen but how often its stages ran. Prefills, which do not count, are all eager."""

    def __init__(self) -> None:
        self.counts = np.zeros(4, int)

    def ran(self, graph_runs: int, eager_runs: int, row_steps: int, accepted_drafts: int) -> None:
        self.counts += graph_runs, eager_runs, row_steps, accepted_drafts

    def summary(self) -> dict:
        graph_runs, eager_runs, row_steps, accepted_drafts = self.counts.tolist()
        decode = {"graph_runs": graph_runs, "eager_runs": eager_runs}
        prefill = {"graph_runs": 0, "eager_runs": 7 * eager_runs + 1}
        stages = {"prefill": prefill, "draft 3/1/4": decode, "verify 3/1/4": decode, "extend 3/1/4": decode}
        return {"stages": stages, "accepted_by_requests": {"2": {"row_steps": row_steps, "accepted_drafts": accepted_drafts}}}


PROMPTS_AND_ANSWERS = (10, 5), (20, 7), (30, 9)
ELAPSED_S = 1.0, 5.0, 8.0, 2.0
MIDDLE_S = 5.0  # by throughput the lower one of the two in the middle


def measured(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> tuple[dict, Work]:
    """The document of four passes over the same three answers, of which the middle one differs from the others."""
    requests, work, counters = requests_of(*PROMPTS_AND_ANSWERS), Work(), Counters()
    completions = []
    for request in requests:
        length = request.sampling.max_new_tokens
        steps = (length - 1) // 2
        counts = {"num_verify_steps": steps, "num_accepted_drafts": steps, "num_proposed_drafts": 3 * steps}
        times = {"ttft_s": 1.0, "e2e_s": 1.0 + (length - 1) * 0.5}
        completions.append(Completion(request, np.zeros(length, np.int32), "length", accept_counts=np.ones(steps, int), **counts, **times))
    elapsed = iter(ELAPSED_S)

    def run_pass(*_: object) -> Pass:
        elapsed_s = next(elapsed)
        is_middle = elapsed_s == MIDDLE_S
        counters.ran(*((30, 10, 20, 10) if is_middle else (10, 30, 20, 40)))
        log = log_of([1, 0.5, 0.25, 1, 1.25] if is_middle else [3] * 5, [2] * 5, [60] * 5, [3, 5, 9, 15, 21])
        return pass_of(log, completions, elapsed_s, statistics_s=0.5 if is_middle else 0.25, num_iterations=8 if is_middle else 16)

    def warm(*_: object) -> WarmUp:
        counters.ran(0, 1000, 500, 500)
        return WarmUp((1.0,), 3.0, None)

    def clocked(*arguments: object) -> StageTimes:
        assert arguments[-1].elapsed_s == MIDDLE_S
        counters.ran(0, 5000, 500, 500)
        return StageTimes({}, 100.0, None, 6.0)

    for name, replaced in (("run_pass", run_pass), ("warm_up", warm), ("time_stages", clocked)):
        monkeypatch.setattr(_bench_measure, name, replaced)
    models = SimpleNamespace(
        work=lambda _: work, speed="its speed", draft_limit=None, context_length=64, load_s=2.0, device=torch.device("cpu")
    )
    data = BenchData("made by hand", requests, ("a",) * 3, (), None)
    configuration, options = BenchConfiguration(batch_size, SpeculationPlan(CHAIN)), BenchOptions(repeat=len(ELAPSED_S))
    return _bench_measure.measure(BenchEngine(counters, 0.0, ""), models, data, configuration, options).document, work


def test_what_is_told_of_repeats_is_what_the_middle_one_was(monkeypatch):
    document, _ = measured(monkeypatch, 2)
    assert [repeat["output_throughput"] for repeat in document["repeats"]] == [21 / seconds for seconds in ELAPSED_S]
    rates = {"request_throughput": 3 / 5, "input_throughput": 60 / 5, "output_throughput": 21 / 5, "total_throughput": 81 / 5}
    rates["total_latency"] = MIDDLE_S
    assert document["repeats"][1] == rates == {name: document[name] for name in rates}
    assert document["spread"] == pytest.approx((1 - 1 / 8) / (1 / 5))
    assert document["timing"]["timed_s"] == 16.0
    assert (document["host_share"], document["statistics_share"]) == (0.16, 0.1)  # of 625 ms an iteration, and of 5 s
    assert (document["total_input_tokens"], document["total_output_tokens"], document["num_iterations"]) == (60, 21, 8)
    assert document["steady_state_output_throughput"] == 16 / 2.5
    assert document["tpot_s"]["mean"] == 0.5


@pytest.mark.parametrize(("batch_size", "num_rows"), [(2, 2), (8, 3)])
def test_users_and_rows_are_the_prompts_where_those_are_fewer_than_the_batch(monkeypatch, batch_size, num_rows):
    document, work = measured(monkeypatch, batch_size)
    assert document["output_throughput_per_user"] == pytest.approx(document["output_throughput"] / num_rows)
    assert work.asked == [("its speed", num_rows, (12.5 + 23.5 + 34.5) / 3, 2.0)]  # contexts when half of the answer is there


def test_the_median_decode_step_is_put_against_the_floor(monkeypatch):
    assert measured(monkeypatch, 2)[0]["floor"] == {"floor_ms": 250.0, "weight_bytes": 123, "step_ms": 1000.0, "ratio": 4.0}
    assert measured(monkeypatch, 8)[0]["floor"] == {"floor_ms": 250.0, "weight_bytes": 123, "step_ms": None, "ratio": None}  # never full


def test_stages_and_steps_are_counted_of_the_middle_pass_alone(monkeypatch):
    document, _ = measured(monkeypatch, 2)
    assert document["graph_hit_rate"] == 0.75  # of its decode stages
    assert document["accept"]["splits"]["batch_size"] == {"2": 1.5}


@pytest.mark.parametrize(("device", "host_ms"), [("cpu", (1.0 - 0.4) / 4 * 1e3), ("cuda", (9.0 - 3.0) / 8 * 1e3)])
def test_the_hosts_time_leaves_out_what_the_device_does_meanwhile(monkeypatch, device, host_ms):
    """On a CPU the stages of the clocked pass, on a GPU what the timed pass waited."""

    class ScriptedClock:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def spans(self) -> dict[str, StageSpans]:
            spans = {"draft 3/1/4": ([0.0], [0.1]), "verify 3/1/4": ([0.1, 0.6], [0.2, 0.7]), "verify none": ([0.9], [1.0])}
            return {name: StageSpans(*map(np.array, ends)) for name, ends in spans.items()}

    clocks, waves = [], []

    def scripted(engine, requests, batch_size, end_token_ids):
        waves.append((len(requests), batch_size, isinstance(clocks[-1], ScriptedClock)))
        return pass_of(elapsed_s=1.0, num_iterations=4)

    monkeypatch.setattr(_bench_stages, "StageClock", ScriptedClock)
    monkeypatch.setattr(_bench_stages, "run_pass", scripted)
    engine, timed = SimpleNamespace(measure_stages=clocks.append), pass_of(elapsed_s=9.0, waited_s=3.0, num_iterations=8)
    found = time_stages(engine, requests_of(*PROMPTS_AND_ANSWERS), 2, torch.device(device), timed)
    assert found.host_ms == pytest.approx(host_ms)
    assert found.idle_share == pytest.approx(0.6)
    assert {name: times["mean"] for name, times in found.stages_ms.items()} == pytest.approx({"draft": 100.0, "verify": 100.0})
    assert waves == [(2, 2, True)] and clocks[-1] is None
