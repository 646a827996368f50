"""Penalties, bias and least length against transformers' own logits processors, greedy, on the fixture targets."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eaglecli.engine.request import Request, SamplingParams
from tests.engine.harness import LoadedPair, make_engine, random_prompts, run

STOP_IDS = tuple(range(0, 320, 6))[:16]
OPTIONS = (
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7},
    {"logit_bias": ((3, 15.0), (60, 12.0))},
    {"min_new_tokens": 15},
    {"repetition_penalty": 2.5, "logit_bias": ((3, 15.0), (250, 14.0)), "min_new_tokens": 8},
)


def their_tokens(model: torch.nn.Module, request: Request) -> list[int]:
    """What transformers' `generate` writes with the same options under its names."""
    sampling = request.sampling
    bias = {(token,): value for token, value in sampling.logit_bias}
    output = model.generate(
        torch.from_numpy(request.prompt_ids.astype(np.int64))[None],
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids),
        pad_token_id=0,
        repetition_penalty=sampling.repetition_penalty,
        min_new_tokens=sampling.min_new_tokens or None,
        sequence_bias=bias or None,
    )
    return output[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize("name", ["twin", "rand"])
def test_greedy_text_is_that_of_transformers(request: pytest.FixtureRequest, name: str) -> None:
    """B36, without a draft and with a tree."""
    pair: LoadedPair = request.getfixturevalue(name)
    base = SamplingParams(max_new_tokens=24, stop_token_ids=STOP_IDS)
    requests = [
        Request((number, key), prompt, dataclasses.replace(base, **option))
        for number, option in enumerate(OPTIONS)
        for key, prompt in enumerate(random_prompts([2, 9, 17], seed=number))
    ]
    model = AutoModelForCausalLM.from_pretrained(pair.target.path, dtype=torch.float32)
    expected = {request.key: their_tokens(model, request) for request in requests}
    for triple in (None, (3, 2, 7)):
        found = run(make_engine(pair.target, pair.draft, triple, adjusts_logits=True), requests)
        assert {key: completion.output_ids.tolist() for key, completion in found.items()} == expected
