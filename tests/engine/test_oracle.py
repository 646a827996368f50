"""The oracle itself: noise and tree against known answers, its models against transformers, its loop against itself without a draft."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from eaglecli.engine.request import SamplingParams
from tests import oracle
from tests.oracle_models import OracleDraft, OracleTarget

VOCAB = 16
ROOT, A, B, C, D, E, F, G, H, P, Q = range(11)
PROMPT = [5, 9, 2, 7]


class ScriptedDraft(OracleDraft):
    """Logits follow from the last token alone; feedback = (token + 100, number of pairs seen), so that pairs can be recognised."""

    def __init__(self, laws: dict[int, dict[int, float]]) -> None:
        self.laws = laws
        self.calls: list[tuple[list[int], list[list[float]]]] = []

    def forward(self, token_ids: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((list(token_ids), hidden.tolist()))
        law = self.laws.get(token_ids[-1], {})
        rest = (1 - sum(law.values())) / (VOCAB - len(law))
        logits = torch.tensor([law.get(token, rest) for token in range(VOCAB)]).log()
        feedback = torch.tensor([[token + 100.0, index] for index, token in enumerate(token_ids)])
        return feedback, logits.expand(len(token_ids), VOCAB)


WORKED_EXAMPLE = {ROOT: {A: 0.6, B: 0.3}, A: {C: 0.7, D: 0.2}, B: {E: 0.5, F: 0.4}, C: {G: 0.9, H: 0.05}, E: {P: 0.5, Q: 0.3}}


def successor_target(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy text counts upwards modulo VOCAB; the feature of position i is (i, i)."""
    logits = functional.one_hot((torch.tensor(ids) + 1) % VOCAB, VOCAB).float() * 4
    return logits, torch.arange(len(ids)).float()[:, None].expand(-1, 2)


COUNTING_DRAFT = {token: {(token + 1) % VOCAB: 0.9} for token in range(VOCAB)}


def grown_tree(draft: OracleDraft, num_steps: int, topk: int, num_draft_tokens: int) -> oracle.OracleTree:
    pool = oracle.grow_pool(draft, [15, 14, 13, ROOT], torch.zeros(4, 2), oracle.DraftRule(num_steps, topk))
    return oracle.keep_nodes(pool, ROOT, num_draft_tokens)


# ---- noise and choice


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    words = oracle.philox4x32([np.array([word]) for word in counter], key)
    assert [int(word[0]) for word in words] == list(answer)


def test_noise_takes_the_lane_of_the_token_and_the_halves_of_the_seed() -> None:
    seed, sample, position = 0x299F31D0A4093822, 3, 77
    words = oracle.philox4x32([np.array([x]) for x in (5, position, sample, 0)], (0xA4093822, 0x299F31D0))
    noise = oracle.gumbel_noise(seed, sample, position, np.array([20, 23, 21]))
    assert noise.tolist() == [float(oracle.gumbel_from_bits(words[lane])[0]) for lane in (0, 3, 1)]


def test_noise_is_finite_and_close_to_float64_over_the_extreme_draws() -> None:
    draws = np.array([0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**31, 2**32 - 1], dtype=np.uint64)
    noise = oracle.gumbel_from_bits(draws)
    exact = [-math.log(-math.log1p(-(x + 0.5) / 2**32)) for x in draws[:-1].tolist()]
    assert noise.dtype == np.float32
    assert np.allclose(noise[:-1], exact, rtol=0, atol=3e-6)
    assert noise[-1] == pytest.approx(-math.log(24 * math.log(2)))  # the largest v allowed is 1 - 2^-24


def test_sampled_tokens_follow_the_law_of_the_filtered_logits() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    sampling = SamplingParams(temperature=1.0, top_k=3, top_p=0.8)
    drawn = [oracle.choose_token(logits, dataclasses.replace(sampling, seed=seed), 0, 9) for seed in range(2000)]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.allclose(shares, [0.625, 0.375, 0, 0], atol=0.04)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),  # 2 and 3 tie: the lower id stays
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"min_p": 0.49}, [1, 2, 3]),
        ({"min_p": 0.51}, [1]),
        ({"top_k": 3, "top_p": 0.51}, [1, 2]),  # 0.5, 0.25, 0.25 after top-k
        ({"temperature": 1e-9}, [0, 1, 2, 3, 4]),
    ],
)
def test_filters_keep_the_documented_tokens(options: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]).log() + 3
    scores = oracle.choice_scores(logits, SamplingParams(**{"temperature": 1.0, **options}), 0, 5)
    assert not np.isnan(scores).any()
    assert np.flatnonzero(np.isfinite(scores)).tolist() == kept


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert oracle.choose_token(torch.tensor([1.0, 3.0, 3.0, 2.0]), SamplingParams(), 0, 0) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_target_logits_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="position 4"):
        oracle.choose_token(torch.tensor([0.0, bad]), SamplingParams(), 0, 4)


