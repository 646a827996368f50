"""Targets against transformers: tiny random checkpoints of every family, through scattered cache slots."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.rms_norm import rms_norm
from eaglecli.models.loader import load_target
from eaglecli.models.target import TargetModel
from tests.helpers import new_kv_cache, packed_inputs, scattered_slot_table

CONTEXT = 64
PROMPT_LEN = 24
VOCAB = 96
NUM_LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
LONG = [1.0, 2.0, 3.0, 4.0]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
LONGROPE = {"rope_type": "longrope", "short_factor": LONG, "long_factor": LONG, "factor": 4.0, "rope_theta": 500.0}
CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama wide heads": lambda: LlamaConfig(**SIZES, head_dim=16),
    "llama one kv head": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "rope base": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "rope linear": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}),
    "rope dynamic": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}),
    "rope llama3": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "rope yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
    "rope yarn mscale": lambda: Qwen2Config(**SIZES, rope_parameters=YARN | {"mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False}),
    "rope longrope": lambda: LlamaConfig(**SIZES, rope_parameters=LONGROPE | {"original_max_position_embeddings": CONTEXT}),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral window": lambda: MistralConfig(**SIZES, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**SIZES, sliding_window=7),
    "qwen2 window": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3 biases": lambda: Qwen3Config(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=True),
    "qwen3 window": lambda: Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}


@dataclass(frozen=True, eq=False)
class Pair:
    """The same checkpoint in transformers and here, and what transformers says about one prompt."""

    model: TargetModel
    ids: torch.Tensor  # int64 [PROMPT_LEN]
    logits: torch.Tensor  # [PROMPT_LEN, VOCAB]
    hidden_states: tuple[torch.Tensor, ...]  # boundaries 0 to NUM_LAYERS, the last one after the final norm
    reference: PreTrainedModel


def random_reference(config: Any, seed: int = 0) -> PreTrainedModel:
    """A transformers model in which no weight, bias or norm keeps a value that would hide a mistake."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data.normal_(1.0 if "norm" in name else 0.0, scale)
    return model


