"""Pairs of embedding and hidden state; kernel and reference against float64."""

import pytest
import torch

from eaglecli.kernels.draft_input import Residual, draft_input_reference, draft_input_triton
from eaglecli.kernels.rms_norm import rms_norm_reference
from tests.kernels.closeness import GPU_DTYPES, assert_near
from tests.kernels.random_trees import DEVICE

IMPLEMENTATIONS = pytest.mark.parametrize("build", [draft_input_reference, draft_input_triton])
DTYPES = GPU_DTYPES if DEVICE == "cuda" else (torch.float32, torch.float16)
EPS = 1e-5


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("normed", "residual"),
    [((True, True), Residual.RAW), ((True, True), Residual.NORMALISED), ((False, False), Residual.NONE), ((True, False), Residual.NONE)],
)
@pytest.mark.parametrize("gathered", [False, True])
def test_pairs_are_embedding_then_hidden_state_normalised_where_wanted(build, dtype, normed, residual: Residual, gathered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    width = 72  # no power of two
    embedding, hidden = (torch.randn(count, width, generator=generator).to(DEVICE, dtype) for count in (30, 5))
    norms = [torch.randn(width, generator=generator).to(DEVICE, dtype) if wanted else None for wanted in normed]
    input_ids = torch.tensor([29, 0, 7, 7, 3], device=DEVICE)
    index = torch.tensor([4, 4, 0, 2, 1], dtype=torch.int32, device=DEVICE) if gathered else None
    out = build(input_ids, embedding, hidden, index, *norms, EPS, residual)
    rows = embedding.double()[input_ids], hidden.double()[index] if gathered else hidden.double()
    expected = [row if norm is None else rms_norm_reference(row, norm.double(), EPS) for row, norm in zip(rows, norms, strict=True)]
    assert out.pair.dtype == dtype
    assert_near(out.pair, torch.cat(expected, 1))
    if residual is Residual.NONE:
        assert out.residual is None
    else:
        assert out.residual.is_contiguous()
        assert_near(out.residual, rows[1] if residual is Residual.RAW else expected[1])


@IMPLEMENTATIONS
def test_hidden_states_without_an_index_must_be_as_many_as_the_tokens(build) -> None:
    with pytest.raises(ValueError, match="hidden"):
        embedding = torch.zeros(4, 8, device=DEVICE)
        build(torch.zeros(3, dtype=torch.int64, device=DEVICE), embedding, embedding, None, None, None, EPS, Residual.NONE)
