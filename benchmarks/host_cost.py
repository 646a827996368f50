"""What one record costs the host beside the model: reading, the engine's own books, the answer's way to its line.

    python -m benchmarks.host_cost                              20,000 records of 128 output tokens, microseconds of CPU time by part
    python -m benchmarks.host_cost --target MODEL.gguf          the same with a real tokenizer
    python -m benchmarks.host_cost --profile --parts engine     the functions of one part

Real code, no model: the engine's stages are replaced by ones that hand out tokens at once. `reader` and `writer` are threads on the CPU; on
a GPU they are helper processes, and what is left of them in the process of the engine are `take` and `give`: that, `engine` and `answer`
share one interpreter. At 100,000 output tokens a second a record of 128 takes 1,280 us of GPU time. See also `pipeline_cost.py`.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np
import torch

from benchmarks.dummy_models import load_dummy_pair
from eaglecli.commands._answers import build_answer, counts_of
from eaglecli.commands._request_blocks import BLOCK, BlockReader, prepare_blocks
from eaglecli.commands._request_maker import Prepared, RequestMaker, RequestRules
from eaglecli.commands._samples import SamplePlan
from eaglecli.config import resolve_settings
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.settings import EngineSettings, SpeculationSettings
from eaglecli.io.accept_statistics import AcceptTotals
from eaglecli.io.earlier_run import DoneRecords
from eaglecli.io.helper_process import HelperProcess
from eaglecli.io.prefetch import Prefetch
from eaglecli.io.prompts import InputSelection
from eaglecli.io.records import RecordKey
from eaglecli.io.result_lines import Answer, LineMaker
from eaglecli.io.results import MakeLines, ResultWriter
from eaglecli.io.scan import InputReader
from eaglecli.io.tokenizer import PromptTokenizer, load_tokenizer
from eaglecli.kernels.commit_run import Status
from tests.fixtures import write_tokenizer

NUM_TOKENS, NUM_ROWS, NUM_STEPS = 128, 256, 5
TOKENS_PER_STEP = 3
END_ID = 258
RECORD_US_AT_100K = NUM_TOKENS / 100_000 * 1e6


class InstantStages:
    """Stands for the engine's prefill and for all stages of an iteration: every row gets its next tokens."""

    clock = None

    def __init__(self, engine: Engine) -> None:
        self._engine, self._load = engine, engine._prefill.load
        self._choosing = np.zeros(0, np.int64)  # rows of the prefill whose first token is chosen

    def load(self, chunks: Sequence, size: object) -> None:
        """As `PrefillStage.load`."""
        self._choosing = np.array([chunk.sequence.row for chunk in chunks if chunk.chooses_token], np.int64)
        self._load(chunks, size)  # type: ignore[arg-type]

    def run_prefill(self, size: object, hints: object) -> None:
        """As `GraphRunner.run` of the prefill."""
        self._engine._prefill._outputs.record[: len(self._choosing)] = self._record(self._choosing, 1)

    def run(self, size: int, hints: object) -> None:
        """As `GraphRunner.run` of the last stage."""
        engine = self._engine
        rows = engine._iteration._loaded[:size].astype(np.int64)
        engine._iteration.buffers.run.record[:size] = self._record(rows, TOKENS_PER_STEP)

    def _record(self, rows: np.ndarray, num_tokens: int) -> torch.Tensor:
        record = np.zeros((len(rows), NUM_STEPS + 4), np.int32)
        known = self._engine._outputs.num_tokens[rows] + self._engine._in_flight[rows]
        emitted = np.minimum(num_tokens, NUM_TOKENS - known)
        record[:, :-3] = 97 + (known[:, None] + np.arange(NUM_STEPS + 1)) % 26
        record[:, -3] = num_tokens - 1
        record[:, -2] = emitted
        record[:, -1] = np.where(known + emitted >= NUM_TOKENS, Status.LENGTH, Status.RUNNING)
        return torch.from_numpy(record)


def open_engine(folder: Path) -> Engine:
    """An engine of the usual size around stages that take no time."""
    pair = load_dummy_pair("tiny", folder, torch.float32, torch.device("cpu"), 512)
    speculation = SpeculationSettings(NUM_STEPS, 1, NUM_STEPS + 1)
    settings = EngineSettings(512, NUM_ROWS * 256, NUM_ROWS, chunked_prefill_size=4096, speculation=speculation)
    engine = Engine(pair.target.model, pair.draft.model, settings)
    instant = InstantStages(engine)
    engine._prefill.load = instant.load  # type: ignore[method-assign]
    engine._prefill_runner.run = instant.run_prefill  # type: ignore[method-assign]
    engine._runners = [instant]  # type: ignore[list-item]
    return engine


