"""Row-invariant kernels: right, and bit for bit the same for a row whatever is beside it; compiled, interpreted and in the reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from eaglecli.kernels import row_invariant_attention as attention_module
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.linear import linear_residual_reference, norm_gate_up_reference, norm_linear_reference
from eaglecli.kernels.model_kernels import ROW_INVARIANT
from eaglecli.kernels.row_invariant_attention import row_invariant_attention_reference, row_invariant_attention_triton
from eaglecli.kernels.row_invariant_linear import row_invariant_linear_reference, row_invariant_linear_triton
from tests.kernels.closeness import GPU_DTYPES, assert_near, poison_free_memory
from tests.kernels.test_attention import Problem, gapped_problem, problem
from tests.kernels.test_linear import tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEARS = [row_invariant_linear_triton] + ([row_invariant_linear_reference] if DEVICE == "cpu" else [])
ATTENTIONS = [row_invariant_attention_triton] + ([row_invariant_attention_reference] if DEVICE == "cpu" else [])
linears = pytest.mark.parametrize("product", LINEARS, ids=lambda function: function.__name__)
attentions = pytest.mark.parametrize("attend", ATTENTIONS, ids=lambda function: function.__name__)
Product = Callable[..., torch.Tensor]
Attend = Callable[..., torch.Tensor]


def everything(product: Product, t: dict[str, torch.Tensor], rows: slice) -> list[torch.Tensor]:
    """All products of some rows."""
    x, weight = t["x"][rows], t["weight"]
    return [
        product(x, t["norm"], 1e-5, weight, t["bias"]),
        product(x, None, 0.0, weight, None, residual=t["residual"][rows]),
        product(x, t["norm"], 1e-5, weight, t["bias"], gate_up=True),
    ]


@linears
def test_products_equal_the_reference(product):
    t = tensors(19, 42, 70)
    w = {name: tensor.double() for name, tensor in t.items()}
    expected = [
        norm_linear_reference(w["x"], w["norm"], 1e-5, w["weight"], w["bias"]),
        linear_residual_reference(w["x"], w["weight"], None, w["residual"]),
        norm_gate_up_reference(w["x"], w["norm"], 1e-5, w["weight"], w["bias"]),
    ]
    for out, right in zip(everything(product, t, slice(None)), expected, strict=True):
        assert_near(out, right)
    assert everything(product, t, slice(0, 0))[0].shape == (0, 42)


def check_rows(product: Product, t: dict[str, torch.Tensor], cuts: Sequence[tuple[int, int]]) -> None:
    """Rows start .. start + size give the bits of all rows at once."""
    together = everything(product, t, slice(None))
    for start, size in cuts:
        rows = slice(start, start + size)
        assert all(torch.equal(part, whole[rows]) for part, whole in zip(everything(product, t, rows), together, strict=True))


@linears
@pytest.mark.parametrize("shape", [(40, 64), (24, 33)])
def test_a_row_of_a_product_does_not_feel_the_others(product, shape):
    check_rows(product, tensors(20, *shape), [(0, 1), (1, 17), (19, 1)])


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's own library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_library_cannot_make_a_row_feel_the_others(dtype):
    cuts = [(start, size) for size in (1, 2, 3, 7, 16, 17) for start in (0, 1, 40 - size)]
    check_rows(row_invariant_linear_reference, tensors(40, 320, 576, dtype), cuts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (3072, 576), (6144, 4096), (576, 1536)])
def test_a_row_of_a_product_does_not_feel_the_others_on_the_gpu(dtype, outputs, inputs):
    t = tensors(700, outputs, inputs, dtype)
    poison_free_memory(DEVICE)
    check_rows(row_invariant_linear_triton, t, [(0, 1), (699, 1), (3, 2), (1, 6), (5, 16), (17, 17), (0, 64), (100, 512)])


def run(attend: Attend, case: Problem, window: int | None = None) -> torch.Tensor:
    poison_free_memory(DEVICE)
    return attend(case.q, case.k_cache, case.v_cache, case.inputs, case.scale, window)


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of one small block, so that few keys make several."""
    monkeypatch.setattr(attention_module, "_BLOCK_KEYS", 16)
    monkeypatch.setattr(attention_module, "_MIN_SPLIT_KEYS", 16)


