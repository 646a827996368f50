"""Rotary embedding, store and attention in one launch against the two steps one after the other, and what the launch may not touch."""

from dataclasses import dataclass, replace

import pytest
import torch

from eaglecli.kernels.attention import AttentionTile
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.qkv_attention import qkv_attention_reference, qkv_attention_triton
from tests.helpers import packed_inputs, scattered_slot_table
from tests.kernels.closeness import GPU_DTYPES, assert_near, poison_free_memory
from tests.kernels.test_attention import DEVICE, known_caches, on_device, random_tree_mask


@dataclass(frozen=True)
class Problem:
    """The fresh tokens' slots hold NaN, like all others that no known token owns."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    inputs: AttentionInputs
    scale: float

    def check(self, window: int | None = None, **options: object) -> None:
        """Output, stored keys and values near the reference's in float64; every other slot as it was."""
        poison_free_memory(DEVICE)
        wide = [tensor.double() for tensor in (self.qkv, self.cos, self.sin)]
        expected_k, expected_v = self.k_cache.double(), self.v_cache.double()
        expected = qkv_attention_reference(*wide, expected_k, expected_v, self.inputs, self.scale, window)
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        num_owned = int(self.inputs.query_start[-1])
        out = qkv_attention_triton(self.qkv, self.cos, self.sin, k_cache, v_cache, self.inputs, self.scale, window, **options)
        assert_near(out[:num_owned], expected[:num_owned])
        assert not out[num_owned:].any()
        fresh = self.inputs.out_slots[:num_owned].long()
        assert_near(k_cache[fresh], expected_k[fresh])
        assert torch.equal(v_cache[fresh].double(), expected_v[fresh])
        others = torch.ones(len(k_cache), dtype=torch.bool, device=DEVICE)
        others[fresh] = False
        for now, before in ((k_cache, self.k_cache), (v_cache, self.v_cache)):
            assert torch.equal(now[others].view(torch.uint8), before[others].view(torch.uint8))


