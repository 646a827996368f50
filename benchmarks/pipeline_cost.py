"""What reading, writing and statistics cost a run: the engine alone on requests in memory against `eaglecli generate` on the same prompts.

    python -m benchmarks.pipeline_cost --config smollm2-135m --device cuda --max-running-requests 256
    python -m benchmarks.pipeline_cost --config smollm2-135m --device cpu --records 16 --tokens 16 --rounds 1
    python -m benchmarks.pipeline_cost --target MODEL.gguf --iteration-ms 6       no GPU and no model, but a tokenizer: see paced_engine.py

Both in turns over one engine, whose models and graphs are made once; every other option is one of `generate` with a value. Every answer has
`--tokens` tokens. token/s are counted from the first request to the last answer, as in stats.json. The start of the helper processes,
which a run hides behind the loading of its models, is waited for.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.host_cost import NUM_ROWS, NUM_STEPS
from benchmarks.paced_engine import open_paced_engine
from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._input import read_input, select_input
from eaglecli.commands._open_engine import OpenedEngine, find_models
from eaglecli.commands._request_maker import RequestMaker
from eaglecli.commands.generate import generate, resolve
from eaglecli.config import GenerateSettings, resolve_settings
from eaglecli.engine.request import Request
from eaglecli.io.console import Console
from eaglecli.io.garbage_pauses import seldom_garbage_pauses
from eaglecli.io.sampling_options import SamplingNeeds
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer

HELPER_START_S = 8.0
QUESTIONS = (
    "What should a visitor to {} know about its history?",
    "Write a short story about a lighthouse and a boat that is called {}.",
    "Explain in simple words how {} works, and give three examples of where it is used in daily life.",
    "List reasons for and against {}, then say which side is the stronger one and why you think so.",
)
SUBJECTS = ("Lisbon", "photosynthesis", "remote work", "the printing press", "solar power", "chess", "the tides", "sourdough bread")


class OpenModels:
    """A ModelSource whose engine is there already."""

    def __init__(self, generation_config: Mapping[str, Any], opened: OpenedEngine, tokenizer: PromptTokenizer) -> None:
        self.generation_config = generation_config
        self._opened, self._tokenizer = opened, tokenizer

    def fingerprints(self) -> Mapping[str, str | None]:
        """Nothing is taken up again here."""
        return {}

    def load_tokenizer(self) -> PromptTokenizer:
        """It was loaded."""
        return self._tokenizer

    def open_engine(self, settings: GenerateSettings, needs: SamplingNeeds) -> OpenedEngine:
        """The one engine, after as long as helpers take to start."""
        time.sleep(HELPER_START_S)
        return self._opened


def write_prompts(path: Path, count: int) -> None:
    """`count` records, no two alike."""
    records = (
        {"id": f"record of mine {number}", "prompt": f"{number}. " + QUESTIONS[number % 4].format(SUBJECTS[number // 4 % 8])}
        for number in range(count)
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_engine(opened: OpenedEngine, requests: Sequence[Request]) -> float:
    """token/s of the engine alone."""
    with seldom_garbage_pauses():  # as a run has it
        started = time.perf_counter()
        num_tokens = sum(len(completion.output_ids) for completion in opened.engine.generate(requests))
        return num_tokens / (time.perf_counter() - started)


def run_pipeline(settings: GenerateSettings, models: OpenModels) -> tuple[float, float]:
    """token/s of the whole, by its own reckoning, and seconds from its last answer to the end: the last lines, their order, reports."""
    started = time.perf_counter()
    result = generate(settings, Console(quiet=True), ["pipeline_cost"], lambda _: models)
    whole_s = time.perf_counter() - started
    assert result.exit_code == 0, f"the run ended with exit code {result.exit_code}"
    stats = json.loads((Path(settings.output or "") / "stats.json").read_text())
    return stats["throughput"]["output_throughput"], whole_s - stats["timing"]["generate_s"] - stats["timing"]["load_s"]


def run_rounds(opened: OpenedEngine, models: OpenModels, settings: Mapping[str, GenerateSettings], num_rounds: int) -> None:
    """Print a line a round, then the medians and the costs: of the engine alone and of a run with each of the settings."""
    any_settings = next(iter(settings.values()))
    maker = RequestMaker(any_settings, models.load_tokenizer(), opened.rules)
    records = read_input(select_input(any_settings), any_settings, Console(quiet=True)).records()
    requests: list[Request] = [maker.prepare(record) for record in records]  # type: ignore[misc]
    run_engine(opened, requests[: len(requests) // 8])  # warm
    rates: list[list[float]] = []
    for _ in range(num_rounds):
        row, ends_s = [run_engine(opened, requests)], []
        for each in settings.values():
            rate, end_s = run_pipeline(each, models)
            row.append(rate)
            ends_s.append(end_s)
        rates.append(row)
        print(_line(("engine alone", *settings), row), " before and after", *(f"{end_s:.2f} s" for end_s in ends_s), flush=True)
    alone, *others = (statistics.median(column) for column in zip(*rates, strict=True))
    print("medians:", _line(("engine alone", *settings), [alone, *others]), " cost", *(f"{1 - rate / alone:.1%}" for rate in others))


def _line(names: Sequence[str], rates: Sequence[float]) -> str:
    return "  ".join(f"{name} {rate:.0f} token/s" for name, rate in zip(names, rates, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Of a real engine, or of a paced one with reading and writing in threads and in helpers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config")
    parser.add_argument("--records", type=int, default=12_000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iteration-ms", type=float)
    options, others = parser.parse_known_args(arguments)
    pairs = zip(others[::2], others[1::2], strict=True)
    given: dict[str, Any] = {name.removeprefix("--").replace("-", "_"): _read(value) for name, value in pairs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "input.jsonl", options.records)
        given |= {"input": (str(folder / "input.jsonl"),), "output": str(folder / "run"), "overwrite": True}
        given |= {"max_new_tokens": options.tokens, "ignore_eos": True}
        if options.iteration_ms is None:
            run_real(given, options.config, options.rounds)
        else:
            run_paced(given, folder, options.iteration_ms / 1e3, options.rounds)


def _read(value: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def run_real(given: Mapping[str, Any], config: str | None, num_rounds: int) -> None:
    """Models, device and speculation as `generate` would have them."""
    console = Console()
    settings = resolve(given, config, console)
    found = find_models(settings)
    settings = settings.with_generation_config(found.generation_config)
    tokenizer = prepare_tokenizer(found.load_tokenizer(), settings)
    opened = found.open_engine(settings)
    for line in opened.summary:
        console.note(line)
    run_rounds(opened, OpenModels(found.generation_config, opened, tokenizer), {"generate": settings}, num_rounds)


def run_paced(given: Mapping[str, Any], folder: Path, iteration_s: float, num_rounds: int) -> None:
    """The device decides where reading and writing go on; none is used."""
    tokenizer = load_tokenizer(Path(given["target"]))
    opened = open_paced_engine(folder, iteration_s, tokenizer.vocab_size)
    sizes = {"speculative_num_steps": NUM_STEPS, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": NUM_STEPS + 1}
    fixed = {**given, **sizes, "draft": "paced", "max_running_requests": NUM_ROWS}
    kinds = {"threads": "cpu", "helpers": "cuda"}
    settings = {name: resolve_settings(fixed, None, lambda _, device=device: device) for name, device in kinds.items()}
    run_rounds(opened, OpenModels({}, opened, tokenizer), settings, num_rounds)


if __name__ == "__main__":
    main()
