"""Attention kernels against the float64 reference; every slot that no query may see holds NaN."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from eaglecli.kernels.attention import AttentionTile, attention_reference, attention_triton, choose_splits, choose_tile
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.last_arrival import arrival_counters
from tests.helpers import packed_inputs, scattered_slot_table
from tests.kernels.closeness import GPU_DTYPES, assert_near, poison_free_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    inputs: AttentionInputs
    scale: float

    def run(self, window: int | None = None, **options: int | None) -> torch.Tensor:
        poison_free_memory(DEVICE)
        return attention_triton(self.q, self.k_cache, self.v_cache, self.inputs, self.scale, window, **options)

    def expected(self, window: int | None = None) -> torch.Tensor:
        wide = [tensor.double() for tensor in (self.q, self.k_cache, self.v_cache)]
        return attention_reference(*wide, self.inputs, self.scale, window)


def random_tree_mask(batch: int, num_nodes: int) -> torch.Tensor:
    """bool [batch, nodes, nodes]: every node sees itself and some earlier nodes, the last node is seen by itself alone."""
    mask = torch.rand(batch, num_nodes, num_nodes) < 0.4
    return (mask | torch.eye(num_nodes, dtype=torch.bool)).tril()


def known_caches(table: torch.Tensor, counts: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values, [2, slots, nkv, hd]: random in the first counts[row] slots of each row of the table, NaN everywhere else."""
    cache = torch.full((2, table.numel() + 1, num_kv_heads, head_dim), float("nan"))
    for row, count in enumerate(counts):
        cache[:, table[row, :count].long()] = torch.randn(2, count, num_kv_heads, head_dim)
    return cache.to(DEVICE, dtype)


def on_device(inputs: AttentionInputs, unowned: int) -> AttentionInputs:
    """With so many tokens more that no row owns: at position 0, stored at the dummy slot."""
    moved = {name: value.to(DEVICE) for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **moved | {name: torch.nn.functional.pad(moved[name], (0, unowned)) for name in ("positions", "out_slots")})


