"""Learning: the loss falls, real acceptance rises, a training goes on from its files, its draft loads as it was trained."""

import json

import numpy as np
import pytest
import torch

from eaglecli.errors import UserError
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import load_target
from eaglecli.training.checkpoint import load_checkpoint
from eaglecli.training.documents import Document, DocumentSet
from eaglecli.training.export import check_tap_boundaries
from eaglecli.training.schedule import Schedule, TrainProgress, make_schedule
from eaglecli.training.session import CHECKPOINT, CURVE, DRAFT, TrainingSession
from eaglecli.training.target_states import FrozenTarget
from tests.fixtures import END_OF_TURN_ID, disjoint_cycles, write_cycle
from tests.training.parts import TAPS, document_set, load_e3, small_settings


def never():
    return False


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_e3(tmp_path_factory.mktemp("target"))


def open_session(folder, target, settings, documents=None):
    folder.mkdir(exist_ok=True)
    prompts = [np.array([number, 40], np.int32) for number in (65, 70)]
    return TrainingSession(folder, target, documents or document_set(12), prompts, (END_OF_TURN_ID,), settings)


def weights_of(session):
    return {name: parameter.detach().clone() for name, parameter in session.module.named_parameters()}


def test_a_training_that_was_stopped_goes_on_to_the_same_weights(tmp_path, target):
    settings = small_settings(num_steps=5)
    whole = open_session(tmp_path / "whole", target, settings)
    list(whole.run(never))
    parted = open_session(tmp_path / "parted", target, settings)
    events = parted.run(lambda: parted.progress.step >= 2)
    assert len(list(events)) == 2
    assert not parted.is_done
    resumed = open_session(tmp_path / "parted", target, settings)
    assert resumed.resumed_from == 2
    list(resumed.run(never))
    assert resumed.is_done
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weights_of(resumed)[name], weight, rtol=0, atol=0, msg=name)


def test_without_its_optimizer_a_training_warms_up_again(tmp_path, target):
    settings = small_settings(num_steps=4, warmup_steps=2)
    session = open_session(tmp_path, target, settings)
    list(session.run(lambda: session.progress.step >= 2))
    for path in (tmp_path / CHECKPOINT).glob("optimizer-*"):
        path.unlink()
    resumed = open_session(tmp_path, target, settings)
    assert resumed.has_lost_optimizer
    assert (resumed.progress.step, resumed.progress.optimizer_steps) == (2, 0)
    for name, weight in weights_of(session).items():
        torch.testing.assert_close(weights_of(resumed)[name], weight, rtol=0, atol=0)
    list(resumed.run(never))
    assert resumed.progress.step == 4


def test_files_of_a_checkpoint_are_as_small_as_asked_for(tmp_path, target):
    session = open_session(tmp_path, target, small_settings(num_steps=1, max_shard_bytes=50_000))
    list(session.run(never))
    files = list((tmp_path / CHECKPOINT).glob("*.safetensors"))
    assert len(files) > 6
    assert max(path.stat().st_size for path in files) <= 50_000
    checkpoint = load_checkpoint(tmp_path / CHECKPOINT)
    for name, weight in weights_of(session).items():
        assert torch.equal(checkpoint.weights[name], weight)


def test_other_answers_keep_the_vocabulary_and_are_told(tmp_path, target):
    session = open_session(tmp_path, target, small_settings(num_steps=2))
    list(session.run(lambda: session.progress.step >= 1))
    assert not open_session(tmp_path, target, small_settings(num_steps=2)).has_other_answers
    other = open_session(tmp_path, target, small_settings(num_steps=2), document_set(12, seed=5))
    assert other.has_other_answers
    assert torch.equal(other.vocabulary.token_ids, session.vocabulary.token_ids)


def test_another_shape_or_order_of_the_training_is_refused(tmp_path, target):
    session = open_session(tmp_path, target, small_settings(num_steps=1))
    list(session.run(never))
    with pytest.raises(UserError, match="another batch size"):
        open_session(tmp_path, target, small_settings(num_steps=1, batch_size=4))