def problem(
    prefix_lens: list[int],
    query_lens: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    tree: bool = False,
    tail_before: int = 0,
    unowned: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """tree: a mask over the fresh tokens and `tail_before` entries of earlier ones between them and the prefix."""
    torch.manual_seed(len(prefix_lens))
    batch, longest = len(prefix_lens), max(query_lens)
    known = [prefix + tail_before for prefix in prefix_lens]
    table = scattered_slot_table(batch, max(known) + longest + 3)
    inputs = packed_inputs(table, known, query_lens)
    if tree:
        seen = torch.rand(batch, longest, tail_before) < 0.5
        mask = torch.cat((seen, random_tree_mask(batch, longest)), dim=2)
        inputs = replace(inputs, tail_mask=mask, prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32), max_prefix_len=max(prefix_lens))
    k_cache, v_cache = known_caches(table, known, heads[1], head_dim, dtype)
    angles = torch.rand(max(known) + longest, head_dim // 2, device=DEVICE) * 6.3
    qkv = torch.randn(sum(query_lens) + unowned, (heads[0] + 2 * heads[1]) * head_dim, device=DEVICE).to(dtype)
    return Problem(qkv, angles.cos(), angles.sin(), k_cache, v_cache, on_device(inputs, unowned), head_dim**-0.5)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize(
    ("prefix_lens", "query_lens"), [([0], [1]), ([31, 32, 33], [1, 1, 1]), ([70, 0, 61], [3, 5, 7]), ([7], [40]), ([126, 0], [5, 1])]
)
def test_causal_rows_store_and_see_their_own_tokens(prefix_lens: list[int], query_lens: list[int], num_splits: int | None) -> None:
    """Fresh keys lie on both sides of a split's border too."""
    problem(prefix_lens, query_lens, unowned=3).check(num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [None, 1, 2])
@pytest.mark.parametrize("tail_before", [0, 3, 6])
def test_branches_see_their_ancestors_of_this_launch_and_of_earlier_ones(tail_before: int, num_splits: int | None) -> None:
    problem([70, 3, 0, 60], [6] * 4, tree=True, tail_before=tail_before).check(num_splits=num_splits)


@pytest.mark.parametrize("tile", [AttentionTile(16, 32, 4, 1), AttentionTile(64, 64, 4, 3)], ids=str)
def test_a_tree_of_several_tiles_stores_every_key(tile: AttentionTile) -> None:
    problem([40, 3], [34, 34], heads=(6, 2), tree=True).check(tile=tile, num_splits=2)


@pytest.mark.parametrize("tree", [False, True])
def test_a_window_hides_old_keys(tree: bool) -> None:
    problem([90, 5, 40], [4, 4, 4], tree=tree).check(window=20)


@pytest.mark.parametrize("tile", [AttentionTile(16, 64, 4, 1), AttentionTile(16, 128, 4, 2)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("tree", [False, True])
def test_keys_before_a_rows_first_one_may_hold_nan(tree: bool, num_splits: int, tile: AttentionTile) -> None:
    """As when a draft catches up behind a gap; the first key may be the first fresh one. Gaps end where the largest block does."""
    case = problem([140, 70, 128], [3, 3, 3], tree=tree)
    first_keys = torch.zeros(case.inputs.slot_table.shape[0], dtype=torch.int32, device=DEVICE)
    for row, first in ((0, 128), (2, 128)):
        first_keys[row] = first
        slots = case.inputs.slot_table[row, :first].long()
        case.k_cache[slots] = case.v_cache[slots] = float("nan")
    replace(case, inputs=replace(case.inputs, first_keys=first_keys)).check(tile=tile, num_splits=num_splits)


@pytest.mark.parametrize(("heads", "head_dim"), [((3, 1), 8), ((6, 2), 20), ((2, 2), 24), ((7, 1), 64)])
def test_heads_of_any_number_and_size(heads: tuple[int, int], head_dim: int) -> None:
    problem([37, 2], [3, 1], heads, head_dim).check()


def test_rows_of_one_slot_do_not_disturb_others() -> None:
    """Padding names the dummy row, whose every token is stored at the dummy slot."""
    case = problem([0, 40, 0], [2, 2, 2])
    slots, table = case.inputs.out_slots.clone(), case.inputs.slot_table.clone()
    for row, first in ((0, 0), (2, 4)):
        slots[first : first + 2], table[row] = 0, 0
    shared = replace(case, inputs=replace(case.inputs, out_slots=slots, slot_table=table))
    alone = qkv_attention_triton(case.qkv, case.cos, case.sin, case.k_cache.clone(), case.v_cache.clone(), case.inputs, case.scale, None)
    caches = case.k_cache.clone(), case.v_cache.clone()
    together = qkv_attention_triton(case.qkv, case.cos, case.sin, *caches, shared.inputs, case.scale, None)
    assert torch.equal(together[2:4], alone[2:4])


def test_what_it_cannot_take_is_refused() -> None:
    case = problem([3], [2])
    for changed in (
        {"qkv": case.qkv[:, :-1]},
        {"qkv": case.qkv.half()},
        {"cos": case.cos[:, 1:], "sin": case.sin[:, 1:]},
        {"qkv": case.qkv.repeat(1, 2)[:, : case.qkv.shape[1]]},
    ):
        with pytest.raises(ValueError, match="needs"):
            bad = replace(case, **changed)
            qkv_attention_triton(bad.qkv, bad.cos, bad.sin, bad.k_cache, bad.v_cache, bad.inputs, bad.scale, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 8), 80), ((12, 2), 96), ((32, 8), 128), ((8, 1), 64), ((14, 2), 128)])
def test_compiled_it_equals_the_reference(heads: tuple[int, int], head_dim: int, tree: bool, dtype: torch.dtype) -> None:
    for prefix_lens, query_lens in (
        ([1], [1]),
        ([511, 64, 0, 4000], [1] * 4),
        ([700, 3, 63], [8] * 3),
        ([130], [64]),
        ([300] * 64, [6] * 64),
    ):
        problem(prefix_lens, query_lens, heads, head_dim, tree, 8 if tree else 0, 0 if tree else 3, dtype).check()