def problem(
    prefix_lens: list[int],
    query_lens: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    tree: bool = False,
    unowned: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    batch, longest = len(prefix_lens), max(query_lens)
    table = scattered_slot_table(batch, max(prefix_lens) + longest + 3)
    inputs = packed_inputs(table, prefix_lens, query_lens, random_tree_mask(batch, longest) if tree else None)
    known = [prefix + count for prefix, count in zip(prefix_lens, query_lens, strict=True)]
    k_cache, v_cache = known_caches(table, known, heads[1], head_dim, dtype)
    q = torch.randn(sum(query_lens) + unowned, heads[0], head_dim, device=DEVICE).to(dtype)
    return Problem(q, k_cache, v_cache, on_device(inputs, unowned), head_dim**-0.5)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize(("prefix_lens", "query_lens"), [([0], [1]), ([31, 32, 33], [1, 1, 1]), ([70, 0, 64], [3, 5, 1]), ([7], [40])])
def test_causal_rows_equal_the_reference(prefix_lens: list[int], query_lens: list[int], num_splits: int | None) -> None:
    case = problem(prefix_lens, query_lens)
    assert_near(case.run(num_splits=num_splits), case.expected())


@pytest.mark.parametrize("num_splits", [1, 2])
def test_tree_rows_see_their_ancestors_only(num_splits: int) -> None:
    case = problem([70, 3, 0], [6, 4, 6], tree=True)
    assert_near(case.run(num_splits=num_splits), case.expected())


def test_one_mask_may_be_expanded_over_the_rows() -> None:
    case = problem([40, 3], [3, 3], tree=True)
    expanded = case.inputs.tail_mask[:1].expand(2, 3, 3)
    shared = replace(case, inputs=replace(case.inputs, tail_mask=expanded))
    assert_near(shared.run(), shared.expected())


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("tree", [False, True])
def test_a_window_hides_old_keys(num_splits: int, tree: bool) -> None:
    case = problem([90, 5, 40], [4, 3, 4], tree=tree)
    assert_near(case.run(window=20, num_splits=num_splits), case.expected(window=20))
    assert not torch.allclose(case.run(window=20)[0], case.run()[0])


def gapped_problem(tree: bool) -> Problem:
    """Rows whose keys before the 64th, or none, are not there: they hold NaN."""
    case = problem([130, 70, 64], [3, 4, 2], tree=tree)
    first_keys = [64, 0, 64]
    for row, first in enumerate(first_keys):
        slots = case.inputs.slot_table[case.inputs.rows[row], :first].long()
        case.k_cache[slots], case.v_cache[slots] = float("nan"), float("nan")
    by_row = torch.zeros(case.inputs.slot_table.shape[0], dtype=torch.int32, device=DEVICE)
    by_row[case.inputs.rows.long()] = torch.tensor(first_keys, dtype=torch.int32, device=DEVICE)
    return replace(case, inputs=replace(case.inputs, first_keys=by_row))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_keys_before_a_rows_first_one_are_not_there(num_splits: int, tree: bool, window: int | None) -> None:
    """They may hold NaN; the first key may be the first of the tail."""
    short = gapped_problem(tree)
    expected = short.expected(window)
    assert not expected.isnan().any()
    assert_near(short.run(window, num_splits=num_splits), expected)


def test_keys_older_than_every_window_may_hold_nan() -> None:
    case = problem([90], [4])
    before = case.run(window=20)
    old = case.inputs.slot_table[0, : 90 - 20 + 1].long()
    case.k_cache[old] = case.v_cache[old] = float("nan")
    assert torch.equal(case.run(window=20), before)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_tail_slot_that_nobody_sees_may_hold_nan(num_splits: int) -> None:
    case = problem([40], [3], tree=True)
    mask = torch.eye(3, dtype=torch.bool, device=DEVICE)[None].repeat(1, 1, 1)
    mask[0, 2, 2] = False
    hidden = replace(case, inputs=replace(case.inputs, tail_mask=mask))
    before = hidden.run(num_splits=num_splits)
    slot = case.inputs.slot_table[0, 42].long()
    case.k_cache[slot] = case.v_cache[slot] = float("nan")
    assert torch.equal(hidden.run(num_splits=num_splits), before)
    assert_near(before, hidden.expected())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3e38, 3e38])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_the_reference_in_the_dtype_of_the_run_is_not_moved_by_what_nobody_sees(cache: str, bad: float) -> None:
    """Memory that was never written holds any bits, not only NaN: a product with them may overflow."""
    case = problem([40, 3], [3, 2])
    places = case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_(), case.inputs, case.scale, None
    before = attention_reference(case.q, *places)
    unseen = case.inputs.slot_table[case.inputs.rows[1], 5:9].long()  # behind the tail of the row, before that of the longer one
    getattr(case, cache)[unseen] = bad
    assert torch.equal(attention_reference(case.q, *places), before)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("bad", ["k", "v"])
def test_bad_numbers_of_a_node_reach_only_the_nodes_that_see_it(bad: str, num_splits: int) -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool, device=DEVICE)[None]
    case = problem([40], [4], tree=True)
    case = replace(case, inputs=replace(case.inputs, tail_mask=mask))
    before = case.run(num_splits=num_splits)
    slot = case.inputs.slot_table[0, 41].long()
    if bad == "k":
        case.k_cache[slot] = float("nan")
    else:
        case.v_cache[slot, :, 3] = float("inf")
    after, expected = case.run(num_splits=num_splits), case.expected()
    sees = mask[0, :, 1]
    assert torch.equal(after[~sees], before[~sees])
    assert_near(after[~sees], expected[~sees])
    assert after[sees].isnan().all() and expected[sees].isnan().all()


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
def test_groups_of_any_size_share_their_key_head(group: int) -> None:
    case = problem([37], [3], heads=(2 * group, 2), head_dim=8)
    assert_near(case.run(), case.expected())