def make_completions(count: int) -> Iterator[Completion]:
    """What the engine returns for `count` requests."""
    random = np.random.default_rng(0)
    prompt = np.arange(30, dtype=np.int32)
    for number in range(count):
        counts = random.integers(0, NUM_STEPS + 1, 43).astype(np.int16)
        key = RecordKey(number, f'"record of mine {number}"', "input.jsonl", number + 1, 0)
        accepted = int(counts.sum())
        yield Completion(
            Request(key, prompt, SamplingParams(stop_token_ids=(END_ID,))),
            output_ids=(97 + np.arange(NUM_TOKENS) % 26).astype(np.int32),
            finish_reason="length",
            num_verify_steps=len(counts),
            num_accepted_drafts=accepted,
            num_proposed_drafts=NUM_STEPS * len(counts),
            num_cut_tokens=1 + accepted + len(counts) - NUM_TOKENS,
            accept_counts=counts,
        )


class Reading:
    """The way of an input file to requests, after the first pass over it."""

    def __init__(self, path: Path, tokenizer: PromptTokenizer, engine: Engine) -> None:
        given = {"target": "none", "input": (str(path),), "context_length": 512, "max_new_tokens": NUM_TOKENS}
        self._settings = resolve_settings(given, None, lambda _: "cpu")
        self._rules = RequestRules(512, (END_ID,), 16, tokenizer.vocab_size, engine.refusal)
        self._maker = RequestMaker(self._settings, tokenizer, self._rules)
        self._input, self._tokenizer = InputReader(InputSelection((str(path),))), tokenizer
        self._plan = SamplePlan(1, DoneRecords(array("q"), frozenset()))

    def here(self) -> int:
        """The reader's work; how many requests."""
        return self._take(prepare_blocks(self._input.records(), self._maker, self._plan, BLOCK))

    def begin_helper(self) -> HelperProcess:
        """A helper for `from_helper`."""
        helper = HelperProcess(BlockReader, self._tokenizer, self._input.selection, self._input.scan.ids, self._plan)
        helper.call("begin", self._settings, self._rules, BLOCK)
        return helper

    def from_helper(self, helper: HelperProcess) -> int:
        """What is left here of the work of `here`."""
        return self._take(iter(lambda: helper.call("next"), []))

    def _take(self, blocks: Iterator[list[Prepared]]) -> int:
        prefetch = Prefetch(([self._maker.take(item) for item in block] for block in blocks), 16)
        return sum(isinstance(item, Request) for item in prefetch)


def measure(name: str, count: int, work: Callable[[], object], profile: bool) -> None:
    """One line: microseconds of CPU time a record."""
    profiler = cProfile.Profile() if profile else None
    started = process_time()
    if profiler is None:
        work()
    else:
        profiler.runcall(work)
    microseconds = (process_time() - started) / count * 1e6
    print(f"{name:9}{microseconds:8.1f} us a record   {microseconds / RECORD_US_AT_100K:6.1%} of its GPU time", flush=True)
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def write_all(folder: Path, answers: Sequence[Answer], make_lines: MakeLines) -> None:
    """The writer's work."""
    writer = ResultWriter(folder, make_lines)
    for item in answers:
        writer.put(item)
    writer.close(ordered=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--parts", nargs="+", default=["reader", "take", "engine", "answer", "give", "writer"])
    parser.add_argument("--target", type=Path, help="a model whose tokenizer is used")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    count = options.records
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        tokenizer = load_tokenizer(options.target or folder)
        engine = open_engine(folder)
        source = folder / "input.jsonl"
        with source.open("w") as stream:
            stream.writelines(json.dumps({"id": f"record of mine {n}", "prompt": f"Prompt number {n}"}) + "\n" for n in range(count))
        prompt = np.arange(30, dtype=np.int32)
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=(END_ID,))
        completions = list(make_completions(count))
        answers = [build_answer([completion], counts_of([completion], (END_ID,))) for completion in completions]
        reading = Reading(source, tokenizer, engine)
        reader, writer = reading.begin_helper(), HelperProcess(LineMaker, tokenizer, NUM_STEPS)
        writer.call("lines", [])

        def answer() -> None:
            totals = AcceptTotals(NUM_STEPS)
            for completion in completions:
                counts = counts_of([completion], (END_ID,))
                totals.add(counts)
                build_answer([completion], counts)

        parts: dict[str, Callable[[], object]] = {
            "reader": reading.here,
            "take": lambda: reading.from_helper(reader),
            "engine": lambda: sum(1 for _ in engine.generate(Request(n, prompt, sampling) for n in range(count))),
            "answer": answer,
            "give": lambda: write_all(folder, answers, lambda results: writer.call("lines", results)),
            "writer": lambda: write_all(folder, answers, LineMaker(tokenizer, NUM_STEPS).lines),
        }
        for part in options.parts:
            measure(part, count, parts[part], options.profile)
        reader.close()
        writer.close()


if __name__ == "__main__":
    main()
