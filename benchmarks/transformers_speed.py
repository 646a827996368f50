"""Our output token/s beside transformers' `generate` on the same prompts, in one process.

    python -m benchmarks.transformers_speed mt_bench.jsonl --target MODEL.gguf --draft smollm2-135m --triple 6/4/32

Greedy, first turns, exactly `--max-new-tokens` new tokens each: transformers is forbidden to end a text, ours goes on behind its end.
transformers: the dequantised weights in the same dtype, left-padded batches one after the other, its own key-value cache and attention.
Ours: plain decoding and the triples, the same number of requests at a time, prefill included. Each is warmed up by one batch first. The
last line of stdout is a JSON summary.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.prompt_texts import load_reference_tokenizer, prompt_ids, read_records
from eaglecli.engine.device_memory import release_memory
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import load_target
from eaglecli.models.model_path import resolve_draft_path, resolve_model_path


def main(arguments: Sequence[str] | None = None) -> int:
    """A line for each batch size and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="JSONL file of prompts")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--triple", action="append", help="steps/topk/draft tokens, repeatable")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--num-batches", type=int, default=2, help="of every batch size")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    path, dtype = resolve_model_path(options.target), getattr(torch, options.dtype)
    tokenizer = load_reference_tokenizer(path)
    prompts = [np.array(prompt_ids(tokenizer, record), np.int32) for record in read_records(options.input, None)]
    context = max(map(len, prompts)) + options.max_new_tokens
    waves = {batch: prompts[: batch * options.num_batches] for batch in options.batch_size}
    rates = our_rates(options, path, dtype, context, waves)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).to(options.device).eval()
    lines = []
    for batch, wave in waves.items():
        transformers_seconds(reference, wave[:batch], batch, options.max_new_tokens)
        theirs = len(wave) * options.max_new_tokens / transformers_seconds(reference, wave, batch, options.max_new_tokens)
        for mode, rate in {"transformers": theirs, **rates[batch]}.items():
            lines.append({"batch": batch, "mode": mode, "tokens_per_s": rate, "ratio": rate / theirs})
            print(f"batch {batch:4} {mode:12} {rate:10.1f} token/s  {rate / theirs:6.2f} x transformers", flush=True)
    print(json.dumps(lines))
    return 0


def our_rates(
    options: argparse.Namespace, path: Path, dtype: torch.dtype, context: int, waves: Mapping[int, Sequence[np.ndarray]]
) -> dict[int, dict[str, float]]:
    """token/s by batch size and mode."""
    target = load_target(path, dtype, options.device, context)
    draft = load_draft(resolve_draft_path(options.draft), target, dtype, options.device, context)
    shapes = [PLAIN, *(SpeculationSettings(*map(int, triple.split("/"))) for triple in options.triple or ["5/1/6"])]
    rates: dict[int, dict[str, float]] = {batch: {} for batch in waves}
    for batch, wave in waves.items():
        for shape in shapes:
            slots = batch * (context + shape.lookahead + 16)
            settings = EngineSettings(context, slots, batch, chunked_prefill_size=8192, speculation=shape, graph_sizes=(batch,))
            engine = Engine(target.model, None if shape == PLAIN else draft.model, settings)
            for _ in engine.capture() if engine.can_capture else ():
                pass
            engine_seconds(engine, wave[:batch], options.max_new_tokens)
            rate = len(wave) * options.max_new_tokens / engine_seconds(engine, wave, options.max_new_tokens)
            rates[batch][str(shape)] = rate
            del engine
            release_memory()
            print(f"batch {batch:4} {shape!s:12} {rate:10.1f} token/s", flush=True)
    return rates


@torch.inference_mode()
def transformers_seconds(model: PreTrainedModel, prompts: Sequence[np.ndarray], batch: int, num_tokens: int) -> float:
    """For all prompts, `batch` at a time."""
    started = perf_counter()
    for first in range(0, len(prompts), batch):
        wave = prompts[first : first + batch]
        width = max(map(len, wave))
        ids = torch.tensor(np.stack([np.pad(prompt, (width - len(prompt), 0)) for prompt in wave]), dtype=torch.int64).to(model.device)
        seen = torch.tensor(np.stack([np.arange(width) >= width - len(prompt) for prompt in wave]), dtype=torch.int64).to(model.device)
        out = model.generate(
            ids, attention_mask=seen, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0
        )
        assert out.shape[1] == width + num_tokens
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - started


def engine_seconds(engine: Engine, prompts: Sequence[np.ndarray], num_tokens: int) -> float:
    """For all prompts."""
    engine.wait_for_device()
    started = perf_counter()
    sampling = SamplingParams(max_new_tokens=num_tokens)
    done = list(engine.generate(Request(index, prompt, sampling) for index, prompt in enumerate(prompts)))
    assert all(len(completion.output_ids) == num_tokens for completion in done)
    return perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