@pytest.mark.parametrize("head_dim", [8, 20, 24])
def test_head_sizes_need_not_be_powers_of_two(head_dim: int) -> None:
    case = problem([37], [2], head_dim=head_dim)
    assert_near(case.run(num_splits=2), case.expected())


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("unowned", [1, 40])
def test_queries_that_no_row_owns_give_zeros(num_splits: int, unowned: int) -> None:
    case = problem([40, 2], [2, 3], (2, 1), unowned=unowned)
    out = case.run(num_splits=num_splits)
    assert_near(out, case.expected())
    assert not out[5:].any()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_query_that_sees_no_key_gives_zeros(num_splits: int) -> None:
    case = problem([0], [2], tree=True)
    nothing = torch.zeros(1, 2, 2, dtype=torch.bool, device=DEVICE)
    out = replace(case, inputs=replace(case.inputs, tail_mask=nothing)).run(num_splits=num_splits)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_row_without_queries_changes_nothing() -> None:
    case = problem([5, 3, 20], [2, 1, 1])
    start = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=DEVICE)
    skipped = replace(case, q=case.q[:3].contiguous(), inputs=replace(case.inputs, query_start=start))
    assert_near(skipped.run(), skipped.expected())


def test_with_fixed_splits_a_row_does_not_depend_on_the_other_rows_or_on_the_bound() -> None:
    case = problem([70, 130, 3], [2, 2, 2], (2, 1))
    together = case.run(num_splits=3, min_split_keys=64)
    start = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    alone = replace(case.inputs, rows=case.inputs.rows[:1], query_start=start, prefix_lens=case.inputs.prefix_lens[:1], max_prefix_len=70)
    one = replace(case, q=case.q[:2].contiguous(), inputs=alone)
    assert torch.equal(one.run(num_splits=2, min_split_keys=64), together[:2])


def test_more_splits_than_are_merged_at_once_equal_the_reference() -> None:
    case = problem([20 * 32 + 5], [3], (6, 1), head_dim=64)
    assert_near(case.run(num_splits=21), case.expected())


def test_a_second_run_finds_the_arrival_counters_at_zero() -> None:
    case = problem([70, 130], [2, 2])
    first = case.run(num_splits=3)
    assert torch.equal(case.run(num_splits=3), first)
    assert not arrival_counters(8, case.q.device).any()


def test_rows_name_their_line_of_the_slot_table() -> None:
    case = problem([33, 60], [1, 1])
    swapped = replace(
        case,
        q=case.q.flip(0).contiguous(),
        inputs=replace(case.inputs, **{name: getattr(case.inputs, name).flip(0) for name in ("rows", "prefix_lens", "positions")}),
    )
    assert torch.equal(swapped.run(), case.run().flip(0))


def test_idle_multiprocessors_make_the_tiles_of_a_tree_small() -> None:
    assert choose_tile(64, 8, True, False, 128).block_queries == 16
    assert choose_tile(64, 64, True, False, 128).block_queries == 64


def test_splits_fill_the_device_or_cut_long_rows_or_are_left() -> None:
    small, large = AttentionTile(16, 64, 4, 2), AttentionTile(64, 64, 4, 3)
    assert choose_splits(8, 128, small) == (1, 0)
    assert choose_splits(8, 8192, small) == (33, 0)
    assert choose_splits(8, 640, small) == (10, 0)
    assert choose_splits(64 * 3, 2048, small) == choose_splits(64 * 3, 2048, large) == (4, 512)
    assert choose_splits(256 * 3, 2048, small) == (4, 512)
    assert choose_splits(256 * 3, 2048, large) == choose_splits(256 * 8, 2048, small) == (2, 1024)
    assert choose_splits(256 * 8, 2048, large) == choose_splits(256 * 3, 2048, AttentionTile(16, 64, 4, 5)) == (1, 0)
    assert choose_splits(64 * 3, 8192, small) == (8, 512)
    assert choose_splits(64 * 3, 512 + 8, small) == (1, 0)  # what graphs for short rows are made for


