"""Limits: the draft's, the run's, the pool's, and sliding windows. Kind CTX of the known failures."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eaglecli.engine.engine import Engine
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.settings import PLAIN, EngineSettings, SpeculationSettings
from eaglecli.errors import UserError
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from tests.engine.harness import (
    DEVICE,
    LoadedPair,
    Triple,
    draft_dir,
    load_engine_pair,
    make_engine,
    outcomes,
    random_prompt,
    random_prompts,
    requests_of,
    run,
    texts,
)
from tests.fixtures import change_checkpoint

# ---- B14: a draft made for fewer positions -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_draft(twin: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> LoadedDraft:
    """TWIN's draft, which says that it was made for 64 positions."""
    folder = change_checkpoint(draft_dir(twin), tmp_path_factory.mktemp("short"), {"max_position_embeddings": 64})
    return load_engine_pair(twin.target.path, folder)[1]


@pytest.mark.parametrize("triple", [(3, 1, 4), (2, 2, 5)], ids=str)
def test_draft_made_for_64_positions_serves_2048(twin: LoadedPair, short_draft: LoadedDraft, triple: Triple) -> None:
    """B14: the limit is crossed in prefill and in decode; nothing depends on it."""
    requests = [
        Request(length, random_prompt(length, length), SamplingParams(max_new_tokens=90 if length == 1 else 16))
        for length in (1, 63, 64, 65, 100, 513, 1500)
    ]
    found = run(make_engine(twin.target, short_draft, triple), requests)
    assert texts(found) == texts(run(make_engine(twin.target, None), requests))
    assert outcomes(found) == outcomes(run(make_engine(twin.target, twin.draft, triple), requests))


def test_draft_made_for_fewer_positions_is_warned_about_once(twin: LoadedPair, short_draft: LoadedDraft) -> None:
    """B14."""
    assert [warning for warning in short_draft.warnings if "64 positions" in warning] == list(short_draft.warnings)
    assert len(short_draft.warnings) == 1
    assert not twin.draft.warnings


# ---- the edge of the context ---------------------------------------------------------------------------------------

EDGE = 40


def edge_engine(pair: LoadedPair, triple: Triple | None) -> Engine:
    """An engine whose rotary tables end with its context."""
    target = load_target(pair.target.path, torch.float32, DEVICE, EDGE)
    draft = load_draft(draft_dir(pair), target, torch.float32, DEVICE, EDGE)
    return make_engine(target, draft, triple, context_length=EDGE, page_size=1)


@pytest.mark.parametrize("triple", [None, (1, 1, 2), (5, 1, 6), (4, 4, 16)], ids=str)
@pytest.mark.parametrize("name", ["twin", "cycle", "rand"])
def test_last_token_of_the_context_is_usable(request: pytest.FixtureRequest, name: str, triple: Triple | None) -> None:
    pair: LoadedPair = request.getfixturevalue(name)
    requests = [
        Request(size, random_prompt(size, size), SamplingParams(temperature=float(size % 2), seed=size, max_new_tokens=EDGE - size))
        for size in (1, 17, 20, 30, EDGE - 3, EDGE - 2, EDGE - 1)
    ]
    found = texts(run(edge_engine(pair, triple), requests))
    assert found == texts(run(make_engine(pair.target, None), requests))
    assert all(len(output_ids) == EDGE - size and reason == "length" for size, (output_ids, reason) in found.items())


# ---- requests that cannot run --------------------------------------------------------------------------------------