# ---- the tree


def test_tree_of_two_steps_is_the_worked_example() -> None:
    tree = grown_tree(ScriptedDraft(WORKED_EXAMPLE), num_steps=2, topk=2, num_draft_tokens=4)
    assert tree == oracle.OracleTree((ROOT, A, B, C), (-1, 0, 0, 1), (0, 1, 1, 2))


def test_tree_of_three_steps_is_the_worked_example() -> None:
    tree = grown_tree(ScriptedDraft(WORKED_EXAMPLE), num_steps=3, topk=2, num_draft_tokens=6)
    assert tree == oracle.OracleTree((ROOT, A, B, C, E, G), (-1, 0, 0, 1, 2, 3), (0, 1, 1, 2, 2, 3))


def test_pool_scores_are_those_of_the_worked_example() -> None:
    rule = oracle.DraftRule(num_steps=3, topk=2)
    pool = oracle.grow_pool(ScriptedDraft(WORKED_EXAMPLE), [15, 14, 13, ROOT], torch.zeros(4, 2), rule)
    assert [node.token for node in pool] == [A, B, C, D, E, F, G, H, P, Q]
    assert [node.parent for node in pool] == [-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]
    assert np.allclose(np.exp([node.score for node in pool]), [0.6, 0.3, 0.42, 0.12, 0.15, 0.12, 0.378, 0.021, 0.075, 0.045])


def test_node_sees_the_true_pairs_and_its_own_ancestors_with_their_parents_feedback() -> None:
    draft = ScriptedDraft(WORKED_EXAMPLE)
    grown_tree(draft, num_steps=3, topk=2, num_draft_tokens=6)
    true = [15, 14, 13, ROOT]
    assert [call[0] for call in draft.calls] == [true, [*true, A], [*true, B], [*true, A, C], [*true, B, E]]
    assert draft.calls[4][1][4:] == [[100.0 + ROOT, 3.0], [100.0 + B, 4.0]]


def test_certain_children_never_displace_their_parents() -> None:
    draft = ScriptedDraft({ROOT: {A: 1.0}, A: {B: 1.0}, B: {C: 1.0}})
    tree = grown_tree(draft, num_steps=3, topk=2, num_draft_tokens=4)
    assert tree == oracle.OracleTree((ROOT, A, B, C), (-1, 0, 1, 2), (0, 1, 2, 3))


def test_sampled_children_are_picked_and_scored_with_the_noise_of_the_target_id() -> None:
    sampling, token_map = SamplingParams(temperature=0.7, seed=11), np.array([3, 8, 20, 41])
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    children = oracle.DraftRule(1, 2, sampling, sample=2).children(logits + 5, position=30, token_map=token_map)
    noisy = logits.numpy() + np.float32(0.7) * oracle.gumbel_noise(11, 2, 30, token_map)
    winners = np.argsort(-noisy)[:2]
    assert winners.tolist() != [0, 1]  # the noise matters here
    assert [token for token, _ in children] == token_map[winners].tolist()
    assert np.allclose(np.exp([log_q for _, log_q in children]), np.exp(noisy[winners]) / np.exp(noisy).sum())


def test_noise_ranks_what_is_run_and_what_is_kept() -> None:
    sampling = SamplingParams(temperature=1.0, seed=1)
    draft = ScriptedDraft({ROOT: {A: 0.5, B: 0.4}})
    pool = oracle.grow_pool(draft, [15, ROOT], torch.zeros(2, 2), oracle.DraftRule(2, 2, sampling))
    assert [node.token for node in pool[:2]] == [B, A]  # by the logits alone A would come first
    assert pool[0].score > pool[1].score
    assert [node.parent for node in pool[2:]] == [0, 0, 1, 1]
    assert oracle.keep_nodes(pool, ROOT, 2).tokens == (ROOT, B)


