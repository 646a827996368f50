# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""What a draft's first product takes: the embedding of each token beside the hidden state it continues, each perhaps normalised.

    pair[t] = [ norm_e(embedding[input_ids[t]]) ; norm_h(hidden[hidden_index[t]]) ]

A norm is the RMS norm of `rms_norm`, or nothing. The residual stream of EAGLE-3 starts from the same hidden rows, as they are or
normalised; they come out too when asked for. One launch stands for two gathers, two norms and a concatenation.
"""

import enum
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent
from eaglecli.kernels.rms_norm import rms_norm_reference


class Residual(enum.IntEnum):
    """Which hidden rows are wanted beside the pair."""

    NONE = 0
    RAW = 1
    NORMALISED = 2


@dataclass(frozen=True, eq=False)
class DraftInput:
    """pair [T, 2 H], residual [T, H] or None."""

    pair: torch.Tensor
    residual: torch.Tensor | None


@triton.jit
def _row_norm(x, weight_ptr, column, inside, eps, WIDTH: tl.constexpr):
    """float32 x [BLOCK], zero outside, normalised and scaled."""
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)) * weight


@triton.jit
def _draft_input_kernel(
    input_ids_ptr, embedding_ptr, hidden_ptr, hidden_index_ptr, embedding_norm_ptr, hidden_norm_ptr, pair_ptr, residual_ptr, eps,
    RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    pair_ptr += token * 2 * WIDTH + column
    if tl.program_id(1) == 0:
        row = tl.load(input_ids_ptr + token).to(tl.int64)
        x = tl.load(embedding_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if embedding_norm_ptr is not None:
            x = _row_norm(x, embedding_norm_ptr, column, inside, eps, WIDTH)
        tl.store(pair_ptr, x, mask=inside)
    else:
        row = token
        if hidden_index_ptr is not None:
            row = tl.load(hidden_index_ptr + token).to(tl.int64)
        raw = tl.load(hidden_ptr + row * WIDTH + column, mask=inside, other=0.0)
        x = raw.to(tl.float32)
        if hidden_norm_ptr is not None:
            x = _row_norm(x, hidden_norm_ptr, column, inside, eps, WIDTH)
        tl.store(pair_ptr + WIDTH, x, mask=inside)
        if RESIDUAL == 1:
            tl.store(residual_ptr + token * WIDTH + column, raw, mask=inside)
        if RESIDUAL == 2:
            tl.store(residual_ptr + token * WIDTH + column, x, mask=inside)


def draft_input_triton(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    hidden_index: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    eps: float,
    residual: Residual,
) -> DraftInput:
    """One launch, two programs a token; see `draft_input`."""
    _check(input_ids, embedding, hidden, hidden_index, embedding_norm, hidden_norm)
    num_tokens, width = input_ids.shape[0], hidden.shape[1]
    pair = torch.empty(num_tokens, 2 * width, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(width)
    # rows that are wanted just as they came need no copy
    is_copied = residual is Residual.NORMALISED or (residual is Residual.RAW and hidden_index is not None)
    rows = torch.empty(num_tokens, width, dtype=hidden.dtype, device=hidden.device) if is_copied else None
    if num_tokens:
        _draft_input_kernel[(num_tokens, 2)](
            input_ids, embedding, hidden, hidden_index, embedding_norm, hidden_norm, pair, rows, eps,
            RESIDUAL=int(residual) if is_copied else 0, WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            **launch_options(input_ids.device),
        )  # fmt: skip
    return DraftInput(pair, hidden if residual is Residual.RAW and rows is None else rows)


def draft_input_reference(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    hidden_index: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    eps: float,
    residual: Residual,
) -> DraftInput:
    """See `draft_input`."""
    _check(input_ids, embedding, hidden, hidden_index, embedding_norm, hidden_norm)
    embeds = functional.embedding(input_ids, embedding)
    if embedding_norm is not None:
        embeds = rms_norm_reference(embeds, embedding_norm, eps)
    raw = hidden if hidden_index is None else hidden[hidden_index]
    normalised = raw if hidden_norm is None else rms_norm_reference(raw, hidden_norm, eps)
    kept = {Residual.NONE: None, Residual.RAW: raw, Residual.NORMALISED: normalised}[residual]
    return DraftInput(torch.cat((embeds, normalised), dim=-1), kept)


def _check(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    hidden_index: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
) -> None:
    require("input_ids", input_ids, torch.int64, -1)
    num_tokens = input_ids.shape[0]
    require("hidden", hidden, hidden.dtype, num_tokens if hidden_index is None else -1, -1)
    require("embedding", embedding, hidden.dtype, -1, hidden.shape[1])
    if hidden_index is not None:
        require("hidden_index", hidden_index, torch.int32, num_tokens)
    for name, norm in (("embedding_norm", embedding_norm), ("hidden_norm", hidden_norm)):
        if norm is not None:
            require(name, norm, hidden.dtype, hidden.shape[1])


def draft_input(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    hidden_index: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    eps: float,
    residual: Residual,
) -> DraftInput:
    """Pairs of T tokens.

    input_ids int64 [T]; embedding [>=V, H]; hidden [X, H]; hidden_index int32 [T], None: X = T, in order; norms [H] or None. All
    of one dtype. `residual` names the hidden rows that come out beside the pairs; they may be `hidden` itself.
    """
    launch = draft_input_triton if hidden.is_cuda else draft_input_reference
    return launch(input_ids, embedding, hidden, hidden_index, embedding_norm, hidden_norm, eps, residual)
