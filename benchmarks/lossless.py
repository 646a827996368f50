"""Text with a draft against text without one, token for token, on real prompts.

    python -m benchmarks.lossless prompts.jsonl --target smollm2-135m --draft random --triple 5/1/6 --triple 3/4/16

`--draft random` writes an EAGLE-3 draft of random weights: it proposes noise, so refusal and rewinding are tried at every step.
In float32 the texts may part only at a near-tie: the two tokens' scores, from one forward over the common prefix alone, lie
closer than NEAR_TIE_GAP. In bfloat16 differences are counted and printed with that gap. The last line of stdout is a JSON
summary. Exit code 7: a float32 difference that no near-tie excuses, or a request that was not answered.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.prompt_texts import NEAR_TIE_GAP, Difference, first_difference, load_reference_tokenizer, prompt_ids, read_records
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Completion, Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.errors import ExitCode
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.philox import gumbel_noise
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from eaglecli.models.model_path import resolve_draft_path, resolve_model_path
from tests.fixtures import write_random_draft


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one run."""
    options = parse_arguments(arguments)
    path = resolve_model_path(options.target)
    tokenizer = load_reference_tokenizer(path)
    records = read_records(options.input, options.limit)
    prompts = [np.array(prompt_ids(tokenizer, record), np.int32) for record in records]
    context = max(map(len, prompts)) + options.max_new_tokens
    dtype = getattr(torch, options.dtype)
    target = load_target(path, dtype, options.device, context)
    draft = open_draft(options, target, dtype, context)
    requests = [Request(index, prompt, sampling_of(options, target, index)) for index, prompt in enumerate(prompts)]
    plain, plain_s, _ = generate(target, None, PLAIN, requests, options)
    exit_code = ExitCode.OK
    for triple in options.triple:
        speculation = SpeculationSettings(*map(int, triple.split("/")))
        found, seconds, summary = generate(target, draft, speculation, requests, options)
        report = compare(target, requests, plain, found)
        steps = sum(completion.num_verify_steps for completion in found.values())
        accepted = sum(completion.num_accepted_drafts for completion in found.values())
        report |= {
            "triple": triple,
            "dtype": options.dtype,
            "device": options.device,
            "temperature": options.temperature,
            "prompts": len(requests),
            "tokens": sum(len(completion.output_ids) for completion in found.values()),
            "plain_tokens": sum(len(completion.output_ids) for completion in plain.values()),
            "accept_length": round((accepted + steps) / max(steps, 1), 4),
            "seconds": round(seconds, 2),
            "plain_seconds": round(plain_s, 2),
            "free_pages": f"{summary['num_free_pages']}/{summary['num_pages']}",
        }
        print(json.dumps(report), flush=True)
        is_wrong = report["mismatches"] and options.dtype == "float32"
        if is_wrong or len(found) != len(requests) or len(plain) != len(requests):
            exit_code = ExitCode.CHECK_FAILED
    return int(exit_code)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="JSONL file of prompts")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="random", help="folder of a draft, `smollm2-135m` or `random`")
    parser.add_argument("--triple", action="append", help="steps/topk/draft tokens, repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--graph-sizes", type=int, nargs="*", default=[], help="batch sizes to pad to and, on a GPU, to capture")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.triple = options.triple or ["5/1/6"]
    return options


def open_draft(options: argparse.Namespace, target: LoadedTarget, dtype: torch.dtype, context: int) -> LoadedDraft:
    """The draft that was named, or a random one."""
    if options.draft != "random":
        return load_draft(resolve_draft_path(options.draft), target, dtype, options.device, context)
    with tempfile.TemporaryDirectory() as folder:
        return load_draft(write_random_draft(target.config, Path(folder)), target, dtype, options.device, context)


def sampling_of(options: argparse.Namespace, target: LoadedTarget, index: int) -> SamplingParams:
    """Same settings for all, a seed for each."""
    return SamplingParams(
        temperature=options.temperature, seed=index, max_new_tokens=options.max_new_tokens, stop_token_ids=target.config.eos_token_ids
    )


def generate(
    target: LoadedTarget, draft: LoadedDraft | None, speculation: SpeculationSettings, requests: list[Request], options: argparse.Namespace
) -> tuple[dict[int, Completion], float, dict[str, int]]:
    """Completions by key, seconds without loading, and the engine's books."""
    context = target.model.context_length
    settings = EngineSettings(
        context_length=context,
        max_total_tokens=options.batch_size * (context + speculation.lookahead + 16),
        max_running_requests=options.batch_size,
        speculation=speculation,
        graph_sizes=tuple(options.graph_sizes),
    )
    engine = Engine(target.model, draft.model if draft and speculation != PLAIN else None, settings)
    if options.device == "cuda" and options.graph_sizes:
        for _ in engine.capture():
            pass
    started = perf_counter()
    found = {completion.request.key: completion for completion in engine.generate(requests)}
    engine.check()
    return found, perf_counter() - started, engine.summary()


def compare(target: LoadedTarget, requests: list[Request], plain: dict[int, Completion], found: dict[int, Completion]) -> dict[str, int]:
    """Counts of equal texts, near-ties and other differences, each difference printed."""
    counts = {"equal_texts": 0, "near_ties": 0, "mismatches": 0}
    for request in requests:
        expected, text = plain[request.key].output_ids.tolist(), found[request.key].output_ids.tolist()
        difference = first_difference(text, expected)
        if difference is None:
            counts["equal_texts"] += 1
            continue
        gap = score_gap(target, request, expected, difference)
        excused = gap < NEAR_TIE_GAP
        counts["near_ties" if excused else "mismatches"] += 1
        kind = "near-tie" if excused else "difference"
        print(f"{kind} prompt {request.key} at output token {difference.index}: {difference}, gap {gap:.2e}")
    return counts


@torch.inference_mode()
def score_gap(target: LoadedTarget, request: Request, expected: list[int], difference: Difference) -> float:
    """Distance of the two tokens' scores (logits, or perturbed logits of a sampled request) after the common prefix alone."""
    if difference.ours is None or difference.theirs is None:
        return float("inf")
    device, config = target.model.embed_weight.device, target.config
    ids = np.concatenate([request.prompt_ids, np.array(expected[: difference.index], np.int32)])
    positions = torch.arange(len(ids), dtype=torch.int32, device=device)
    inputs = AttentionInputs(
        rows=positions[:1],
        query_start=torch.tensor([0, len(ids)], dtype=torch.int32, device=device),
        prefix_lens=positions[:1],
        slot_table=positions[None],
        out_slots=positions,
        positions=positions,
        tail_mask=None,
        max_query_len=len(ids),
        max_prefix_len=0,
    )
    shape = (config.num_layers, 2, len(ids), config.layer.num_kv_heads, config.layer.head_dim)
    cache = torch.empty(shape, dtype=target.model.dtype, device=device)
    hidden = target.model.forward(torch.from_numpy(ids).long().to(device), positions, cache, inputs, ()).hidden[-1:]
    scores = target.model.logits(hidden).float()
    sampling = request.sampling
    candidates = torch.tensor([difference.ours, difference.theirs], device=device)
    pair = scores[0, candidates]
    if sampling.temperature > 0:
        key = ((sampling.seed, torch.int64), (request.sample, torch.int32), (len(ids), torch.int32))
        noise = gumbel_noise(*(torch.tensor([value], dtype=dtype, device=device) for value, dtype in key), candidates)
        pair = pair / sampling.temperature + noise[0]
    return float((pair[0] - pair[1]).abs())


if __name__ == "__main__":
    sys.exit(main())
