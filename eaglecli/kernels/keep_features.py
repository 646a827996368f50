# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Keep what the draft will need of a token that was decoded without it, in a ring of W places a row.

    ring[rows[b], lengths[b] % W] = features[b]      ring_tokens[rows[b], lengths[b] % W] = tokens[b]

The feature is the target's at position lengths[b], the token the one that it chose for the position after: a pair of the draft.
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent

_BLOCK = 2048  # columns of one program


@triton.jit
def _keep_features_kernel(
    features_ptr, tokens_ptr, lengths_ptr, rows_ptr, ring_ptr, ring_tokens_ptr, num_places, num_columns, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    place = row * num_places + tl.load(lengths_ptr + batch_row) % num_places
    tl.store(ring_ptr + place * num_columns + column, tl.load(features_ptr + batch_row * num_columns + column, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(ring_tokens_ptr + place, tl.load(tokens_ptr + batch_row))


def keep_features_triton(
    features: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    ring: torch.Tensor,
    ring_tokens: torch.Tensor,
) -> None:
    """One launch; see `keep_features`."""
    _check(features, tokens, lengths, rows, ring, ring_tokens)
    num_rows, num_columns = features.shape
    if num_rows:
        _keep_features_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](
            features, tokens, lengths, rows, ring, ring_tokens, ring.shape[1], num_columns, BLOCK=_BLOCK, **launch_options(features.device)
        )


def keep_features_reference(
    features: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    ring: torch.Tensor,
    ring_tokens: torch.Tensor,
) -> None:
    """See `keep_features`."""
    _check(features, tokens, lengths, rows, ring, ring_tokens)
    place = lengths % ring.shape[1]
    ring[rows, place], ring_tokens[rows, place] = features, tokens


def _check(
    features: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    ring: torch.Tensor,
    ring_tokens: torch.Tensor,
) -> None:
    require("features", features, features.dtype, -1, -1)
    num_rows, num_columns = features.shape
    require("tokens", tokens, torch.int64, num_rows)
    require("lengths", lengths, torch.int32, num_rows)
    require("rows", rows, torch.int32, num_rows)
    require("ring", ring, features.dtype, -1, -1, num_columns)
    require("ring_tokens", ring_tokens, torch.int64, *ring.shape[:2])


def keep_features(
    features: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    ring: torch.Tensor,
    ring_tokens: torch.Tensor,
) -> None:
    """Write B rows' features [B, F] and tokens int64 [B] into ring [R, W, F] and ring_tokens int64 [R, W].

    lengths int32 [B] and rows int32 [B]; a row named twice (the dummy row) holds one of its values.
    """
    launch = keep_features_triton if rows.is_cuda else keep_features_reference
    launch(features, tokens, lengths, rows, ring, ring_tokens)
