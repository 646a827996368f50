"""Deterministic inference: bit for bit the same text in every dtype, whatever batch, order, page, chunk, padding, tree or draft."""

import numpy as np
import pytest
import torch

import eaglecli.engine.prefill as prefill_module
from eaglecli.engine.attention_backend import TORCH
from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request
from eaglecli.engine.settings import EngineSettings
from eaglecli.errors import UserError
from eaglecli.kernels.choose_tokens import SamplingTensors, choose_tokens
from eaglecli.kernels.model_kernels import ROW_INVARIANT
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.kernel_choice import use_kernels
from eaglecli.models.loader import LoadedTarget, load_target
from tests.engine.harness import DEVICE, make_engine, outcomes, random_prompt, requests_of, run, texts
from tests.fixtures import Pair, write_e3, write_rand, write_twin

CONTEXT = 512
WRITERS = {"twin": write_twin, "rand": write_rand, "e3": write_e3}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


def load(pair: Pair, dtype: torch.dtype) -> tuple[LoadedTarget, LoadedDraft]:
    target = load_target(pair.target_dir, dtype, DEVICE, CONTEXT)
    draft = load_draft(pair.draft_dir, target, dtype, DEVICE, CONTEXT)
    for model in (target.model, draft.model):
        use_kernels(model, ROW_INVARIANT)
    return target, draft


def deterministic_engine(target: LoadedTarget, draft: LoadedDraft | None, triple=None, **settings) -> Engine:
    return make_engine(target, draft, triple, **{"context_length": CONTEXT, "max_total_tokens": 8192, "is_deterministic": True, **settings})


def mixed(temperature: float, count: int = 5, cap: int = 12) -> list[Request]:
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 37, 7, 21, 50)[:count])]
    return requests_of(prompts, cap, temperature=temperature, seed=3)


@pytest.mark.parametrize(("name", "dtype"), [("twin", torch.float32), ("rand", torch.bfloat16), ("e3", torch.bfloat16)])
def test_texts_are_the_same_bits_whatever_runs_beside_them(pairs, name, dtype):
    """At temperature 1 every text follows all bits of the scores closely."""
    target, draft = load(pairs[name], dtype)
    requests = mixed(1.0)
    plain = texts(run(deterministic_engine(target, None, max_running_requests=1, chunked_prefill_size=512), requests))
    ways = (
        (None, {"max_running_requests": 5, "chunked_prefill_size": 9}),
        ((3, 1, 4), {"max_running_requests": 2, "chunked_prefill_size": 16}),
        ((2, 3, 9), {"max_running_requests": 5, "page_size": 4, "chunked_prefill_size": 5}),
        ((2, 2, 5), {"max_running_requests": 5, "graph_sizes": (8,)}),
    )
    for triple, settings in ways:
        backwards = requests if triple is None else requests[::-1]
        assert texts(run(deterministic_engine(target, draft, triple, **settings), backwards)) == plain, (triple, settings)


def test_the_draft_accepts_the_same_tokens_in_every_batch(pairs):
    target, draft = load(pairs["twin"], torch.bfloat16)
    requests = mixed(0.0)
    alone = outcomes(run(deterministic_engine(target, draft, (3, 2, 6), max_running_requests=1), requests))
    together = outcomes(run(deterministic_engine(target, draft, (3, 2, 6), max_running_requests=5, chunked_prefill_size=11), requests))
    assert alone == together


def logits_of_tokens(target: LoadedTarget, chunk: int, batch: int, patch: pytest.MonkeyPatch) -> np.ndarray:
    """The scores after the prompts' last tokens, as float32, when `batch` prompts run in chunks of `chunk` tokens."""
    engine = deterministic_engine(target, None, max_running_requests=batch, chunked_prefill_size=chunk)
    seen: list[torch.Tensor] = []

    def watch(scores: torch.Tensor, sampling: SamplingTensors, position: torch.Tensor) -> torch.Tensor:
        seen.append(scores[sampling.rows != batch].float().cpu())  # the dummy row stands for those that choose nothing
        return choose_tokens(scores, sampling, position)

    patch.setattr(prefill_module, "choose_tokens", watch)
    run(engine, requests_of([random_prompt(40, 1)] * batch, 1))
    return torch.cat(seen).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_a_token_are_the_same_bits_in_every_batch_and_chunk(pairs, dtype, monkeypatch):
    target, _ = load(pairs["rand"], dtype)
    alone = logits_of_tokens(target, chunk=512, batch=1, patch=monkeypatch)
    for chunk, batch in ((1, 1), (7, 1), (64, 3), (13, 17)):
        rows = logits_of_tokens(target, chunk, batch, monkeypatch)
        assert rows.shape[0] == batch
        assert (rows == alone).all(), (chunk, batch)


def test_models_that_were_not_made_for_it_are_refused(pairs):
    target = load_target(pairs["rand"].target_dir, torch.float32, DEVICE, CONTEXT)
    with pytest.raises(ValueError, match="row-invariant"):
        Engine(target.model, None, EngineSettings(CONTEXT, 4096, is_deterministic=True))


def test_a_backend_without_that_form_on_the_device_is_refused():
    with pytest.raises(UserError, match="--enable-deterministic-inference cannot use --attention-backend torch on cuda"):
        TORCH.made_row_invariant(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_leave_the_bits_as_they_are(pairs, dtype):
    target, draft = load(pairs["e3"], dtype)
    requests = mixed(1.0, cap=64) + mixed(0.0, cap=64)
    requests = [Request(key, request.prompt_ids, request.sampling) for key, request in enumerate(requests)]
    plain = texts(run(deterministic_engine(target, None, max_running_requests=1), requests))
    for triple in ((3, 1, 4), (3, 4, 12)):
        for sizes in ((), (1, 2, 4, 8, 16)):
            engine = deterministic_engine(target, draft, triple, max_running_requests=10, graph_sizes=sizes)
            if sizes:
                assert len(list(engine.capture())) == 15
            assert texts(run(engine, requests)) == plain, (triple, sizes)
