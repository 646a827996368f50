"""Every published spelling of a draft loads to the same numbers as the SafeAILab spelling."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eaglecli.errors import ModelError
from eaglecli.models.draft_layout import read_layout
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget
from tests.fixtures import Tensors, Weights, write_checkpoint
from tests.models.draft_cases import (
    CONTEXT,
    HIDDEN,
    as_midlayer,
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    load_small_target,
    random_layer,
    random_norm,
    random_pairs,
    run_draft,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_small_target(tmp_path_factory.mktemp("target"))


def load(folder: Path, target: LoadedTarget, config: Mapping[str, Any], tensors: Tensors, **options: Any) -> LoadedDraft:
    return load_draft(write_checkpoint(folder, config, tensors), target, torch.float32, "cpu", CONTEXT, **options)


def assert_same_numbers(first: LoadedDraft, second: LoadedDraft, feature_size: int) -> None:
    token_ids, features = random_pairs(feature_size)
    for ours, theirs in zip(*(run_draft(draft, token_ids, draft.model.fuse(features)) for draft in (first, second)), strict=True):
        assert torch.equal(ours, theirs)


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


def speculators_config(kind: str, config: Mapping[str, Any], **outer: Any) -> dict[str, Any]:
    """A config of the speculators package around the layer keys of `config`."""
    layer = {key: value for key, value in config.items() if key not in ("bias", "draft_vocab_size", "architectures")}
    return {"speculators_model_type": kind, "architectures": ["Speculator"], "transformer_layer_config": layer, **outer}


def interleave(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head (0, hd/2, 1, hd/2 + 1, ...): the order in which Mistral's own files rotate neighbours."""
    order = torch.arange(head_dim).view(2, head_dim // 2).T.reshape(-1)
    return tensor.view(-1, head_dim, tensor.shape[1])[:, order].reshape(tensor.shape)


def mistral_name(name: str) -> str:
    parts = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attention_norm",
        "fc": "eagle_linear",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


EAGLE_SPELLINGS: dict[str, Callable[[Tensors], tuple[dict[str, Any], Tensors]]] = {
    "sglang": lambda tensors: (eagle_config(architectures=["LlamaForCausalLMEagle"]), renamed(tensors, lambda name: f"model.{name}")),
    "rotary buffer": lambda tensors: (eagle_config(), tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    "speculators": lambda tensors: (
        speculators_config("eagle", eagle_config(), fusion_bias=False, layernorms=False),
        renamed(tensors, lambda name: name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")),
    ),
}


@pytest.mark.parametrize("spelling", EAGLE_SPELLINGS)
def test_eagle_spelling_loads_to_the_same_numbers(spelling: str, target: LoadedTarget, tmp_path: Path) -> None:
    tensors = eagle_tensors(eagle_config())
    base = load(tmp_path / "base", target, eagle_config(), tensors)
    other = load(tmp_path / "other", target, *EAGLE_SPELLINGS[spelling](tensors))
    assert base.fit.config == other.fit.config
    assert_same_numbers(base, other, HIDDEN)


def test_mistral_native_draft_loads_to_the_same_numbers(target: LoadedTarget, tmp_path: Path) -> None:
    """Its own config and weight file names, and q and k rows in the order of Mistral's rotation."""
    tensors = eagle_tensors(eagle_config()) | {"layers.0.input_layernorm.weight": random_norm(Weights(1), HIDDEN)}
    base = load(tmp_path / "base", target, eagle_config(), tensors)
    native = {name: interleave(tensor, 8) if ".q_proj" in name or ".k_proj" in name else tensor for name, tensor in tensors.items()}
    params = {
        "dim": HIDDEN,
        "n_layers": 1,
        "head_dim": 8,
        "hidden_dim": 48,
        "n_heads": 4,
        "n_kv_heads": 2,
        "norm_eps": 1e-6,
        "vocab_size": 320,
        "rope_theta": 10000.0,
    }
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    save_file({mistral_name(name): tensor.contiguous() for name, tensor in native.items()}, folder / "consolidated.safetensors")
    assert_same_numbers(base, load_draft(folder, target, torch.float32, "cpu", CONTEXT), HIDDEN)


def test_speculators_norm_names_load_to_the_same_numbers(target: LoadedTarget, tmp_path: Path) -> None:
    weights = Weights(4)
    ours = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight", "layers.0.input_layernorm.weight")
    norms = {name: random_norm(weights, HIDDEN) for name in ours}
    tensors = eagle_tensors(eagle_config())
    older = dict(zip(("embed_layernorm.weight", "lm_head_layernorm.weight", "hidden_layernorm.weight"), norms.values(), strict=True))
    base = load(tmp_path / "base", target, speculators_config("eagle", eagle_config(), layernorms=True), tensors | norms)
    assert_same_numbers(base, load(tmp_path / "other", target, eagle_config(), tensors | older), HIDDEN)


EAGLE3_SPELLINGS: dict[str, Callable[[Tensors], tuple[dict[str, Any], Tensors]]] = {
    "prefixed": lambda tensors: (eagle3_config(), renamed(as_midlayer(tensors), lambda name: f"model.{name}")),
    "target's layer count in the config": lambda tensors: (eagle3_config() | {"num_hidden_layers": 40}, as_midlayer(tensors)),
    "no t2d": lambda tensors: (eagle3_config(), {name: tensor for name, tensor in as_midlayer(tensors).items() if name != "t2d"}),
    "speculators": lambda tensors: (
        speculators_config(
            "eagle3", eagle3_config(), draft_vocab_size=64, norm_before_residual=False, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
        ),
        tensors,
    ),
    "specforge ids": lambda tensors: (eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}), as_midlayer(tensors)),
}


@pytest.mark.parametrize("spelling", EAGLE3_SPELLINGS)
def test_eagle3_spelling_loads_to_the_same_numbers(spelling: str, target: LoadedTarget, tmp_path: Path) -> None:
    tensors = eagle3_tensors(eagle3_config())
    base = load(tmp_path / "base", target, eagle3_config(), as_midlayer(tensors))
    other = load(tmp_path / "other", target, *EAGLE3_SPELLINGS[spelling](tensors))
    assert base.model.tap_boundaries == other.model.tap_boundaries == (2, 4, 5)
    assert torch.equal(base.model.token_map, other.model.token_map)
    assert_same_numbers(base, other, 3 * HIDDEN)


def test_legacy_names_of_the_norms_per_state_load_to_the_same_numbers(target: LoadedTarget, tmp_path: Path) -> None:
    weights, tensors = Weights(6), as_midlayer(eagle3_tensors(eagle3_config()))
    norms = [random_norm(weights, HIDDEN) for _ in range(3)]
    legacy = dict(zip(("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"), norms, strict=True))
    numbered = {f"fc_norm.{index}.weight": norm for index, norm in enumerate(norms)}
    base = load(tmp_path / "base", target, eagle3_config(fc_norm=True), tensors | numbered)
    assert_same_numbers(base, load(tmp_path / "other", target, eagle3_config(use_aux_norm=True), tensors | legacy), 3 * HIDDEN)


def test_later_layers_may_call_their_input_norm_hidden_norm(target: LoadedTarget, tmp_path: Path) -> None:
    tensors = eagle3_tensors(eagle3_config()) | random_layer(Weights(7), eagle3_config(), 1)
    sglang = renamed(tensors, lambda name: name.replace("layers.1.input_layernorm", "layers.1.hidden_norm"))
    base = load(tmp_path / "base", target, eagle3_config(), tensors)
    assert base.model.num_layers == 2
    assert_same_numbers(base, load(tmp_path / "other", target, eagle3_config(), sglang), 3 * HIDDEN)


def write_as_pickle(folder: Path, tensors: Tensors) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def write_with_unrelated_pickle(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors")
    torch.save({"state": torch.zeros(3)}, folder / "optimizer.bin")


def write_sharded(folder: Path, tensors: Tensors) -> None:
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("write", [write_as_pickle, write_with_unrelated_pickle, write_sharded])
def test_weight_file_kind_does_not_change_the_draft(write: Callable[[Path, Tensors], None], target: LoadedTarget, tmp_path: Path) -> None:
    tensors = as_midlayer(eagle3_tensors(eagle3_config()))
    base = load(tmp_path / "base", target, eagle3_config(), tensors)
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle3_config()))
    write(folder, tensors)
    other = load_draft(folder, target, torch.float32, "cpu", CONTEXT)
    assert torch.equal(base.model.token_map, other.model.token_map)
    assert_same_numbers(base, other, 3 * HIDDEN)


def test_missing_shard_and_empty_folder_are_refused_by_name(target: LoadedTarget, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle3_config()))
    with pytest.raises(ModelError, match=r"model\.safetensors.*pytorch_model\.bin"):
        load_draft(tmp_path, target, torch.float32, "cpu", CONTEXT)
    write_sharded(tmp_path, as_midlayer(eagle3_tensors(eagle3_config())))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors"):
        load_draft(tmp_path, target, torch.float32, "cpu", CONTEXT)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", "multi-head latent attention"),
        ("eagle_linear.qscale_weight", "quantized"),
        ("midlayer.mlp.experts.0.up_proj.weight", "mixture of experts"),
    ],
)
def test_unsupported_kinds_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"{reason}.*{name}"):
        read_layout({name: (4, 4)}, "draft")


def test_two_names_of_one_parameter_are_refused() -> None:
    with pytest.raises(ModelError, match=r"fc\.weight and fusion_fc\.weight"):
        read_layout({"fc.weight": (4, 8), "fusion_fc.weight": (4, 8)}, "draft")