@pytest.mark.parametrize("tree", [False, True])
def test_only_long_rows_of_a_large_batch_are_split(tree: bool) -> None:
    """Rows of more and of fewer keys than a split's least, beside one another."""
    case = problem([70, 3, 130, 40], [3, 3, 3, 3], tree=tree)
    assert_near(case.run(num_splits=4, min_split_keys=64), case.expected())


@pytest.mark.parametrize("broken", ["q", "cache", "dtype", "mask"])
def test_a_broken_contract_is_a_value_error(broken: str) -> None:
    case = problem([5], [2], tree=True)
    changed = {
        "q": {"q": case.q.transpose(0, 1)},
        "cache": {"k_cache": case.k_cache[:, :1]},
        "dtype": {"q": case.q.double()},
        "mask": {"inputs": replace(case.inputs, max_query_len=3)},
    }[broken]
    with pytest.raises(ValueError, match=r"attention needs|tail mask"):
        replace(case, **changed).run()


TILES = [
    AttentionTile(16, 64, 4, 1),
    AttentionTile(16, 128, 4, 2),
    AttentionTile(16, 64, 4, 2),
    AttentionTile(16, 64, 4, 5),
    AttentionTile(32, 32, 2, 3),
    AttentionTile(32, 64, 4, 2),
    AttentionTile(64, 64, 4, 3),
    AttentionTile(128, 64, 8, 3),
    AttentionTile(16, 32, 4, 2),
]


def test_no_other_tile_is_chosen() -> None:
    sizes = itertools.product(
        (1, 2, 3, 8, 24, 33, 64, 200, 384), (1, 3, 8, 48, 132, 300, 700, 2048), (False, True), (False, True), (64, 128)
    )
    assert {choose_tile(*size) for size in sizes} == set(TILES)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_equals_the_reference(tile: AttentionTile, tree: bool) -> None:
    case = problem([70, 3, 200], [5, 3, 70], tree=tree)
    assert_near(case.run(tile=tile), case.expected())
    assert_near(case.run(tile=tile, num_splits=2, min_split_keys=128), case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((32, 8), 128)])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_compiled_tile_equals_the_reference(
    tile: AttentionTile, heads: tuple[int, int], head_dim: int, tree: bool, dtype: torch.dtype
) -> None:
    case = problem([70, 3, 1500, 640], [5, 3, 70, 1], heads, head_dim, tree, dtype=dtype)
    for splits in ({}, {"num_splits": 4, "min_split_keys": 512}):
        assert_near(case.run(tile=tile, **splits), case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("queries", [1, 4, 8, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((32, 8), 128)])
def test_chosen_tiles_equal_the_reference_at_every_batch(heads: tuple[int, int], head_dim: int, queries: int, batch: int) -> None:
    prefix_lens = [60 + 37 * row % 300 for row in range(batch - 1)] + [1800]
    case = problem(prefix_lens, [queries] * batch, heads, head_dim, queries > 1, dtype=torch.bfloat16)
    assert_near(case.run(), case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 8), 80), ((12, 2), 96), ((32, 8), 128), ((8, 1), 64), ((14, 2), 128)])
def test_compiled_kernels_equal_the_reference(heads: tuple[int, int], head_dim: int, tree: bool, dtype: torch.dtype) -> None:
    for prefix_lens, query_lens in (
        ([1], [1]),
        ([511, 64, 0, 8000], [1, 1, 1, 1]),
        ([700, 3, 63], [8, 5, 8]),
        ([130], [64]),
        (list(range(200, 456)), [1] * 256),
    ):
        case = problem(prefix_lens, query_lens, heads, head_dim, tree, unowned=3, dtype=dtype)
        assert_near(case.run(), case.expected())
        assert_near(case.run(num_splits=5), case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_compiled_ragged_prefill_equals_the_reference(window: int | None, dtype: torch.dtype) -> None:
    case = problem([0, 300, 17], [777, 130, 1], (12, 4), 128, unowned=200, dtype=dtype)
    assert_near(case.run(window=window), case.expected(window=window))
