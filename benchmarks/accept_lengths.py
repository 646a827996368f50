"""Accept length, acceptance by position and speed of a draft on sets of prompts, for several shapes of the tree.

    python -m benchmarks.accept_lengths mt_bench.jsonl gsm8k.jsonl --target MODEL.gguf --triple 5/1/6 --triple 6/4/24
    python -m benchmarks.accept_lengths mt_bench.jsonl ... --batch-size 1          token/s beside plain decoding of the same prompts
    python -m benchmarks.accept_lengths mt_bench.jsonl ... --temperature 1 --noiseless

Greedy unless told otherwise, first turns, 256 new tokens. Accept length is the headline of `stats.json`: tokens that verify steps gave
(accepted drafts and one more each) over verify steps. Plain decoding runs first, when the batch size is 1 or `--plain` is given.
The last line of stdout is a JSON summary.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.prompt_texts import load_reference_tokenizer, prompt_ids, read_records
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from eaglecli.models.model_path import resolve_draft_path, resolve_model_path

_PAGE_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """One line for each shape and set."""
    options = parse_arguments(arguments)
    path = resolve_model_path(options.target)
    tokenizer = load_reference_tokenizer(path)
    sets = {
        file.stem: [np.array(prompt_ids(tokenizer, record), np.int32) for record in read_records(file, options.limit)]
        for file in options.input
    }
    context = max(len(prompt) for prompts in sets.values() for prompt in prompts) + options.max_new_tokens
    dtype = getattr(torch, options.dtype)
    target = load_target(path, dtype, options.device, context)
    draft = load_draft(resolve_draft_path(options.draft), target, dtype, options.device, context)
    shapes = [SpeculationSettings(*map(int, triple.split("/"))) for triple in options.triple]
    if options.batch_size == 1 or options.plain:
        shapes.insert(0, PLAIN)
    results: list[dict[str, object]] = []
    plain_speed: dict[str, float] = {}
    for shape in shapes:
        engine = open_engine(target, draft, shape, context, options)
        for name, prompts in sets.items():
            line = measure(engine, target, shape, name, prompts, options)
            if shape == PLAIN:
                plain_speed[name] = float(line["tokens_per_s"])  # type: ignore[arg-type]
            line["ratio_to_plain"] = round(float(line["tokens_per_s"]) / plain_speed[name], 3) if name in plain_speed else None  # type: ignore[arg-type]
            results.append(line)
            print(json.dumps(line), flush=True)
        if shape != PLAIN:
            lengths = [float(line["accept_length"]) for line in results[-len(sets) :]]  # type: ignore[arg-type]
            print(f"{shape.num_steps}/{shape.topk}/{shape.num_draft_tokens}: mean of {len(sets)} sets {np.mean(lengths):.3f}", flush=True)
    print(json.dumps(results))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, nargs="+", help="JSONL files of prompts, a set each")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m", help="folder of a draft")
    parser.add_argument("--triple", action="append", help="steps/topk/draft tokens, repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="only the first prompts of each set")
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--noiseless", action="store_true", help="draft without the noise that the target will use")
    parser.add_argument("--plain", action="store_true", help="plain decoding too")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.triple = options.triple or ["5/1/6"]
    return options


def open_engine(target: LoadedTarget, draft: LoadedDraft, shape: SpeculationSettings, context: int, options: argparse.Namespace) -> Engine:
    """An engine with its graphs."""
    settings = EngineSettings(
        context_length=context,
        max_total_tokens=options.batch_size * (context + shape.lookahead + _PAGE_SIZE),
        max_running_requests=options.batch_size,
        page_size=_PAGE_SIZE,
        chunked_prefill_size=8192,
        speculation=shape,
        graph_sizes=tuple(sorted({max(1, options.batch_size // part) for part in (1, 2, 4)})) if options.device == "cuda" else (),
        same_noise_drafting=not options.noiseless,
    )
    engine = Engine(target.model, None if shape == PLAIN else draft.model, settings)
    if engine.can_capture:
        for _ in engine.capture():
            pass
    return engine


def measure(
    engine: Engine, target: LoadedTarget, shape: SpeculationSettings, name: str, prompts: list[np.ndarray], options: argparse.Namespace
) -> dict[str, object]:
    """One set by one engine: counts, and seconds after a short warm-up."""

    def request(index: int, cap: int) -> Request:
        sampling = SamplingParams(
            temperature=options.temperature, seed=index, max_new_tokens=cap, stop_token_ids=target.config.eos_token_ids
        )
        return Request(index, prompts[index], sampling)

    for _ in engine.generate([request(index, 8) for index in range(min(2, len(prompts)))]):
        pass
    started = perf_counter()
    found: list[Completion] = list(engine.generate([request(index, options.max_new_tokens) for index in range(len(prompts))]))
    seconds = perf_counter() - started
    counts = np.concatenate([completion.accept_counts for completion in found])
    tokens = sum(len(completion.output_ids) for completion in found)
    steps = max(len(counts), 1)
    return {
        "set": name,
        "triple": f"{shape.num_steps}/{shape.topk}/{shape.num_draft_tokens}",
        "temperature": options.temperature,
        "same_noise": not options.noiseless,
        "batch_size": options.batch_size,
        "prompts": len(found),
        "tokens": tokens,
        "accept_length": round(float(counts.sum() / steps + 1.0), 4),
        "by_position": [round(float((counts > position).mean()), 3) for position in range(shape.num_steps)],
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
