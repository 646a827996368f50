"""Greedy text of eaglecli (plain decoding) against transformers `generate`, token for token.

    python benchmarks/compare_transformers.py prompts.jsonl --target smollm2-135m --max-new-tokens 64

Every line of the input has `messages` or `prompt`; the tokenizer, its chat template and the reference text are transformers' own, one
prompt at a time. eaglecli runs the same prompts in batches. The texts may part only at a near-tie: the two tokens' logits, from one
uncached transformers forward over the common prefix, lie closer than NEAR_TIE_GAP. Each one is printed and counted, and ends the
comparison of its prompt. The last line of stdout is a JSON summary. Exit code 0: equal or excused; 7: a real mismatch; 2 or 5: bad
input or model.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prompt_texts import NEAR_TIE_GAP, Difference, first_difference, load_reference_tokenizer, prompt_ids, read_records
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.settings import EngineSettings
from eaglecli.errors import ExitCode, UserError
from eaglecli.models.loader import load_target
from eaglecli.models.model_path import resolve_model_path

PAGE_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one run; foreseeable failures end as one sentence on stderr."""
    options = parse_arguments(arguments)
    try:
        return compare(options)
    except UserError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return int(error.exit_code)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="JSONL file of prompts")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, help="compare only the first prompts")
    parser.add_argument("--batch-size", type=int, default=8, help="rows that eaglecli runs at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> int:
    """Run both, print every difference and the summary, and return the exit code."""
    path = resolve_model_path(options.target)
    records = read_records(options.input, options.limit)
    model, tokenizer = load_reference(path, options.device)
    prompts = [prompt_ids(tokenizer, record) for record in records]
    ours, stop_ids, seconds = generate_ours(path, prompts, options)
    num_tokens, near_ties, mismatches = 0, 0, 0
    reference_s = 0.0
    for record, prompt, text in zip(tqdm(records, unit="prompt"), prompts, ours, strict=True):
        started = perf_counter()
        expected = generate_reference(model, prompt, options.max_new_tokens, stop_ids)
        reference_s += perf_counter() - started
        difference = first_difference(text, expected)
        num_tokens += len(expected) if difference is None else difference.index
        if difference is not None:
            gap = reference_gap(model, prompt + expected[: difference.index], difference)
            excused = gap < NEAR_TIE_GAP
            near_ties, mismatches = near_ties + excused, mismatches + (not excused)
            print(describe(record, difference, gap, excused, tokenizer.decode), flush=True)
    summary = {
        "target": options.target,
        "device": options.device,
        "prompts": len(records),
        "tokens_equal": num_tokens,
        "near_ties": near_ties,
        "mismatches": mismatches,
        "eaglecli_s": round(seconds, 2),
        "transformers_s": round(reference_s, 2),
    }
    print(json.dumps(summary))
    return int(ExitCode.CHECK_FAILED if mismatches else ExitCode.OK)


def load_reference(path: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same checkpoint through transformers, float32."""
    folder, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).to(device).eval()
    return model, load_reference_tokenizer(path)


def generate_ours(path: Path, prompts: list[list[int]], options: argparse.Namespace) -> tuple[list[list[int]], tuple[int, ...], float]:
    """Output ids of every prompt through the engine, the stop ids used, and the seconds of generation."""
    context_length = max(map(len, prompts)) + options.max_new_tokens
    loaded = load_target(path, torch.float32, options.device, context_length)
    settings = EngineSettings(
        context_length=context_length,
        max_total_tokens=options.batch_size * (context_length + 2 * PAGE_SIZE),
        max_running_requests=options.batch_size,
        page_size=PAGE_SIZE,
    )
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, stop_token_ids=loaded.config.eos_token_ids)
    requests = [Request(index, np.array(prompt, dtype=np.int32), sampling) for index, prompt in enumerate(prompts)]
    started = perf_counter()
    engine = Engine(loaded.model, None, settings)
    texts = {completion.request.key: completion.output_ids.tolist() for completion in engine.generate(requests)}
    return [texts[index] for index in range(len(prompts))], sampling.stop_token_ids, perf_counter() - started


def generate_reference(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
    """Output ids of one prompt, the stop id included."""
    ids = torch.tensor([prompt], device=model.device)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
    )
    return written[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_gap(model: PreTrainedModel, prefix: list[int], difference: Difference) -> float:
    """How far apart the two tokens' logits are after `prefix`; infinite where one text has ended, which no tie explains."""
    if difference.ours is None or difference.theirs is None:
        return float("inf")
    logits = model(torch.tensor([prefix], device=model.device)).logits[0, -1]
    return float((logits[difference.ours] - logits[difference.theirs]).abs())


def describe(record: dict[str, Any], difference: Difference, gap: float, excused: bool, decode: Callable[[list[int]], str]) -> str:
    """One line about a difference."""
    mine, other = ("end" if token is None else f"{token} {decode([token])!r}" for token in (difference.ours, difference.theirs))
    kind = "near-tie" if excused else "MISMATCH"
    return f"{kind} {record.get('id', '')} at output token {difference.index}: eaglecli {mine}, transformers {other}, gap {gap:.2e}"


if __name__ == "__main__":
    sys.exit(main())
