"""The small models are what the other tests take them for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from eaglecli.engine.request import SamplingParams
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import load_target, read_target_description
from tests.fixtures import Pair, text_cycle, write_cycle, write_e3, write_rand, write_random_draft, write_tokenizer, write_twin
from tests.models.draft_cases import CONTEXT, random_pairs, run_draft
from tests.oracle import generate_eagle, generate_plain
from tests.oracle_models import OracleDraft, OracleTarget

NUM_STEPS = 4
GREEDY = SamplingParams(max_new_tokens=26)  # the prefill token and five full steps


def mean_accept_length(target: OracleTarget, draft: OracleDraft) -> float:
    """Emitted tokens per verify step of the oracle's greedy chains behind three prompts."""
    counts: list[int] = []
    for seed in range(3):
        prompt = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        counts += generate_eagle(target, draft, prompt, GREEDY, NUM_STEPS, 1, NUM_STEPS + 1).accept_counts
    return 1 + sum(counts) / len(counts)


def load_oracle(pair: Pair) -> tuple[OracleTarget, OracleDraft]:
    target = OracleTarget.from_dir(pair.target_dir)
    return target, OracleDraft.from_dir(pair.draft_dir, target)


def test_cycle_follows_its_cycle_and_every_proposal_is_right(tmp_path: Path) -> None:
    pair = write_cycle(tmp_path)
    target = OracleTarget.from_dir(pair.target_dir)
    assert generate_plain(target, [5], SamplingParams(max_new_tokens=6)).output_ids == [6, 7, 8, 9, 5, 6]
    assert mean_accept_length(*load_oracle(pair)) == NUM_STEPS + 1


def test_cycle_can_spell_bytes(tmp_path: Path) -> None:
    text = "aé€😀z"
    pair = write_cycle(tmp_path, [text_cycle(text)])
    ids = generate_plain(OracleTarget.from_dir(pair.target_dir), [ord("z")], SamplingParams(max_new_tokens=len(text.encode()))).output_ids
    assert bytes(ids).decode() == text
    with pytest.raises(ValueError, match="twice"):
        text_cycle("aba")


@pytest.mark.parametrize(
    ("write", "lowest", "highest"), [(write_twin, 3.5, 5.0), (write_rand, 1.0, 1.2), (write_e3, 1.3, 3.0)], ids=["twin", "rand", "e3"]
)
def test_pair_accepts_as_much_as_its_name_says(write: Callable[[Path], Pair], lowest: float, highest: float, tmp_path: Path) -> None:
    assert lowest <= mean_accept_length(*load_oracle(write(tmp_path))) <= highest


def test_twin_needs_the_right_features(tmp_path: Path) -> None:
    """A draft that gets every feature one position late accepts much less."""
    target, draft = load_oracle(write_twin(tmp_path))
    right = mean_accept_length(target, draft)
    draft.fuse = lambda features: features.roll(1, 0)
    assert mean_accept_length(target, draft) < right - 0.5


@pytest.mark.parametrize("write", [write_cycle, write_twin, write_rand, write_e3])
def test_loaded_pair_computes_what_the_oracle_computes(write: Callable[[Path], Pair], tmp_path: Path) -> None:
    pair = write(tmp_path)
    _, oracle = load_oracle(pair)
    draft = load_draft(pair.draft_dir, load_target(pair.target_dir, torch.float32, "cpu", CONTEXT), torch.float32, "cpu", CONTEXT)
    assert draft.model.tap_boundaries == oracle.tap_boundaries
    token_ids, features = random_pairs(64 * (len(oracle.tap_boundaries) or 1))
    feedback, logits = run_draft(draft, token_ids, draft.model.fuse(features))
    expected_feedback, expected_logits = oracle.forward(token_ids.tolist(), oracle.fuse(features))
    torch.testing.assert_close(feedback, expected_feedback, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("draft_vocab_size", [64, None])
def test_random_draft_fits_the_target_that_it_was_made_for(draft_vocab_size: int | None, tmp_path: Path) -> None:
    target_dir = write_e3(tmp_path).target_dir
    folder = write_random_draft(read_target_description(target_dir), tmp_path / "random", draft_vocab_size=draft_vocab_size)
    draft = load_draft(folder, load_target(target_dir, torch.float32, "cpu", CONTEXT), torch.float32, "cpu", CONTEXT)
    assert draft.model.vocab_size == (draft_vocab_size or 320)


def test_tokenizer_gives_bytes_and_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "naïve 東京 😀\n\ttab"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (320, 258)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    assert chat == [257, *b"user\nhi", 258, *b"\n", 257, *b"assistant\n"]