def test_request_that_can_never_fit_is_answered_and_does_not_block_others(twin: LoadedPair) -> None:
    good = [dataclasses.replace(request, key=("good", request.key)) for request in requests_of(random_prompts([5, 9, 7, 30]), 12)]
    too_long = Request("context", random_prompt(50), SamplingParams(max_new_tokens=79))
    too_large = Request("pool", random_prompt(50), SamplingParams(max_new_tokens=60))
    too_many_stops = Request("stops", random_prompt(5), SamplingParams(max_new_tokens=5, stop_token_ids=tuple(range(17))))
    mixed = [too_long, good[0], good[1], too_large, too_many_stops, good[2], good[3], dataclasses.replace(too_long, key="again")]
    engine = make_engine(twin.target, twin.draft, (4, 1, 5), context_length=128, max_total_tokens=96, page_size=4)
    found = run(engine, mixed)
    refused = {key: completion.error for key, completion in found.items() if completion.finish_reason == "error"}
    assert set(refused) == {"context", "pool", "stops", "again"}
    assert "128" in str(refused["context"]) and "96" in str(refused["pool"]) and "17" in str(refused["stops"])
    plain = texts(run(make_engine(twin.target, None), good))
    assert {key: text for key, text in texts(found).items() if key not in refused} == plain


# ---- sliding windows -----------------------------------------------------------------------------------------------

WINDOW = 8


@pytest.fixture(scope="module")
def windowed(twin: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedTarget, LoadedDraft]:
    """TWIN's weights as a Mistral target whose queries see 8 keys."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    folder = change_checkpoint(twin.target.path, tmp_path_factory.mktemp("mistral"), mistral)
    return load_engine_pair(folder, draft_dir(twin))


WINDOW_REQUESTS = requests_of(random_prompts([1, 7, 8, 9, 30], seed=60), 20)


@pytest.fixture(scope="module")
def windowed_text(windowed: tuple[LoadedTarget, LoadedDraft]) -> dict[object, list[int]]:
    """Greedy text of transformers, a whole forward for each token."""
    model = AutoModelForCausalLM.from_pretrained(windowed[0].path, dtype=torch.float32, attn_implementation="eager")
    found: dict[object, list[int]] = {}
    for request in WINDOW_REQUESTS:
        ids = request.prompt_ids.tolist()
        for _ in range(request.sampling.max_new_tokens):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found[request.key] = ids[len(request.prompt_ids) :]
    return found


@pytest.mark.parametrize("triple", [None, (4, 1, 5), (4, 2, 9), (WINDOW - 1, 1, WINDOW)], ids=str)
def test_windowed_target_writes_what_transformers_writes(
    windowed: tuple[LoadedTarget, LoadedDraft], windowed_text: dict[object, list[int]], triple: Triple | None
) -> None:
    found = run(make_engine(*windowed, triple), WINDOW_REQUESTS)
    assert {key: completion.output_ids.tolist() for key, completion in found.items()} == windowed_text


def test_window_matters_to_the_windowed_text(twin: LoadedPair, windowed_text: dict[object, list[int]]) -> None:
    full = run(make_engine(twin.target, None), WINDOW_REQUESTS)
    assert any(completion.output_ids.tolist() != windowed_text[key] for key, completion in full.items())


def test_tree_as_deep_as_a_window_is_refused(windowed: tuple[LoadedTarget, LoadedDraft]) -> None:
    with pytest.raises(UserError, match="window of 8") as caught:
        make_engine(*windowed, (WINDOW, 1, WINDOW + 1))
    assert "--speculative-num-steps" in caught.value.hint


def test_window_of_a_draft_bounds_the_tree_too(twin: LoadedPair) -> None:
    draft = load_engine_pair(twin.target.path, draft_dir(twin))[1].model
    draft.config = dataclasses.replace(draft.config, windows=(3,))
    with pytest.raises(UserError, match="draft"):
        Engine(twin.target.model, draft, EngineSettings(64, 512, speculation=SpeculationSettings(3, 2, 6)))
    Engine(twin.target.model, draft, EngineSettings(64, 512, speculation=SpeculationSettings(2, 2, 6)))


def test_window_of_any_size_serves_plain_decoding(windowed: tuple[LoadedTarget, LoadedDraft]) -> None:
    target = windowed[0].model
    narrow = Engine(target, None, EngineSettings(64, 512, speculation=PLAIN))
    assert [len(c.output_ids) for c in narrow.generate(requests_of([np.arange(20)], 9))] == [9]