@attentions
@pytest.mark.parametrize(("prefix_lens", "query_lens"), [([15, 16, 63], [1, 1, 1]), ([35, 0], [1, 3])])
@pytest.mark.parametrize("window", [None, 20])
def test_causal_rows_equal_the_reference(attend, prefix_lens, query_lens, window, short_splits):
    case = problem(prefix_lens, query_lens, unowned=2)
    assert_near(run(attend, case, window), case.expected(window))


@attentions
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)])
def test_tree_rows_equal_the_reference(attend, heads, short_splits):
    case = problem([40, 0], [3, 4], heads=heads, head_dim=24, tree=True)
    assert_near(run(attend, case), case.expected())


def test_both_forms_are_one_function_over_several_splits():
    case = problem([270, 10], [2, 1])
    assert_near(run(row_invariant_attention_triton, case), run(row_invariant_attention_reference, case).double())


@attentions
def test_a_bad_key_that_is_seen_makes_nan_and_another_does_not(attend):
    case = problem([10], [3], tree=True)
    mask = torch.eye(3, dtype=torch.bool, device=DEVICE)[None]
    case = replace(case, inputs=replace(case.inputs, tail_mask=mask))
    case.v_cache[case.inputs.slot_table[0, 11].long()] = float("nan")
    is_nan = run(attend, case).isnan().all(1)
    assert is_nan.tolist() == [False, True, False]


def part_of(case: Problem, row: int, prefix: int, count: int) -> Problem:
    """The queries prefix .. prefix + count of a causal row alone, the keys before them as a prefix."""
    first = int(case.inputs.query_start[row]) + prefix - int(case.inputs.prefix_lens[row])
    queries = slice(first, first + count)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    inputs = replace(
        case.inputs,
        rows=case.inputs.rows[row : row + 1],
        query_start=integers(0, count),
        prefix_lens=integers(prefix),
        out_slots=case.inputs.out_slots[queries],
        positions=case.inputs.positions[queries],
        max_query_len=count,
        max_prefix_len=prefix,
    )
    return replace(case, q=case.q[queries], inputs=inputs)


@attentions
@pytest.mark.parametrize("window", [None, 9])
def test_a_query_does_not_feel_chunks_and_other_rows(attend, window, short_splits):
    case = problem([17, 0], [1, 22], heads=(2, 1))
    whole = run(attend, case, window)
    for prefix, count in ((0, 1), (14, 4), (21, 1)):
        part = run(attend, part_of(case, 1, prefix, count), window)
        assert torch.equal(part, whole[1 + prefix : 1 + prefix + count]), (prefix, count)


def as_tree(case: Problem, prefix: int, num_decoys: int) -> tuple[Problem, torch.Tensor]:
    """The last queries of a causal row as one path of a tree, other nodes scattered among them; and the path's node numbers.

    The slots of the table move with the nodes: a node's keys are where they were.
    """
    inputs = case.inputs
    count = case.q.shape[0]
    order = torch.randperm(count + num_decoys, device=DEVICE)
    path = order[:count].sort().values
    table = inputs.slot_table.clone()
    own = inputs.slot_table[0, prefix : prefix + count].clone()
    decoys = inputs.slot_table[0, prefix + count : prefix + count + num_decoys].clone()
    others = torch.tensor(sorted(set(range(count + num_decoys)) - set(path.tolist())), device=DEVICE, dtype=torch.long)
    table[0, prefix + path] = own
    table[0, prefix + others] = decoys
    mask = torch.eye(count + num_decoys, dtype=torch.bool, device=DEVICE)
    for depth, node in enumerate(path.tolist()):
        mask[node, path[: depth + 1]] = True
    q = torch.randn(count + num_decoys, *case.q.shape[1:], device=DEVICE).to(case.q.dtype)
    q[path] = case.q
    positions = torch.full((count + num_decoys,), prefix, dtype=torch.int32, device=DEVICE)
    positions[path] = inputs.positions
    tree = replace(
        inputs,
        query_start=torch.tensor([0, count + num_decoys], dtype=torch.int32, device=DEVICE),
        slot_table=table,
        out_slots=table[0, prefix : prefix + count + num_decoys].contiguous(),
        positions=positions,
        tail_mask=mask[None],
        max_query_len=count + num_decoys,
    )
    return replace(case, q=q, inputs=tree), path


