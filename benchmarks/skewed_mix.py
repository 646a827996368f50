"""What scheduling is worth on a skewed mix: makespan by file order with whole reservations, and with what the engine does.

    python -m benchmarks.skewed_mix                                                       the tiny shape, on the CPU in minutes
    python -m benchmarks.skewed_mix --shape smollm2 --requests 4000 --rows 256 --cap 2048 --pool-tokens 100000 --mean 200

Two mixes over random weights: `ends` - one cap for all, outputs that end by themselves after a geometric length whose mean is itself
skewed (at temperature 1 the tokens of random weights are nearly uniform, so k stop ids of V end an output with chance k / V);
`caps` - nothing ends by itself, one request in ten has a cap near the longest, the others a tenth of it. `eta` is the error of the time
left, as the progress lines show it, at half of the makespan; `eta it` the same with iterations for seconds:
for a machine that is not quiet.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.dummy_models import SHAPES, DummyPair, load_dummy_pair
from eaglecli.commands._workload import workload_of
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SchedulingSettings, SpeculationSettings
from eaglecli.io.eta import EtaEstimator

POLICIES = {
    "file order, reserved": SchedulingSettings(longest_first=False, grows=False, pledged_share=1.0),
    "long first, reserved": SchedulingSettings(longest_first=True, grows=False, pledged_share=1.0),
    "file order, growing": SchedulingSettings(longest_first=False),
    "long first, growing": SchedulingSettings(),
}
LONGEST_PROMPT = 100
HEADER = f"{'mix':6}{'policy':22}{'iterations':>11}{'seconds':>9}{'rows':>7}{'preempted':>11}{'recomputed':>12}{'eta':>8}{'eta it':>8}"


@dataclass(frozen=True)
class Measured:
    """One run."""

    seconds: float
    eta_error: float
    eta_error_in_iterations: float
    outputs: dict[object, list[int]]
    summary: dict

    def line(self, mix: str, policy: str) -> str:
        """Fixed columns."""
        summary = self.summary
        return (
            f"{mix:6}{policy:22}{summary['num_iterations']:>11}{self.seconds:>9.1f}{summary['mean_running_requests']:>7.1f}"
            f"{summary['num_preemptions']:>11}{summary['num_recomputed_tokens']:>12}"
            f"{self.eta_error:>+8.0%}{self.eta_error_in_iterations:>+8.0%}"
        )


def make_requests(mix: str, count: int, vocab_size: int, cap: int, mean: int, max_stop_ids: int) -> list[Request]:
    """The same ones for every policy."""
    random = np.random.default_rng(0)
    requests = []
    for key in range(count):
        prompt = random.integers(0, vocab_size, int(random.integers(8, LONGEST_PROMPT))).astype(np.int32)
        if mix == "ends":
            num_stops = int(np.clip(vocab_size / (mean * random.lognormal(-0.5, 1.0)), 1, max_stop_ids))
            stops, own_cap = tuple(random.choice(vocab_size, num_stops, replace=False).tolist()), cap
        else:
            longest = cap if random.random() < 0.1 else cap // 10
            stops, own_cap = (), int(random.integers(longest // 2, longest + 1))
        sampling = SamplingParams(temperature=1.0, seed=key, max_new_tokens=own_cap, stop_token_ids=stops)
        requests.append(Request(key, prompt, sampling))
    return requests


def measure(engine: Engine, requests: Sequence[Request]) -> Measured:
    """Run all; the time left is asked for as the progress lines would."""
    started = perf_counter()
    in_seconds, in_iterations = (EtaEstimator(0.0) for _ in range(2))
    shown: list[tuple[float, float | None]] = []
    shown_in_iterations: list[tuple[float, float | None]] = []
    outputs: dict[object, list[int]] = {}
    for completion in engine.generate(requests):
        outputs[completion.request.key] = completion.output_ids.tolist()
        outlook = engine.outlook
        work = workload_of(outlook, 0)
        now, iteration = outlook.made_s - started, float(outlook.num_iterations)
        if outlook.num_requests == len(requests):
            shown.append((now, in_seconds.seconds_left(work, now)))
            shown_in_iterations.append((iteration, in_iterations.seconds_left(work, iteration)))
    seconds, iterations = perf_counter() - started, float(engine.counts.num_iterations)
    errors = _error_at_half(shown, seconds), _error_at_half(shown_in_iterations, iterations)
    return Measured(seconds, *errors, outputs, engine.summary())


def _error_at_half(shown: list[tuple[float, float | None]], end: float) -> float:
    """Relative error of the first time left that was shown in the second half; nan when none was."""
    return next((left / (end - at) - 1 for at, left in shown if at >= end / 2 and left is not None and at < end), float("nan"))


def open_engine(pair: DummyPair, options: argparse.Namespace, scheduling: SchedulingSettings, max_stop_ids: int) -> Engine:
    """Graphs captured where there is a GPU."""
    speculation = PLAIN if options.triple == "plain" else SpeculationSettings(*map(int, options.triple.split("/")))
    sizes = tuple(size for size in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512) if size < options.rows)
    settings = EngineSettings(
        context_length=options.cap + LONGEST_PROMPT,
        max_total_tokens=options.pool_tokens,
        max_running_requests=options.rows,
        chunked_prefill_size=2048,
        max_stop_ids=max_stop_ids,
        graph_sizes=(*sizes, options.rows) if torch.cuda.is_available() else (),
        speculation=speculation,
        scheduling=scheduling,
    )
    engine = Engine(pair.target.model, pair.draft.model if speculation.num_steps else None, settings)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    return engine


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a run; say how many texts differ from the first policy's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--mix", nargs="+", choices=["ends", "caps"], default=["ends", "caps"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--cap", type=int, default=400)
    parser.add_argument("--mean", type=int, default=40, help="mean length of outputs that end by themselves")
    parser.add_argument("--pool-tokens", type=int, default=4000)
    parser.add_argument("--triple", default="plain", help="steps/topk/draft tokens, or plain")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", vars(options), HEADER, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pair = load_dummy_pair(options.shape, Path(folder), dtype, device, options.cap + LONGEST_PROMPT)
        vocab_size = SHAPES[options.shape]["vocab_size"]
        max_stop_ids = min(512, vocab_size)
        for mix in options.mix:
            requests = make_requests(mix, options.requests, vocab_size, options.cap, options.mean, max_stop_ids)
            first: Measured | None = None
            for name, scheduling in POLICIES.items():
                found = measure(open_engine(pair, options, scheduling, max_stop_ids), requests)
                first = first or found
                num_differing = sum(tokens != first.outputs[key] for key, tokens in found.outputs.items())
                print(found.line(mix, name), f"  {num_differing} texts differ" if num_differing else "", flush=True)


if __name__ == "__main__":
    main()
