"""Pairs that fit load with the right head, embedding and map; pairs that do not are refused from headers, with the reason.

Known failures B01, B04, B06, B09, B10, B11 and B13 at the level of one model; their effect on generation is in tests/engine.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglecli.errors import ModelError, UserError
from eaglecli.models.draft_fit import check_draft_fit
from eaglecli.models.draft_loader import LoadedDraft, load_draft
from eaglecli.models.loader import LoadedTarget, load_target
from tests.fixtures import VOCAB_SIZE, Tensors, Weights, llama_config, scattered_ids, vocabulary_tables, write_checkpoint, write_tokenizer
from tests.models.draft_cases import (
    CONTEXT,
    HIDDEN,
    as_midlayer,
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    load_small_target,
    random_pairs,
    run_draft,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_small_target(tmp_path_factory.mktemp("target"))


def load(folder: Path, target: LoadedTarget, config: Mapping[str, Any], tensors: Tensors, **options: Any) -> LoadedDraft:
    return load_draft(write_checkpoint(folder, config, tensors), target, torch.float32, "cpu", CONTEXT, **options)


def load_eagle(folder: Path, target: LoadedTarget, extra: Mapping[str, Any] | None = None, **config: Any) -> LoadedDraft:
    return load(folder / "draft", target, eagle_config() | config, changed(eagle_tensors(eagle_config()), extra))


def load_eagle3(folder: Path, target: LoadedTarget, extra: Mapping[str, Any] | None = None, **config: Any) -> LoadedDraft:
    return load(folder / "draft", target, eagle3_config() | config, changed(as_midlayer(eagle3_tensors(eagle3_config())), extra))


def changed(tensors: Tensors, extra: Mapping[str, Any] | None) -> Tensors:
    """Tensors with some replaced, added, or (None) removed."""
    return {name: tensor for name, tensor in {**tensors, **(extra or {})}.items() if tensor is not None}


def summary(draft: LoadedDraft) -> str:
    return "; ".join(draft.summary)


# ---- heads and embeddings -----------------------------------------------------------------------------------------


def test_head_of_the_file_is_used_even_when_the_config_says_tied(target: LoadedTarget, tmp_path: Path) -> None:
    head = eagle3_tensors(eagle3_config())["lm_head.weight"]
    draft = load_eagle3(tmp_path, target, tie_word_embeddings=True)
    assert torch.equal(draft.model.head_weight, head)
    assert "head own [64, 32]" in summary(draft)


@pytest.mark.parametrize("is_tied", [False, True])
def test_head_of_the_target_is_borrowed_by_reference(is_tied: bool, tmp_path: Path) -> None:
    target = load_small_target(tmp_path / "target")
    if is_tied:
        config = llama_config(HIDDEN, 8, 4, 2, 48, tie_word_embeddings=True)
        write_checkpoint(
            tmp_path / "tied", config, {name: tensor for name, tensor in target_tensors(target).items() if name != "lm_head.weight"}
        )
        target = load_target(tmp_path / "tied", torch.float32, "cpu", CONTEXT)
    no_head = {"lm_head.weight": None, "d2t": None, "t2d": None}
    for draft in (load_eagle(tmp_path / "1", target), load_eagle3(tmp_path / "3", target, no_head, draft_vocab_size=VOCAB_SIZE)):
        assert draft.model.head_weight.data_ptr() == target.model.head_weight.data_ptr()
        assert draft.model.embed_weight.data_ptr() == target.model.embed_weight.data_ptr()
        assert draft.model.token_map is None
        assert "head target's" in summary(draft)


def target_tensors(target: LoadedTarget) -> Tensors:
    return {name: tensor.clone() for name, tensor in target.model.checkpoint_views().items()}


def test_missing_head_with_a_short_vocabulary_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"64 ids \(d2t\) but no lm_head.weight.*320 rows"):
        load_eagle3(tmp_path, target, {"lm_head.weight": None})


def test_tied_draft_without_head_uses_its_own_embedding(target: LoadedTarget, tmp_path: Path) -> None:
    embedding = Weights(7).matrix(VOCAB_SIZE, HIDDEN, 4.0)
    extra = {"lm_head.weight": None, "d2t": None, "t2d": None, "embed_tokens.weight": embedding}
    draft = load_eagle3(tmp_path, target, extra, tie_word_embeddings=True, draft_vocab_size=None)
    assert torch.equal(draft.model.head_weight, embedding)
    assert torch.equal(draft.model.embed_weight, embedding)


def test_copy_of_the_targets_embedding_is_not_kept_twice(target: LoadedTarget, tmp_path: Path) -> None:
    copied = load_eagle3(tmp_path / "copy", target, {"embed_tokens.weight": target.model.embed_weight.clone()})
    assert copied.model.embed_weight.data_ptr() == target.model.embed_weight.data_ptr()
    assert "equal copy" in summary(copied)
    own = load_eagle3(tmp_path / "own", target, {"embed_tokens.weight": target.model.embed_weight * 2})
    assert torch.equal(own.model.embed_weight, target.model.embed_weight * 2)
    assert "embedding own [320, 32]" in summary(own)


# ---- vocabularies -------------------------------------------------------------------------------------------------


def test_offset_table_is_applied_and_reported(target: LoadedTarget, tmp_path: Path) -> None:
    """A short head with its table proposes what the same head spread over all 320 ids proposes."""
    token_ids = scattered_ids(64, 3)
    short = load_eagle3(tmp_path / "short", target)
    assert torch.equal(short.model.token_map, token_ids)
    assert "d2t, 64 of 320 ids, agrees with t2d" in summary(short)
    head = torch.zeros(VOCAB_SIZE, HIDDEN)
    head[token_ids] = short.model.head_weight
    full = load_eagle3(tmp_path / "full", target, {"lm_head.weight": head, "d2t": None, "t2d": None}, draft_vocab_size=None)
    tokens, features = random_pairs(3 * HIDDEN)
    short_logits = run_draft(short, tokens, short.model.fuse(features))[1]
    full_logits = run_draft(full, tokens, full.model.fuse(features))[1]
    assert torch.equal(full_logits[:, token_ids], short_logits)


def test_padded_rows_are_accepted_and_cut_off(target: LoadedTarget, tmp_path: Path) -> None:
    weights = Weights(5)
    padded = {"embed_tokens.weight": weights.matrix(384, HIDDEN), "lm_head.weight": 99 * weights.matrix(384, HIDDEN)}
    draft = load_eagle(tmp_path, target, padded, vocab_size=384)
    assert draft.model.vocab_size == VOCAB_SIZE
    tokens, features = random_pairs(HIDDEN)
    assert run_draft(draft, tokens, features)[1].shape == (len(tokens), VOCAB_SIZE)
    assert "64 padded rows cut off" in summary(draft)


def test_identity_table_over_the_whole_vocabulary_is_no_map(target: LoadedTarget, tmp_path: Path) -> None:
    zeros = {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool), "lm_head.weight": None}
    assert load_eagle3(tmp_path, target, zeros, draft_vocab_size=VOCAB_SIZE).model.token_map is None


def test_token_map_file_selects_rows_of_the_head(target: LoadedTarget, tmp_path: Path) -> None:
    torch.save([7, 300, 2], tmp_path / "map.pt")
    tensors = eagle_tensors(eagle_config())
    draft = load(tmp_path / "draft", target, eagle_config(), tensors, token_map=tmp_path / "map.pt")
    assert draft.model.token_map.tolist() == [7, 300, 2]
    assert torch.equal(draft.model.head_weight, target.model.head_weight[[7, 300, 2]])
    assert "map.pt, 3 of 320 ids" in summary(draft)
    with pytest.raises(UserError, match="is for EAGLE-1/2 drafts"):
        load(tmp_path / "3", target, eagle3_config(), as_midlayer(eagle3_tensors(eagle3_config())), token_map=tmp_path / "map.pt")


def permuted_tables() -> Tensors:
    return {"d2t": vocabulary_tables(scattered_ids(64, 3))["d2t"].flip(0)}


def index_tables() -> Tensors:
    return {"d2t": scattered_ids(64, 3)}


REFUSED: dict[str, tuple[Callable[..., LoadedDraft], dict[str, Any], dict[str, Any], str]] = {
    "other hidden size": (
        load_eagle,
        {"fc.weight": torch.zeros(16, 32)},
        {"hidden_size": 16},
        "fc.weight is made for hidden size 16, expected the target's 32",
    ),
    "fc width": (load_eagle3, {"fc.weight": torch.zeros(32, 80)}, {}, "fc.weight takes 80 inputs, expected a multiple of .* 32"),
    "number of states": (load_eagle3, {"fc.weight": torch.zeros(32, 64)}, {}, "fuses 2 target states, but 3 layers are tapped"),
    "claimed number of states": (load_eagle3, {}, {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2, but fc.weight fuses 3"),
    "tapped layer": (load_eagle3, {}, {"eagle_aux_hidden_state_layer_ids": [2, 20, 29]}, "2, 20, 29 do not exist in a target of 8 layers"),
    "smaller vocabulary by config": (load_eagle, {}, {"vocab_size": 300}, "vocab_size 300, the target's vocabulary has 320"),
    "smaller embedding": (
        load_eagle,
        {"embed_tokens.weight": torch.zeros(300, 32)},
        {},
        "embed_tokens.weight of the draft has 300 rows.*320",
    ),
    "smaller head": (load_eagle, {"lm_head.weight": torch.zeros(300, 32)}, {}, "lm_head.weight of the draft has 300 rows.*320"),
    "head without table": (
        load_eagle3,
        {"d2t": None, "t2d": None},
        {},
        "lm_head.weight of the draft has 64 rows.*320 and the file has no d2t",
    ),
    "much larger vocabulary": (load_eagle, {"lm_head.weight": torch.zeros(2000, 32)}, {}, "2000 rows.*320: too many to be padding"),
    "head and table": (load_eagle3, {"lm_head.weight": torch.zeros(60, 32)}, {}, "lm_head.weight has 60 rows, expected 64"),
    "claimed draft vocabulary": (load_eagle3, {}, {"draft_vocab_size": 32}, "draft_vocab_size 32, but d2t has 64"),
    "other target width": (load_eagle3, {}, {"target_hidden_size": 48}, "target of hidden size 48 .* this target has 32"),
    "permuted table": (load_eagle3, permuted_tables(), {}, "must ascend|contradict"),
    "index table": (load_eagle3, index_tables(), {}, "target ids themselves"),
    "attention heads": (load_eagle3, {}, {"num_attention_heads": 2}, r"o_proj.weight: expected shape \[32, 16\], found \[32, 32\]"),
    "unused tensor": (load_eagle3, {"mystery.weight": torch.zeros(3)}, {}, "tensor mystery.weight has no place in an EAGLE-3 draft"),
    "final norm in EAGLE-1": (load_eagle, {"norm.weight": torch.ones(32)}, {}, "tensor norm.weight has no place in an EAGLE-1/2 draft"),
    "missing tensor": (load_eagle3, {"midlayer.mlp.up_proj.weight": None}, {}, r"midlayer.mlp.up_proj.weight \[48, 32\] is missing"),
    "missing hidden norm": (load_eagle3, {"midlayer.hidden_norm.weight": None}, {}, "midlayer.hidden_norm.weight .* is missing"),
    "missing fc": (load_eagle3, {"fc.weight": None}, {}, "fc.weight is not in the file"),
    "part of the biases": (
        load_eagle3,
        {"midlayer.self_attn.q_proj.bias": torch.zeros(32)},
        {},
        r"midlayer.self_attn.k_proj.bias \[16\] is missing",
    ),
    "wide draft without embedding": (
        load_eagle3,
        {"fc.weight": torch.zeros(48, 96), "lm_head.weight": torch.zeros(64, 48)},
        {"hidden_size": 48},
        "embed_tokens.weight is missing",
    ),
    "activation": (load_eagle, {}, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "quantized": (load_eagle, {}, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "quantized tensor": (
        load_eagle,
        {"fc.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)},
        {},
        "fc.weight is stored as torch.float8_e4m3fn",
    ),
    "broken size": (load_eagle, {}, {"vocab_size": "320"}, "positive whole number as 'vocab_size', found '320'"),
    "table of fractions": (load_eagle3, {"d2t": torch.zeros(64)}, {}, "d2t is stored as torch.float32"),
    "rotary kind": (load_eagle, {}, {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rotary type 'spiral'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misfit_is_refused_naming_what_was_expected_and_found(name: str, target: LoadedTarget, tmp_path: Path) -> None:
    load_kind, tensors, config, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        load_kind(tmp_path, target, tensors, **config)


def test_other_tokenizer_of_the_same_size_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "draft")
    assert load_eagle(tmp_path, target).model.vocab_size == VOCAB_SIZE
    content = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"different tokenizers: id 97 is 'b'.*and 'a'.*2 ids differ"):
        load_eagle(tmp_path, target)


# ---- algorithms and paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_kind", "right", "wrong"), [(load_eagle, "EAGLE", "EAGLE3"), (load_eagle3, "EAGLE3", "EAGLE")])
def test_algorithm_option_must_agree_with_the_file(
    load_kind: Callable[..., LoadedDraft], right: str, wrong: str, target: LoadedTarget, tmp_path: Path
) -> None:
    assert load_kind(tmp_path, target).fit.config.algorithm == right
    assert check_draft_fit(tmp_path / "draft", target.path, target.config, algorithm=right).config.algorithm == right
    with pytest.raises(ModelError, match=rf"--speculative-algorithm {wrong} contradicts .*\({right}\)"):
        check_draft_fit(tmp_path / "draft", target.path, target.config, algorithm=wrong)


def test_target_given_as_draft_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft and target are the same checkpoint"):
        check_draft_fit(target.path, target.path, target.config)
    copy = write_checkpoint(tmp_path, llama_config(HIDDEN, 8, 4, 2, 48), target_tensors(target))
    with pytest.raises(ModelError, match="ordinary language model, not an EAGLE draft"):
        check_draft_fit(copy, target.path, target.config)


def test_missing_folder_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        check_draft_fit(tmp_path / "absent", target.path, target.config)


# ---- flags --------------------------------------------------------------------------------------------------------

QKV_BIASES = {f"self_attn.{part}_proj.bias": torch.zeros(size) for part, size in (("q", 32), ("k", 16), ("v", 16))}
FLAGS: dict[str, tuple[Callable[..., LoadedDraft], dict[str, Any], str]] = {
    "bias": (load_eagle, {"fc.bias": torch.zeros(HIDDEN)}, "fc.bias"),
    "qkv_bias": (load_eagle, {f"layers.0.{name}": bias for name, bias in QKV_BIASES.items()}, "q_proj.bias"),
    "add_para_norm": (
        load_eagle,
        {"embedding_layernorm.weight": torch.ones(HIDDEN), "hidden_states_layernorm.weight": torch.ones(HIDDEN)},
        "embedding_layernorm.weight",
    ),
    "norm_before_fc": (load_eagle3, {"input_norm.weight": torch.ones(3 * HIDDEN)}, "input_norm.weight"),
    "fc_norm": (load_eagle3, {f"fc_norm.{index}.weight": torch.ones(HIDDEN) for index in range(3)}, "fc_norm.0.weight"),
    "attention_bias": (
        load_eagle3,
        {f"midlayer.{name}": bias for name, bias in QKV_BIASES.items()},
        "midlayer.self_attn.q_proj.bias",
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_and_tensors_must_agree(flag: str, target: LoadedTarget, tmp_path: Path) -> None:
    load_kind, tensors, named = FLAGS[flag]
    assert load_kind(tmp_path, target, tensors, **{flag: True})
    with pytest.raises(ModelError, match=f"says {flag} is true, but tensor .*{named} is not in the file"):
        load_kind(tmp_path, target, None, **{flag: True})
    with pytest.raises(ModelError, match=f"says {flag} is false, but the file has tensor .*{named}"):
        load_kind(tmp_path, target, tensors, **{flag: False})


def test_absent_flag_leaves_the_choice_to_the_file(target: LoadedTarget, tmp_path: Path) -> None:
    config = {key: value for key, value in eagle_config().items() if key != "bias"}
    for name, extra in (("with", {"fc.bias": torch.ones(HIDDEN)}), ("without", {})):
        draft = load(tmp_path / name, target, config, eagle_tensors(config) | extra)
        assert draft.fit.config.fc_bias == bool(extra)


def test_qwen3_layer_without_its_norms_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": eagle3_config(model_type="qwen3")}
    with pytest.raises(ModelError, match=r"kind qwen3, but tensor layers\.0\.self_attn\.q_norm\.weight"):
        load(tmp_path, target, config, eagle3_tensors(eagle3_config()))


# ---- rotary, overrides, warnings ----------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROTARY_SPELLINGS: list[dict[str, Any]] = [
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"rope_theta": 500000.0, "rope_scaling": {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}},
    {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
]


@pytest.mark.parametrize("spelling", ROTARY_SPELLINGS[1:])
def test_rotary_spellings_give_the_same_tables(spelling: dict[str, Any], target: LoadedTarget, tmp_path: Path) -> None:
    first, other = load_eagle(tmp_path / "1", target, **ROTARY_SPELLINGS[0]), load_eagle(tmp_path / "2", target, **spelling)
    assert first.fit.config.rope == other.fit.config.rope
    assert torch.equal(first.model.tables.cos, other.model.tables.cos)
    assert "llama3 factor 8, base 500000" in summary(first)


def test_rotary_base_is_the_drafts_own_and_10000_when_absent(tmp_path: Path) -> None:
    target = load_small_target(tmp_path / "target", rope_theta=500000.0)
    config = {key: value for key, value in eagle_config().items() if key != "rope_theta"}
    draft = load(tmp_path / "draft", target, config, eagle_tensors(config))
    assert draft.fit.config.rope.theta == 10000.0
    assert target.config.rope.theta == 500000.0


def test_overrides_replace_rotary_settings_and_tapped_layers(target: LoadedTarget, tmp_path: Path) -> None:
    load_eagle3(tmp_path, target, **ROTARY_SPELLINGS[2])

    def overridden(**overrides: Any) -> LoadedDraft:
        return load_draft(tmp_path / "draft", target, torch.float32, "cpu", CONTEXT, overrides=overrides)

    changed_base = overridden(rope_theta=1234.0, tap_boundaries=[1, 2, 8])
    assert (changed_base.fit.config.rope.theta, changed_base.fit.config.rope.kind) == (1234.0, "llama3")
    assert changed_base.model.tap_boundaries == (1, 2, 8)
    changed_kind = overridden(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert (changed_kind.fit.config.rope.theta, changed_kind.fit.config.rope.kind) == (500000.0, "linear")
    with pytest.raises(UserError, match="does not know 'rope_teta'"):
        overridden(rope_teta=1.0)
    with pytest.raises(UserError, match="tap_boundaries must be a list"):
        overridden(tap_boundaries="2,4,5")
    with pytest.raises(ModelError, match="do not exist in a target of 8 layers"):
        overridden(tap_boundaries=[2, 4, 9])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("run", [torch.float32, torch.bfloat16])
def test_draft_is_cast_to_the_run_dtype_with_one_warning(stored: torch.dtype, run: torch.dtype, tmp_path: Path) -> None:
    target_dir = load_small_target(tmp_path / "target").path
    target = load_target(target_dir, run, "cpu", CONTEXT)
    tensors = {
        name: tensor.to(stored) if tensor.is_floating_point() else tensor for name, tensor in eagle3_tensors(eagle3_config()).items()
    }
    folder = write_checkpoint(tmp_path / "draft", eagle3_config(dtype=None), as_midlayer(tensors))
    draft = load_draft(folder, target, run, "cpu", CONTEXT)
    assert {tensor.dtype for tensor in draft.model.checkpoint_views().values()} == {run}
    assert draft.model.head_weight.dtype == draft.model.embed_weight.dtype == run
    casts = [warning for warning in draft.warnings if "cast to the run's" in warning]
    assert len(casts) == (stored != run)


def test_draft_limit_below_the_run_gives_one_warning_and_long_tables(target: LoadedTarget, tmp_path: Path) -> None:
    draft = load_eagle(tmp_path, target, max_position_embeddings=16)
    assert draft.model.tables.cos.shape[0] == CONTEXT
    assert len([warning for warning in draft.warnings if "made for 16 positions" in warning]) == 1
    assert load_eagle(tmp_path, target, max_position_embeddings=CONTEXT).warnings == ()


def test_ambiguous_norm_flags_are_warned_about(target: LoadedTarget, tmp_path: Path) -> None:
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 64, "transformer_layer_config": llama_config(HIDDEN, 1, 4, 2, 48)}
    draft = load(tmp_path / "1", target, config, eagle3_tensors(eagle3_config()))
    assert "no norm_before_residual" in draft.warnings[0]
    assert "norm_output" in load_eagle3(tmp_path / "2", target, norm_output=True).warnings[0]