def test_the_exported_draft_is_the_trained_one_in_the_published_layout(tmp_path, target):
    session = open_session(tmp_path, target, small_settings(num_steps=2))
    list(session.run(never))
    config = json.loads((tmp_path / DRAFT / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [boundary - 1 for boundary in TAPS]
    loaded = load_draft(tmp_path / DRAFT, target, torch.float32, "cpu", 64)
    assert loaded.fit.config.algorithm == "EAGLE3"
    assert loaded.model.tap_boundaries == TAPS
    assert torch.equal(loaded.model.token_map, session.vocabulary.token_ids)
    trained = session.module.published_weights()
    for name, weight in loaded.model.checkpoint_views().items():
        published = name.replace("layers.0.", "midlayer.")
        assert torch.equal(weight, trained[published].bfloat16().float()), name
    assert torch.equal(loaded.model.head_weight, trained["lm_head.weight"].bfloat16().float())


def test_a_draft_with_an_mlp_of_its_own_width_is_written_and_read(tmp_path, target):
    session = open_session(tmp_path, target, small_settings(num_steps=1, intermediate_size=80))
    list(session.run(never))
    assert json.loads((tmp_path / DRAFT / "config.json").read_text())["intermediate_size"] == 80
    loaded = load_draft(tmp_path / DRAFT, target, torch.float32, "cpu", 64)
    assert loaded.model.checkpoint_views()["layers.0.mlp.up_proj.weight"].shape[0] == 80


def test_the_loss_falls_and_more_is_accepted_than_before(tmp_path):
    """On texts of CYCLE, in which every token has one successor; the held-out prompts are in cycles of which other tokens are prompts."""
    target = load_target(write_cycle(tmp_path).target_dir, torch.float32, "cpu", 64)
    cycles = disjoint_cycles()
    texts = [Document(np.array([*cycle, *cycle, *cycle[:3]], np.int32), answer_start=1) for cycle in cycles]
    settings = small_settings(
        num_steps=40, batch_size=4, learning_rate=1e-2, warmup_steps=4, draft_vocab_size=320, tap_boundaries=(1,), num_unroll_steps=2
    )
    prompts = [np.array(cycle[3:], np.int32) for cycle in cycles[:8]]
    session = TrainingSession(tmp_path, target, DocumentSet(training=texts), prompts, (END_OF_TURN_ID,), settings)
    before = session.measure()
    list(session.run(never))
    after = session.finish()
    lines = [json.loads(line) for line in (tmp_path / CURVE).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert before.accept.accept_length < 1.3
    assert after.accept.accept_length > before.accept.accept_length + 0.5
    assert lines[-1]["held_out"]["accept"]["accept_length"] == after.accept.accept_length


def test_the_rate_warms_up_and_falls_to_nothing():
    schedule = Schedule(num_steps=100, seconds=None, learning_rate=1.0, warmup_steps=10)
    rates = [schedule.learning_rate_of(TrainProgress(step=step, optimizer_steps=step)) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert all(later < earlier for earlier, later in zip(rates[9:], rates[10:], strict=False))
    assert rates[-1] < 0.001


def test_the_first_budget_ends_the_schedule():
    settings = small_settings(num_steps=None, max_tokens=640, epochs=100)
    assert make_schedule(settings, 50).num_steps == 5
    assert make_schedule(small_settings(num_steps=None), 50).num_steps == 75
    assert make_schedule(small_settings(num_steps=7, epochs=1), 50).num_steps == 7
    by_time = make_schedule(small_settings(num_steps=None, seconds=10.0), 50)
    assert not by_time.is_done(TrainProgress(step=10_000, seconds=9.0))
    assert by_time.is_done(TrainProgress(step=3, seconds=10.0))


@pytest.mark.parametrize("boundaries", [(0, 4, 5), (2, 4, 9), (3, 4, 6)])
def test_boundaries_that_no_file_can_name_are_refused(boundaries):
    with pytest.raises(UserError, match="--tap-boundaries"):
        check_tap_boundaries(boundaries, 8)


def test_boundaries_next_to_the_default_are_written_as_loaders_read_them():
    for boundaries in ((2, 4, 5), (2, 4, 6), (4, 5, 7), (1, 4, 8)):
        check_tap_boundaries(boundaries, 8)


def test_large_channels_of_the_target_begin_with_no_more_say_than_small_ones(tmp_path, target):
    session = open_session(tmp_path, target, small_settings(num_steps=1))
    sizes = FrozenTarget(target.model, TAPS).feature_rms(session.trainer.sample_batch(8))
    torch.testing.assert_close(session.module.feature_scale * sizes, torch.ones_like(sizes))
    sizes[5] = 300.0
    session.module.initialise(target.model, session.vocabulary.token_ids, sizes, seed=0)
    say = session.module.published_weights()["fc.weight"].detach().pow(2).mean(0).sqrt() * sizes
    assert say[5] < 1.5 * say.mean()
