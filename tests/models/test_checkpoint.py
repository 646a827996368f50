"""Which weight files are taken, what of them is used, and what is refused (known failure B08)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eaglecli.errors import ExitCode, ModelError
from eaglecli.models.checkpoint import TensorHeader, find_weight_files, iterate_tensors, read_tensor_headers
from eaglecli.models.fill import check_headers
from eaglecli.models.loader import LoadedTarget, load_target

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{index}."
    return {
        f"{prefix}input_layernorm.weight": (8,),
        f"{prefix}post_attention_layernorm.weight": (8,),
        f"{prefix}self_attn.q_proj.weight": (8, 8),
        f"{prefix}self_attn.k_proj.weight": (4, 8),
        f"{prefix}self_attn.v_proj.weight": (4, 8),
        f"{prefix}self_attn.o_proj.weight": (8, 8),
        f"{prefix}mlp.gate_proj.weight": (12, 8),
        f"{prefix}mlp.up_proj.weight": (12, 8),
        f"{prefix}mlp.down_proj.weight": (8, 12),
    }


def random_tensors(seed: int = 0, tied: bool = False) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)}
    shapes |= layer_shapes(0) | layer_shapes(1)
    if not tied:
        shapes["lm_head.weight"] = (20, 8)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], kind: str) -> list[Path]:
    """Two shards and their index; returns the shards."""
    names = sorted(tensors)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    shards = [folder / f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    weight_map = {}
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        content = {name: tensors[name] for name in part}
        save_file(content, shard) if kind == "safetensors" else torch.save(content, shard)
        weight_map |= dict.fromkeys(part, shard.name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return shards


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], layout: str) -> None:
    if layout == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif layout == "pickle":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif layout == "old pickle":
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        write_shards(folder, tensors, layout.removesuffix(" shards"))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedTarget:
    return load_target(folder, dtype, "cpu", **options)


def assert_loaded(target: LoadedTarget, tensors: dict[str, torch.Tensor]) -> None:
    views = target.model.checkpoint_views()
    for name, tensor in tensors.items():
        torch.testing.assert_close(views[name], tensor.to(views[name].dtype), rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["safetensors", "safetensors shards", "pickle", "pickle shards", "old pickle"])
def test_every_layout_loads_the_same_weights(tmp_path: Path, layout: str) -> None:
    tensors = random_tensors()
    write_config(tmp_path)
    write_weights(tmp_path, tensors, layout)
    assert_loaded(load(tmp_path), tensors)


@pytest.mark.parametrize("layout", ["safetensors", "safetensors shards", "pickle", "pickle shards", "old pickle"])
def test_headers_tell_shapes_and_dtypes(tmp_path: Path, layout: str) -> None:
    tensors = random_tensors() | {"d2t": torch.arange(3), "mask": torch.ones(4, dtype=torch.bool), "half": torch.ones(2, 2).bfloat16()}
    write_weights(tmp_path, tensors, layout)
    expected = {name: TensorHeader(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert read_tensor_headers(tmp_path) == expected


def test_fused_weights_hold_their_parts_in_order(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_config(tmp_path)
    write_weights(tmp_path, tensors, "safetensors")
    layer = load(tmp_path).model.layers[1]
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    torch.testing.assert_close(layer.attention.qkv_weight.data, torch.cat(parts))
    gate_up = [tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    torch.testing.assert_close(layer.mlp.gate_up_weight.data, torch.cat(gate_up))


def test_safetensors_go_before_a_pickle(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors(seed=1), "pickle")
    write_weights(tmp_path, random_tensors(seed=2), "safetensors")
    assert_loaded(load(tmp_path), random_tensors(seed=2))


def test_other_files_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors(), "pickle")
    (tmp_path / "optimizer.bin").write_bytes(b"not weights")
    (tmp_path / "consolidated.safetensors").write_bytes(b"not weights")
    assert find_weight_files(tmp_path).paths == (tmp_path / "pytorch_model.bin",)
    assert_loaded(load(tmp_path), random_tensors())


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_missing_shard_is_named(tmp_path: Path, kind: str) -> None:
    write_config(tmp_path)
    lost = write_shards(tmp_path, random_tensors(), kind)[1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name) as caught:
        load(tmp_path)
    assert caught.value.exit_code == ExitCode.MODEL


def test_folder_without_weights_lists_what_was_looked_for(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"not weights")
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        assert name in caught.value.message


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    write_weights(tmp_path, random_tensors(), "safetensors")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1, 2]"])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_weights(tmp_path, tensors, "safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_tensor_without_use_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)}, "safetensors")
    with pytest.raises(ModelError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_headers_alone_show_a_misfit(tmp_path: Path) -> None:
    write_config(tmp_path)
    views = load(tmp_path, load_format="dummy").model.checkpoint_views()
    headers = {name: TensorHeader(tuple(view.shape), torch.bfloat16) for name, view in views.items()}
    check_headers(views, headers, "here")
    stray = {"model.layers.2.mlp.up_proj.weight": TensorHeader((12, 8), torch.bfloat16)}
    with pytest.raises(ModelError, match=r"here holds model\.layers\.2\.mlp\.up_proj\.weight"):
        check_headers(views, headers | stray, "here")


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors() | {"model.layers.0.self_attn.k_proj.weight": torch.ones(8, 8)}, "safetensors")
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \[8, 8\], expected \[4, 8\]"):
        load(tmp_path)


def test_quantized_tensor_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    packed = torch.zeros(8, 8, dtype=torch.int8)
    write_weights(tmp_path, random_tensors() | {"model.layers.0.self_attn.q_proj.weight": packed}, "safetensors")
    with pytest.raises(ModelError, match="quantized format"):
        load(tmp_path)


def test_stored_rotary_tables_are_left_out_and_told(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, "pickle")
    assert "1 stored rotary tables left out" in load(tmp_path).summary


def test_bfloat16_file_runs_in_float32_and_says_so(tmp_path: Path) -> None:
    write_config(tmp_path)
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors().items()}
    write_weights(tmp_path, tensors, "safetensors")
    target = load(tmp_path)
    assert_loaded(target, tensors)
    assert target.model.embed_weight.dtype == torch.float32
    assert "weights cast from bfloat16 to float32" in target.summary


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    write_weights(tmp_path, random_tensors(tied=True), "safetensors")
    target = load(tmp_path)
    assert target.model.head_weight is target.model.embed_weight
    assert "head tied to the embedding" in target.summary


def test_head_in_the_file_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    write_weights(tmp_path, random_tensors(), "safetensors")
    target = load(tmp_path)
    torch.testing.assert_close(target.model.head_weight.data, random_tensors()["lm_head.weight"])
    assert any("although the config ties it" in phrase for phrase in target.summary)


def test_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=False)
    write_weights(tmp_path, random_tensors(tied=True), "safetensors")
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load(tmp_path)


class _TouchesAFile:
    """Unpickling this with code allowed would create the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    write_config(tmp_path)
    torch.save(random_tensors() | {"model.norm.weight": _TouchesAFile(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        load(tmp_path)
    assert not marker.exists()


def test_pickle_of_other_things_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no plain table of named tensors"):
        list(iterate_tensors(tmp_path))


@pytest.mark.parametrize("layout", ["safetensors", "pickle"])
def test_cut_file_is_refused(tmp_path: Path, layout: str) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors(), layout)
    file = find_weight_files(tmp_path).paths[0]
    file.write_bytes(file.read_bytes()[:1500])
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)


def test_dummy_weights_need_a_config_alone_and_repeat(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, second = (load(tmp_path, load_format="dummy", seed=5).model.checkpoint_views() for _ in range(2))
    other = load(tmp_path / "config.json", load_format="dummy", seed=6).model.checkpoint_views()
    for name, view in first.items():
        torch.testing.assert_close(view, second[name], rtol=0, atol=0)
        assert view.isfinite().all()
    assert (first["model.norm.weight"] == 1).all()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_load_format_safetensors_accepts_nothing_else(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_weights(tmp_path, random_tensors(), "pickle")
    with pytest.raises(ModelError, match="holds no safetensors"):
        load(tmp_path, load_format="safetensors")
    write_weights(tmp_path, random_tensors(), "safetensors")
    assert_loaded(load(tmp_path, load_format="safetensors"), random_tensors())


def test_rotary_tables_reach_the_run_context(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert load(tmp_path, load_format="dummy").model.tables.cos.shape[0] == CONFIG["max_position_embeddings"]
    assert load(tmp_path, load_format="dummy", context_length=9).model.tables.cos.shape[0] == 9
