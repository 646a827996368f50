"""Floors of an iteration, worked out by hand for tiny shapes."""

import pytest

from eaglecli.engine.device_speed import DeviceSpeed
from eaglecli.engine.floor import IterationWork, PassWork, iteration_work
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from tests.engine.harness import LoadedPair

TREE = SpeculationSettings(3, 2, 5)
TARGET, STEP, EXTEND = PassWork(100, 10, 0, 2, 8), PassWork(20, 5, 3, 2, 4), PassWork(20, 5, 7, 2, 4)
WORK = IterationWork(TREE, TARGET, STEP, EXTEND)
NEVER = 1e30


def test_weights_are_read_by_one_verify_one_step_fewer_than_levels_and_one_extend():
    assert WORK.weight_bytes == 2 * (100 + 10) + 2 * 2 * (20 + 5 + 3) + 2 * (20 + 5 + 7)
    assert IterationWork(PLAIN, TARGET, None, None).weight_bytes == 220


def test_every_pass_reads_its_weights_and_the_cache_of_all_rows():
    cache = 3 * 10  # rows and context
    expected = (220 + cache * 8) + 2 * (56 + cache * 4) + (64 + cache * 4)
    assert WORK.floor_s(DeviceSpeed(NEVER, 1.0, NEVER), 3, 10.0, 1.5) == pytest.approx(expected)
    assert WORK.floor_s(DeviceSpeed(NEVER, 4.0, NEVER), 3, 10.0, 1.5) == pytest.approx(expected / 4)


def test_every_pass_multiplies_its_own_number_of_tokens():
    """All nodes of the tree, the branches of a level, what was accepted; and the head once a row in the extend."""
    verify = 2 * (100 + 10) * 3 * 5
    step = 2 * (20 + 3 + 5) * 3 * 2
    extend = 2 * ((20 + 7) * 3 * 1.5 + 5 * 3)
    assert WORK.floor_s(DeviceSpeed(NEVER, NEVER, 1.0), 3, 10.0, 1.5) == pytest.approx(verify + 2 * step + extend)


def test_each_pass_takes_the_longer_of_its_two_times():
    speed = DeviceSpeed(NEVER, 1.0, 4.0)  # the verify's 460 bytes and 825 s of products; the draft's bytes count for more
    assert WORK.floor_s(speed, 3, 10.0, 1.5) == pytest.approx(3300 / 4 + 2 * 176 + 184)


def test_the_work_of_a_pair_is_counted_from_its_tensors(twin: LoadedPair, e3: LoadedPair):
    target_layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    target, draft, fc = target_layer + 64 + 320 * 64, target_layer - 64 + 320 * 64, 64 * 128  # a final norm; no input norm
    work = iteration_work(twin.target.model, twin.draft.model, SpeculationSettings(4, 1, 5))
    assert work.weight_bytes == 4 * (target + 3 * (draft + fc) + (draft + fc))
    assert (work.target.cache_bytes_per_token, work.draft.cache_bytes_per_token) == (2 * 2 * 16 * 4,) * 2
    assert iteration_work(twin.target.model, twin.draft.model, PLAIN).weight_bytes == 4 * target
    once = iteration_work(e3.target.model, e3.draft.model, SpeculationSettings(4, 1, 5))
    assert once.extend.weight_bytes - once.draft.weight_bytes == 4 * e3.draft.model.checkpoint_views()["fc.weight"].numel()
    assert once.draft.num_head_values == 64 * 64 and once.target.cache_bytes_per_token == 8 * once.draft.cache_bytes_per_token