def table_with_room(case: Problem, columns: int) -> Problem:
    """The same problem with unused, finite slots behind its row, as a look-ahead has them."""
    table = case.inputs.slot_table
    first = case.k_cache.shape[0]
    more = torch.arange(first, first + columns, dtype=torch.int32, device=DEVICE)[None]
    room = torch.randn(columns, *case.k_cache.shape[1:], device=DEVICE).to(case.k_cache.dtype)
    inputs = replace(case.inputs, slot_table=torch.cat([table[:, : case.inputs.max_prefix_len + case.q.shape[0]], more], 1).contiguous())
    return replace(case, k_cache=torch.cat([case.k_cache, room]), v_cache=torch.cat([case.v_cache, room]), inputs=inputs)


@attentions
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("prefix", [0, 14])
def test_a_node_does_not_feel_its_tree(attend, prefix, window, short_splits):
    case = table_with_room(problem([prefix], [4], heads=(2, 1)), 3)
    plain = run(attend, case, window)
    tree, path = as_tree(case, prefix, num_decoys=3)
    assert torch.equal(run(attend, tree, window)[path], plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_a_query_does_not_feel_chunks_trees_and_other_rows_on_the_gpu(dtype, window):
    case = problem([900, 0, 5], [2, 1500, 1], heads=(8, 2), head_dim=64, dtype=dtype)
    whole = run(row_invariant_attention_triton, case, window)
    for prefix, count in ((0, 512), (511, 1), (1020, 6), (1499, 1)):
        part = run(row_invariant_attention_triton, part_of(case, 1, prefix, count), window)
        assert torch.equal(part, whole[2 + prefix : 2 + prefix + count])
    for prefix in (60, 1000):
        alone = table_with_room(problem([prefix], [4], heads=(9, 3), head_dim=64, dtype=dtype), 12)
        tree, path = as_tree(alone, prefix, num_decoys=12)
        assert torch.equal(run(row_invariant_attention_triton, tree, window)[path], run(row_invariant_attention_triton, alone, window))


def test_heads_that_are_normalised_do_not_feel_the_number_of_tokens():
    heads, head_dim, num_tokens = (4, 2), 16, 70
    qkv = torch.randn(num_tokens, (heads[0] + 2 * heads[1]) * head_dim, device=DEVICE)
    angle = torch.randn(num_tokens, head_dim // 2, device=DEVICE)
    norms = [torch.randn(head_dim, device=DEVICE) for _ in range(2)]

    def rotate(tokens: slice) -> list[torch.Tensor]:
        count = len(qkv[tokens])
        caches = [torch.zeros(num_tokens, heads[1], head_dim, device=DEVICE) for _ in range(2)]
        positions = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)[tokens].contiguous()
        slots = torch.arange(count, dtype=torch.int32, device=DEVICE)
        q = ROW_INVARIANT.rotary_store(qkv[tokens], positions, angle.cos(), angle.sin(), slots, *caches, *norms, 1e-5)
        return [q, *(cache[:count] for cache in caches)]

    whole = rotate(slice(None))
    for tokens in (slice(0, 1), slice(5, 8), slice(69, 70)):
        assert all(torch.equal(part, all_tokens[tokens]) for part, all_tokens in zip(rotate(tokens), whole, strict=True))


def test_inputs_without_a_row_of_their_own_give_zeros():
    case = problem([3], [2], unowned=4)
    assert isinstance(case.inputs, AttentionInputs)
    for attend in ATTENTIONS:
        assert not run(attend, case)[2:].any()


@pytest.mark.parametrize("attend", [row_invariant_attention_reference, row_invariant_attention_triton])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("tree", [False, True])
def test_keys_before_a_rows_first_one_are_not_there(attend, tree: bool, window: int | None) -> None:
    case = gapped_problem(tree)
    expected = case.expected(window)
    assert not expected.isnan().any()
    assert_near(attend(case.q, case.k_cache, case.v_cache, case.inputs, case.scale, window), expected)
