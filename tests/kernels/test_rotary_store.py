"""Rotary and store kernel against its float64 reference."""

import pytest
import torch

from eaglecli.kernels.rotary_store import rotary_store_reference, rotary_store_triton
from tests.kernels.closeness import GPU_DTYPES, assert_near, poison_free_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 150


def check(tokens: int, heads: int, kv_heads: int, head_dim: int, norms: str, dtype: torch.dtype = torch.float32) -> None:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE, dtype=torch.int32)
    cos, sin = torch.randn(2, 50, head_dim // 2, device=DEVICE)
    slots = torch.randperm(NUM_SLOTS, device=DEVICE)[:tokens].int()
    q_norm = torch.randn(head_dim, device=DEVICE).to(dtype) if "q" in norms else None
    k_norm = torch.randn(head_dim, device=DEVICE).to(dtype) if "k" in norms else None
    before = torch.randn(2, NUM_SLOTS, kv_heads, head_dim, device=DEVICE).to(dtype)
    cache, wide_cache = before.clone(), before.double()
    wide_norms = [None if norm is None else norm.double() for norm in (q_norm, k_norm)]
    poison_free_memory(DEVICE)
    q = rotary_store_triton(qkv, positions, cos, sin, slots, cache[0], cache[1], q_norm, k_norm, 1e-6)
    expected = rotary_store_reference(qkv.double(), positions, cos, sin, slots, wide_cache[0], wide_cache[1], *wide_norms, 1e-6)
    assert_near(q, expected)
    assert_near(cache, wide_cache)
    untouched = torch.ones(NUM_SLOTS, dtype=torch.bool, device=DEVICE)
    untouched[slots.long()] = False
    assert torch.equal(cache[:, untouched], before[:, untouched])


@pytest.mark.parametrize("norms", ["", "qk", "q"])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim"), [(1, 4, 2, 16), (3, 3, 1, 20), (5, 9, 3, 64)])
def test_queries_keys_and_values_equal_the_reference(tokens: int, heads: int, kv_heads: int, head_dim: int, norms: str) -> None:
    check(tokens, heads, kv_heads, head_dim, norms)


def test_many_tokens_take_several_heads_a_program() -> None:
    check(64, 10, 4, 8, "qk")


def test_values_are_stored_bit_for_bit() -> None:
    qkv = torch.randn(2, 4 * 8, device=DEVICE)
    cache = torch.zeros(2, 5, 1, 8, device=DEVICE)
    index = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    cos, sin = torch.randn(2, 4, 4, device=DEVICE)
    rotary_store_triton(qkv, index, cos, sin, index, cache[0], cache[1], None, None, 1e-6)
    assert torch.equal(cache[1, [3, 1], 0], qkv[:, 24:])


@pytest.mark.parametrize("broken", ["qkv", "table", "cache"])
def test_a_broken_contract_is_a_value_error(broken: str) -> None:
    qkv = torch.zeros(2, 35 if broken == "qkv" else 32)
    cos = torch.zeros(4, 8 if broken == "table" else 4)
    cache = torch.zeros(2, 5, 1, 16)[..., ::2] if broken == "cache" else torch.zeros(2, 5, 1, 8)
    index = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="rotary_store needs"):
        rotary_store_triton(qkv, index, cos, cos, index, cache[0], cache[1], None, None, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("norms", ["", "qk"])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim"), [(1, 32, 8, 128), (8, 9, 3, 64), (63, 8, 8, 80), (130, 14, 2, 96)])
def test_compiled_kernel_equals_the_reference(
    tokens: int, heads: int, kv_heads: int, head_dim: int, norms: str, dtype: torch.dtype
) -> None:
    check(tokens, heads, kv_heads, head_dim, norms, dtype)
