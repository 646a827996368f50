"""The real model at hand, loaded once: SmolLM2-135M-Instruct against transformers, and EAGLE with a random draft against plain decoding.

Short versions of `benchmarks/compare_transformers.py` and `benchmarks/lossless.py`, on prompts of our own.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.prompt_texts import NEAR_TIE_GAP, first_difference, load_reference_tokenizer, prompt_ids, read_records
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from eaglecli.models.model_path import BUILT_IN_DRAFT, resolve_model_path
from tests.engine.harness import DEVICE, make_engine, run, texts
from tests.fixtures import write_random_draft

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
CONTEXT = 256
NUM_PROMPTS, NUM_TOKENS = 4, 24


@dataclass(frozen=True, eq=False)
class RealModel:
    target: LoadedTarget
    requests: list[Request]
    reference: PreTrainedModel


@pytest.fixture(scope="module")
def smollm2() -> RealModel:
    path = resolve_model_path("smollm2-135m")
    tokenizer = load_reference_tokenizer(path)
    target = load_target(path, torch.float32, DEVICE, CONTEXT)
    prompts = [np.array(prompt_ids(tokenizer, record), np.int32) for record in read_records(EXAMPLES, NUM_PROMPTS)]
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=target.config.eos_token_ids)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).to(DEVICE).eval()
    return RealModel(target, [Request(key, prompt, sampling) for key, prompt in enumerate(prompts)], reference)


@torch.inference_mode()
def gap_at(model: PreTrainedModel, prefix: list[int], tokens: tuple[int, int]) -> float:
    """Distance of two tokens' logits after `prefix`, from transformers."""
    logits = model(torch.tensor([prefix], device=model.device)).logits[0, -1]
    return float((logits[tokens[0]] - logits[tokens[1]]).abs())


def assert_equal_but_for_near_ties(model: PreTrainedModel, request: Request, ours: list[int], expected: list[int]) -> None:
    difference = first_difference(ours, expected)
    if difference is None:
        return
    assert difference.ours is not None and difference.theirs is not None, f"one text ended early: {difference}"
    gap = gap_at(model, request.prompt_ids.tolist() + expected[: difference.index], (difference.ours, difference.theirs))
    print(f"near-tie in prompt {request.key}: {difference}, gap {gap:.2e}")
    assert gap < NEAR_TIE_GAP


def test_greedy_text_equals_transformers(smollm2: RealModel) -> None:
    found = texts(run(make_engine(smollm2.target, None, context_length=CONTEXT, max_total_tokens=2048), smollm2.requests))
    for request in smollm2.requests:
        ids = torch.from_numpy(request.prompt_ids)[None].long().to(DEVICE)
        options = {
            "max_new_tokens": NUM_TOKENS,
            "do_sample": False,
            "eos_token_id": list(request.sampling.stop_token_ids),
            "pad_token_id": 0,
        }
        written = smollm2.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert_equal_but_for_near_ties(smollm2.reference, request, found[request.key][0], written[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("triple", [(2, 1, 3), (3, 2, 6)], ids=str)
def test_eagle_with_a_random_draft_equals_plain_decoding(
    smollm2: RealModel, triple: tuple[int, int, int], temperature: float, tmp_path: Path
) -> None:
    draft = load_draft(write_random_draft(smollm2.target.config, tmp_path), smollm2.target, torch.float32, DEVICE, CONTEXT)
    stop = smollm2.target.config.eos_token_ids
    requests = [
        Request(
            request.key,
            request.prompt_ids,
            SamplingParams(temperature=temperature, seed=request.key, max_new_tokens=12, stop_token_ids=stop),
        )
        for request in smollm2.requests
    ]
    sizes = {"context_length": CONTEXT, "max_total_tokens": 2048}
    plain = texts(run(make_engine(smollm2.target, None, **sizes), requests))
    found = texts(run(make_engine(smollm2.target, draft, triple, **sizes), requests))
    if temperature > 0:
        assert found == plain  # a sampled near-tie would be one of perturbed scores: none on these seeds
    for request in requests:
        assert_equal_but_for_near_ties(smollm2.reference, request, found[request.key][0], plain[request.key][0])


@pytest.mark.parametrize("triple", [(3, 1, 4), (4, 4, 16)], ids=str)
def test_the_shipped_draft_is_accepted_and_changes_no_text(smollm2: RealModel, triple: tuple[int, int, int]) -> None:
    draft = load_draft(BUILT_IN_DRAFT, smollm2.target, torch.float32, DEVICE, CONTEXT)
    sizes = {"context_length": CONTEXT, "max_total_tokens": 2048}
    plain = texts(run(make_engine(smollm2.target, None, **sizes), smollm2.requests))
    completions = run(make_engine(smollm2.target, draft, triple, **sizes), smollm2.requests)
    found = texts(completions)
    for request in smollm2.requests:
        assert_equal_but_for_near_ties(smollm2.reference, request, found[request.key][0], plain[request.key][0])
    counts = np.concatenate([completion.accept_counts for completion in completions.values()])
    assert counts.mean() + 1.0 > 2.0
