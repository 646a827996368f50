"""One pass of requests through an engine at a given concurrency, and what is seen from the host while it goes on."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from eaglecli.commands._answers import counts_of
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request
from eaglecli.io.accept_statistics import AcceptTotals
from eaglecli.kernels.simulate_accept import lattice_seed

WINDOWS_AGREE = 0.03  # two warm-up windows whose throughput differs by no more
_MOST_WARMUPS = 8
_WARMUP_CAP = 64  # tokens of an answer in a warm-up window


@dataclass(eq=False)
class StepLog:
    """One entry a step: when it ended, requests in the engine while it ran, prompt and output tokens so far."""

    end_s: "array[float]" = field(default_factory=lambda: array("d"))
    in_flight: "array[int]" = field(default_factory=lambda: array("q"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, eq=False)
class SteadyWindow:
    """The part of a pass in which the batch was full, but for rows kept free for a group: from the first prefill to the last full step."""

    seconds: float
    num_steps: int
    num_output_tokens: int
    decode_step_s: np.ndarray  # float64: its steps without prefill, nor waiting for one

    @property
    def throughput(self) -> float | None:
        """Output tokens per second; None when there is no such part."""
        return self.num_output_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, eq=False)
class Pass:
    """A finished pass. `statistics_s`: host time that counting took, inside of `elapsed_s`."""

    completions: tuple[Completion, ...]
    totals: AcceptTotals
    log: StepLog
    elapsed_s: float
    waited_s: float
    statistics_s: float
    num_iterations: int
    runs_ahead: bool = False  # a step waits for the iteration before it, as on a GPU

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all requests that were answered."""
        return sum(len(completion.request.prompt_ids) for completion in self.completions)

    @property
    def num_output_tokens(self) -> int:
        """Delivered tokens, as the engine's own counter has them."""
        return self.log.output_tokens[-1] if self.log.output_tokens else 0

    @property
    def output_throughput(self) -> float:
        """Delivered tokens per second, prefill included."""
        return self.num_output_tokens / self.elapsed_s

    def steady_window(self, batch_size: int) -> SteadyWindow:
        """See `SteadyWindow`."""
        end_s, in_flight = np.array(self.log.end_s), np.array(self.log.in_flight)
        prompts, outputs = np.array(self.log.prompt_tokens), np.array(self.log.output_tokens)
        is_decode = np.diff(prompts, prepend=0) == 0
        full = np.flatnonzero(in_flight == batch_size)
        first = int(np.argmax(is_decode)) if is_decode.any() else len(end_s)  # the first step that only decodes ends the ramp
        last = int(full[-1]) if len(full) else -1
        if first >= last:
            return SteadyWindow(0.0, 0, 0, np.zeros(0))
        waits_for_prefill = np.concatenate(([False], ~is_decode[:-1])) & self.runs_ahead
        is_clean = (is_decode & ~waits_for_prefill)[first + 1 : last + 1]
        steps = np.diff(end_s[first : last + 1])
        return SteadyWindow(float(end_s[last] - end_s[first]), last - first, int(outputs[last] - outputs[first]), steps[is_clean])


def run_pass(engine: Engine, requests: Sequence[Request], batch_size: int, end_token_ids: tuple[int, ...]) -> Pass:
    """Run all requests, at most `batch_size` at a time, the first ones all submitted at once. The engine is idle before and after.

    Later ones are submitted by groups, as an engine of `batch_size` rows admits them: this one may have more rows.
    """
    totals, log, completions = AcceptTotals(engine.settings.run_width - 1), StepLog(), []
    waiting, num_running, statistics_s = deque(requests), 0, 0.0
    group_size = engine.group_size(batch_size)
    prompts_before, outputs_before = engine.counts.num_prefill_tokens, engine.counts.num_output_tokens
    iterations_before, waited_before = engine.counts.num_iterations, engine.waited_s
    engine.wait_for_device()
    started = perf_counter()
    while waiting or num_running:
        num_free = batch_size - num_running
        if num_free >= group_size or not num_running:
            for _ in range(min(num_free, len(waiting))):
                engine.add(waiting.popleft())
                num_running += 1
        log.in_flight.append(num_running)
        done = engine.step()
        ended = perf_counter()
        log.end_s.append(ended - started)
        log.prompt_tokens.append(engine.counts.num_prefill_tokens - prompts_before)
        log.output_tokens.append(engine.counts.num_output_tokens - outputs_before)
        for completion in done:
            totals.add(counts_of([completion], end_token_ids))
        num_running -= len(done)
        completions += done
        statistics_s += perf_counter() - ended
    elapsed_s = perf_counter() - started
    num_iterations = engine.counts.num_iterations - iterations_before
    waited_s, runs_ahead = engine.waited_s - waited_before, not engine.attention.needs_host_lengths
    return Pass(tuple(completions), totals, log, elapsed_s, waited_s, statistics_s, num_iterations, runs_ahead)


@dataclass(frozen=True)
class WarmUp:
    """Throughput of each window, output token/s; `agreed` None when a number of windows was given."""

    windows: tuple[float, ...]
    seconds: float
    agreed: bool | None


def warm_up(engine: Engine, requests: Sequence[Request], batch_size: int, num_warmups: int | None) -> WarmUp:
    """Mini-runs of the data's own shapes at full concurrency until two in a row agree, or `num_warmups` of them."""
    started, windows, agreed = perf_counter(), [], False
    sample = _warmup_requests(requests, batch_size)
    wanted = _MOST_WARMUPS if num_warmups is None else num_warmups
    while len(windows) < wanted and not agreed:
        windows.append(run_pass(engine, sample, batch_size, ()).output_throughput)
        is_pair = num_warmups is None and len(windows) > 1
        agreed = is_pair and abs(windows[-1] - windows[-2]) <= WINDOWS_AGREE * max(windows[-2:])
    return WarmUp(tuple(windows), perf_counter() - started, agreed if num_warmups is None else None)


def _warmup_requests(requests: Sequence[Request], batch_size: int) -> list[Request]:
    """One wave, the longest prompt first, answers cut short."""
    longest = max(range(len(requests)), key=lambda number: len(requests[number].prompt_ids))
    wave = [requests[longest], *(request for number, request in enumerate(requests) if number != longest)][:batch_size]
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=min(_WARMUP_CAP, request.sampling.max_new_tokens)))
        for request in wave
    ]


def in_simulated_step(requests: Sequence[Request], accept_length: float) -> tuple[Request, ...]:
    """The requests with seeds by which a simulated acceptance starts with a whole step, out of step with one another."""
    return tuple(
        replace(request, sampling=replace(request.sampling, seed=lattice_seed(len(request.prompt_ids), accept_length, number)))
        for number, request in enumerate(requests)
    )