def test_same_noise_drafts_with_a_perfect_draft_are_always_accepted() -> None:
    law = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1] + [0.0] * 10).log()

    def target(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return law.expand(len(ids), VOCAB), torch.zeros(len(ids), 2)

    draft = ScriptedDraft({token: dict(enumerate([0.3, 0.2, 0.2, 0.1, 0.1, 0.1])) for token in range(VOCAB)})
    sampling = SamplingParams(temperature=1.0, seed=5, max_new_tokens=31)
    same = oracle.generate_eagle(target, draft, PROMPT, sampling, 4, 1, 5)
    without = oracle.generate_eagle(target, draft, PROMPT, sampling, 4, 1, 5, same_noise=False)
    assert same.accept_counts == [4] * 6
    assert sum(without.accept_counts) / len(without.accept_counts) < 2
    assert same.output_ids == without.output_ids == oracle.generate_plain(target, PROMPT, sampling).output_ids


def test_nan_draft_logits_are_the_last_choice() -> None:
    rule = oracle.DraftRule(num_steps=1, topk=3)
    assert [token for token, _ in rule.children(torch.tensor([math.nan, 0.0, math.inf, -math.inf]), 0, None)] == [2, 1, 0]
    assert rule.children(torch.full((4,), math.nan), 0, None) == [(0, -math.inf), (1, -math.inf), (2, -math.inf)]


# ---- the loop


def test_perfect_draft_is_accepted_in_full_every_step() -> None:
    result = oracle.generate_eagle(successor_target, ScriptedDraft(COUNTING_DRAFT), PROMPT, SamplingParams(max_new_tokens=16), 4, 2, 9)
    assert result.output_ids == [(PROMPT[-1] + 1 + index) % VOCAB for index in range(16)]
    assert result.accept_counts == [4, 4, 4]
    assert result.accepted_at_depth(5) == [3, 3, 3, 3, 0]


def test_accept_counts_are_bounded_by_the_cap_and_the_output_is_cut_at_it() -> None:
    result = oracle.generate_eagle(successor_target, ScriptedDraft(COUNTING_DRAFT), PROMPT, SamplingParams(max_new_tokens=9), 4, 1, 5)
    assert len(result.output_ids) == 9 and result.finish_reason == "length"
    assert result.accept_counts == [4, 3]  # positions of the second step end at the limit: 3 drafts, the bonus is cut


def test_accept_count_is_taken_before_the_cut_at_a_stop_id() -> None:
    sampling = SamplingParams(max_new_tokens=30, stop_token_ids=(11,))
    result = oracle.generate_eagle(successor_target, ScriptedDraft(COUNTING_DRAFT), PROMPT, sampling, 4, 1, 5)
    assert result.output_ids == [8, 9, 10, 11] and result.finish_reason == "stop"
    assert result.accept_counts == [4]


@pytest.mark.parametrize("options", [{"stop_token_ids": (8,)}, {"max_new_tokens": 1}])
def test_first_token_may_end_the_output(options: dict[str, object]) -> None:
    result = oracle.generate_eagle(successor_target, ScriptedDraft(COUNTING_DRAFT), PROMPT, SamplingParams(**options), 4, 1, 5)
    assert (result.output_ids, result.accept_counts) == ([8], [])


def test_agreement_is_full_for_a_true_draft_and_ends_where_the_draft_errs() -> None:
    text = [(index + 3) % VOCAB for index in range(40)]
    assert oracle.teacher_forced_agreement(successor_target, ScriptedDraft(COUNTING_DRAFT), text, 4, 3) == [1.0, 1.0, 1.0]
    erring = ScriptedDraft({token: {(token + 1 + token % 2) % VOCAB: 0.9} for token in range(VOCAB)})
    assert oracle.teacher_forced_agreement(successor_target, erring, text, 4, 2) == [0.5, 0.0]


def test_candidate_gap_is_the_distance_of_two_logits() -> None:
    assert oracle.candidate_gap(successor_target, PROMPT, (8, 3), SamplingParams()) == 4.0


# ---- the models

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}},
    "llama-llama3": {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
    "mistral": {"head_dim": 10},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}


def tiny_model(name: str) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.partition("-")[0], **SIZES, **FAMILIES[name])).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of one and biases of zero would hide mistakes
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


def random_draft(kind: int, folder: Path) -> None:
    """An EAGLE-1 or EAGLE-3 draft of random numbers for `SIZES`; the EAGLE-3 one knows 20 of the 40 tokens."""
    generator = torch.Generator().manual_seed(kind)
    layer, width, taps = ("layers.0", 24, 1) if kind == 1 else ("midlayer", 48, 3)
    shapes = {f"{layer}.self_attn.{part}_proj.weight": (rows, width) for part, rows in (("q", 24), ("k", 12), ("v", 12))}
    shapes |= {f"{layer}.self_attn.o_proj.weight": (24, 24), f"{layer}.post_attention_layernorm.weight": (24,)}
    shapes |= {f"{layer}.mlp.{part}_proj.weight": size for part, size in (("gate", (32, 24)), ("up", (32, 24)), ("down", (24, 32)))}
    shapes |= {"fc.weight": (24, 24 * (taps + (kind == 1)))}
    if kind == 1:
        shapes |= {"fc.bias": (24,)}
    else:
        shapes |= {f"midlayer.{norm}.weight": (24,) for norm in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (24,), "lm_head.weight": (20, 24)}
    weights = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    if kind == 3:
        weights["d2t"] = torch.arange(20)  # draft id j is target id 2 j
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {**SIZES, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "draft_vocab_size": 20 if kind == 3 else 40}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_target_logits_and_features_equal_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    ids = torch.randint(40, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True)
    loaded = OracleTarget.from_dir(tmp_path)
    logits, post_norm = loaded.forward(ids)
    assert (logits - expected.logits[0]).abs().max() <= 1e-4 * expected.logits.abs().max()
    assert torch.allclose(post_norm, expected.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
    taps = torch.cat([expected.hidden_states[boundary][0] for boundary in (0, 2)], -1)
    assert torch.allclose(loaded.forward(ids, (0, 2))[1], taps, rtol=1e-4, atol=1e-4)
    assert torch.equal(OracleTarget.from_transformers(model).forward(ids)[0], logits)


def test_plain_greedy_text_equals_transformers_generate(target_folder: Path) -> None:
    model = tiny_model("llama")
    written = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :].tolist()
    assert len(set(written)) > 3  # a text that repeats one token would prove little
    assert oracle.generate_plain(OracleTarget.from_dir(target_folder), PROMPT, SamplingParams(max_new_tokens=24)).output_ids == written


