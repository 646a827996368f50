"""What reading, writing and statistics cost a run: the engine alone on requests in memory against `eaglecli generate` on the same prompts.

    python -m benchmarks.pipeline_cost --config smollm2-135m --device cuda --max-running-requests 256
    python -m benchmarks.pipeline_cost --config smollm2-135m --device cpu --records 16 --tokens 16 --rounds 1

Both in turns over one engine, whose models and graphs are made once; every other option is one of `generate`. Every answer has
`--tokens` tokens. token/s are counted from the first request to the last answer, as in stats.json. The start of the helper processes,
which a run hides behind the loading of its models, is waited for.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglecli.commands._chat_template import prepare_tokenizer
from eaglecli.commands._input import read_input, select_input
from eaglecli.commands._open_engine import FoundModels, OpenedEngine, find_models
from eaglecli.commands._request_maker import RequestMaker
from eaglecli.commands.generate import generate, resolve
from eaglecli.config import GenerateSettings
from eaglecli.engine.request import Request
from eaglecli.io.console import Console
from eaglecli.io.garbage_pauses import seldom_garbage_pauses
from eaglecli.io.sampling_options import SamplingNeeds
from eaglecli.io.tokenizer import PromptTokenizer

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

    def __init__(self, models: FoundModels, opened: OpenedEngine, tokenizer: PromptTokenizer) -> None:
        self.generation_config = models.generation_config
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


def run_pipeline(settings: GenerateSettings, models: OpenModels, output: Path) -> tuple[float, float]:
    """token/s of the whole, by its own reckoning, and seconds from its last answer to the end: the last lines, their order, reports."""
    started = time.perf_counter()
    result = generate(settings, Console(quiet=True), ["pipeline_cost"], lambda _: models)
    whole_s = time.perf_counter() - started
    assert result.exit_code == 0, f"the run ended with exit code {result.exit_code}"
    stats = json.loads((output / "stats.json").read_text())
    return stats["throughput"]["output_throughput"], whole_s - stats["timing"]["generate_s"] - stats["timing"]["load_s"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a round, then the medians and the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config")
    parser.add_argument("--records", type=int, default=12_000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options, others = parser.parse_known_args(arguments)
    given: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(others[::2], others[1::2], strict=True)
    }
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        source, output = Path(name) / "input.jsonl", Path(name) / "run"
        write_prompts(source, options.records)
        fixed = {"input": (str(source),), "output": str(output), "max_new_tokens": options.tokens, "ignore_eos": True, "overwrite": True}
        settings = resolve({**given, **fixed}, options.config, console)
        found = find_models(settings)
        settings = settings.with_generation_config(found.generation_config)
        tokenizer = prepare_tokenizer(found.load_tokenizer(), settings)
        opened = found.open_engine(settings)
        for line in opened.summary:
            console.note(line)
        maker = RequestMaker(settings, tokenizer, opened.rules)
        requests = [maker.prepare(record) for record in read_input(select_input(settings), settings, console).records()]
        models = OpenModels(found, opened, tokenizer)
        run_engine(opened, requests[: len(requests) // 8])  # type: ignore[arg-type]  # warm
        rates: list[tuple[float, float]] = []
        for _ in range(options.rounds):
            alone = run_engine(opened, requests)  # type: ignore[arg-type]
            whole, end_s = run_pipeline(settings, models, output)
            rates.append((alone, whole))
            print(f"engine alone {alone:10.1f} token/s   generate {whole:10.1f} token/s   {end_s:5.2f} s before and after", flush=True)
    alone, whole = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"medians      {alone:10.1f} token/s            {whole:10.1f} token/s   cost {1 - whole / alone:.1%}")


if __name__ == "__main__":
    main()