def make_pair(config: Any, folder: Path) -> Pair:
    reference = random_reference(config)
    reference.save_pretrained(folder)
    ids = torch.randint(VOCAB, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = reference(ids[None], output_hidden_states=True, use_cache=False)
    model = load_target(folder, torch.float32, "cpu", CONTEXT).model
    return Pair(model, ids, output.logits[0], tuple(state[0] for state in output.hidden_states), reference)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield make_pair(CASES[request.param](), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def window_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(CASES["mistral window"](), tmp_path_factory.mktemp("checkpoint"))


def cache_of(model: TargetModel, num_slots: int) -> torch.Tensor:
    return new_kv_cache(model.config.num_layers, num_slots, model.config.num_kv_heads, model.config.head_dim)


def run_logits(model: TargetModel, ids: torch.Tensor, cache: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    return model.logits(model(ids, inputs.positions, cache, inputs).hidden)


def chunked_logits(model: TargetModel, ids: torch.Tensor, chunk_lens: list[int]) -> torch.Tensor:
    """Logits of all tokens, run in chunks through the cache."""
    table = scattered_slot_table(1, CONTEXT)
    cache = cache_of(model, CONTEXT + 1)
    parts, done = [], 0
    for chunk_len in chunk_lens:
        inputs = packed_inputs(table, [done], [chunk_len])
        parts.append(run_logits(model, ids[done : done + chunk_len], cache, inputs))
        done += chunk_len
    return torch.cat(parts)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("chunk_lens", [[PROMPT_LEN], [9, 1, 2, 12], [1] * PROMPT_LEN], ids=["prefill", "chunks", "token by token"])
def test_logits_equal_transformers(pair: Pair, chunk_lens: list[int]) -> None:
    assert_close(chunked_logits(pair.model, pair.ids, chunk_lens), pair.logits)


def test_features_are_the_residual_streams_of_transformers(pair: Pair) -> None:
    taps = (0, 2, 1)
    inputs = packed_inputs(scattered_slot_table(1, CONTEXT), [0], [PROMPT_LEN])
    output = pair.model(pair.ids, inputs.positions, cache_of(pair.model, CONTEXT + 1), inputs, taps)
    assert_close(output.features, torch.cat([pair.hidden_states[tap] for tap in taps], dim=-1))
    assert_close(output.hidden, pair.hidden_states[-1])


def test_last_boundary_is_the_stream_before_the_final_norm(window_pair: Pair) -> None:
    model = window_pair.model
    inputs = packed_inputs(scattered_slot_table(1, CONTEXT), [0], [PROMPT_LEN])
    output = model(window_pair.ids, inputs.positions, cache_of(model, CONTEXT + 1), inputs, (NUM_LAYERS,))
    assert_close(rms_norm(output.features, model.final_norm, model.config.layer.rms_norm_eps), output.hidden)


def test_features_are_the_hidden_states_when_nothing_is_tapped(window_pair: Pair) -> None:
    inputs = packed_inputs(scattered_slot_table(1, CONTEXT), [0], [PROMPT_LEN])
    output = window_pair.model(window_pair.ids, inputs.positions, cache_of(window_pair.model, CONTEXT + 1), inputs)
    assert output.features is output.hidden


def test_rows_of_different_lengths_share_a_forward(pair: Pair) -> None:
    table = scattered_slot_table(3, CONTEXT)
    cache = cache_of(pair.model, 3 * CONTEXT + 1)
    first = packed_inputs(table, [0, 0, 0], [5, 0, 17])
    run_logits(pair.model, torch.cat([pair.ids[:5], pair.ids[:17]]), cache, first)
    second = packed_inputs(table, [5, 0, 17], [3, 11, 7])
    found = run_logits(pair.model, torch.cat([pair.ids[5:8], pair.ids[:11], pair.ids[17:]]), cache, second)
    assert_close(found, torch.cat([pair.logits[5:8], pair.logits[:11], pair.logits[17:]]))


def test_padding_tokens_and_rows_change_nothing(pair: Pair) -> None:
    padding = 3
    table = torch.cat([scattered_slot_table(1, CONTEXT), torch.zeros(1, CONTEXT, dtype=torch.int32)])
    plain = packed_inputs(table[:1], [0], [PROMPT_LEN])
    padded = AttentionInputs(
        rows=torch.tensor([0, 1], dtype=torch.int32),
        query_start=torch.tensor([0, PROMPT_LEN, PROMPT_LEN], dtype=torch.int32),
        prefix_lens=torch.zeros(2, dtype=torch.int32),
        slot_table=table,
        out_slots=torch.cat([plain.out_slots, torch.zeros(padding, dtype=torch.int32)]),
        positions=torch.cat([plain.positions, torch.zeros(padding, dtype=torch.int32)]),
        tail_mask=None,
        max_query_len=PROMPT_LEN + padding,
        max_prefix_len=CONTEXT,
    )
    found = run_logits(pair.model, torch.cat([pair.ids, pair.ids[:padding]]), cache_of(pair.model, CONTEXT + 1), padded)
    assert_close(found[:PROMPT_LEN], pair.logits)


def test_tree_nodes_see_their_path_alone(pair: Pair) -> None:
    """Every node of a tree gets the logits of a plain forward over prefix and path."""
    parents = [-1, 0, 0, 1, 1, 2, 3]
    prefix_len, num_nodes = 12, len(parents)
    node_ids = torch.randint(VOCAB, (num_nodes,), generator=torch.Generator().manual_seed(2))
    paths = [[node] for node in range(num_nodes)]
    for node, parent in enumerate(parents):
        if parent >= 0:
            paths[node] = [*paths[parent], node]
    mask = torch.zeros(1, num_nodes, num_nodes, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    table = scattered_slot_table(1, CONTEXT)
    cache = cache_of(pair.model, CONTEXT + 1)
    run_logits(pair.model, pair.ids[:prefix_len], cache, packed_inputs(table, [0], [prefix_len]))
    positions = [prefix_len + len(path) - 1 for path in paths]
    found = run_logits(pair.model, node_ids, cache, packed_inputs(table, [prefix_len], [num_nodes], mask, positions))
    for node, path in enumerate(paths):
        with torch.no_grad():
            expected = pair.reference(torch.cat([pair.ids[:prefix_len], node_ids[path]])[None], use_cache=False).logits[0, -1]
        assert_close(found[node], expected)


def test_float64_agrees_with_float32(tmp_path: Path) -> None:
    pair = make_pair(CASES["qwen3"](), tmp_path)
    model = load_target(tmp_path, torch.float64, "cpu", CONTEXT).model
    inputs = packed_inputs(scattered_slot_table(1, CONTEXT), [0], [PROMPT_LEN])
    cache = new_kv_cache(NUM_LAYERS, CONTEXT + 1, 2, 16, torch.float64)
    assert_close(run_logits(model, pair.ids, cache, inputs).float(), pair.logits)