@pytest.mark.parametrize("kind", [1, 3])
@pytest.mark.parametrize(("num_steps", "topk", "num_draft_tokens"), [(1, 1, 2), (3, 1, 4), (2, 3, 8), (4, 2, 6)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle_text_equals_plain_text(
    kind: int, num_steps: int, topk: int, num_draft_tokens: int, temperature: float, target_folder: Path, tmp_path: Path
) -> None:
    random_draft(kind, tmp_path / "draft")
    target = OracleTarget.from_dir(target_folder)
    draft = OracleDraft.from_dir(tmp_path / "draft", target, (1, 2, 3) if kind == 3 else None)
    sampling = SamplingParams(temperature=temperature, seed=8, max_new_tokens=20)
    result = oracle.generate_eagle(target, draft, PROMPT, sampling, num_steps, topk, num_draft_tokens, sample=1)
    assert result.output_ids == oracle.generate_plain(target, PROMPT, sampling, sample=1).output_ids
    emitted = 1 + sum(result.accept_counts) + len(result.accept_counts)
    assert 0 <= emitted - len(result.output_ids) <= num_steps
    assert all(len(tree.tokens) == num_draft_tokens for tree in result.trees)
    if kind == 3:
        assert all(token % 2 == 0 for tree in result.trees for token in tree.tokens[1:])


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


@pytest.mark.parametrize("kind", [1, 3])
def test_draft_of_one_pair_follows_the_published_formula(kind: int, target_folder: Path, tmp_path: Path) -> None:
    """With one pair attention is its own value, so the whole draft is a few lines."""
    random_draft(kind, tmp_path / "draft")
    target = OracleTarget.from_dir(target_folder)
    draft = OracleDraft.from_dir(tmp_path / "draft", target)
    w, layer = draft.weights, "layers.0" if kind == 1 else "midlayer"
    embedded, feature = target.weights["embed_tokens.weight"][17], torch.linspace(-1, 1, 24 if kind == 1 else 72)
    hidden = draft.fuse(feature[None])
    if kind == 1:
        residual = attended = w["fc.weight"] @ torch.cat([embedded, feature]) + w["fc.bias"]
    else:
        residual = w["fc.weight"] @ feature
        norms = w["midlayer.input_layernorm.weight"], w["midlayer.hidden_norm.weight"]
        attended = torch.cat([normed(embedded, norms[0]), normed(residual, norms[1])])
    value = (w[f"{layer}.self_attn.v_proj.weight"] @ attended).view(2, 6).repeat_interleave(2, 0).flatten()
    x = residual + w[f"{layer}.self_attn.o_proj.weight"] @ value
    y = normed(x, w[f"{layer}.post_attention_layernorm.weight"])
    gated = functional.silu(w[f"{layer}.mlp.gate_proj.weight"] @ y) * (w[f"{layer}.mlp.up_proj.weight"] @ y)
    x = x + w[f"{layer}.mlp.down_proj.weight"] @ gated
    expected = target.head @ x if kind == 1 else w["lm_head.weight"] @ normed(x, w["norm.weight"])
    feedback, logits = draft.forward([17], hidden)
    assert torch.allclose(feedback[0], x, rtol=1e-4, atol=1e-5)
    assert torch.allclose(logits[0], expected, rtol=1e-4, atol=1e-5)


def test_draft_with_an_unknown_tensor_is_refused(target_folder: Path, tmp_path: Path) -> None:
    random_draft(1, tmp_path / "draft")
    torch.save({"mystery.weight": torch.ones(2)}, tmp_path / "draft" / "pytorch_model.bin")
    (tmp_path / "draft" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="mystery"):
        OracleDraft.from_dir(tmp_path / "draft", OracleTarget.from_dir(target_folder))
