# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Bias, penalties and a least length, laid over the target's logits before a token is chosen; exact at every node of a tree.

With c = how often a token occurs in the output up to here, for a row that asks for any of it:

    bias         x + bias[token]
    repetition   of tokens in the prompt or the output: x / penalty where x > 0, else x * penalty
    frequency    x - penalty * c
    presence     x - penalty where c > 0
    least length stop ids are -inf at positions before `min_until`

in this order, that of transformers and vLLM. "The output up to here" is what the row has committed, which `counts` holds and
`count_tokens` keeps, and the node's own path below the root: the root is committed already. So a node's scores are those that
plain decoding would see there. The result is float32 and a tensor of its own: small penalties are not lost to the precision of
the logits, which stay as they are for log-probabilities. Rows that ask for nothing are copied.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.contract import require, require_rows

_CHUNK = 2048  # logits of one program


@dataclass(frozen=True, eq=False)
class AdjustmentTensors:
    """What R rows ask for. `counts` is 2 * (occurrences in the output) + (1 if the token is in the prompt); V is the vocabulary."""

    is_adjusted: torch.Tensor  # bool [R]; False: all else of the row is junk
    repetition_penalty: torch.Tensor  # float32 [R]
    presence_penalty: torch.Tensor  # float32 [R]
    frequency_penalty: torch.Tensor  # float32 [R]
    min_until: torch.Tensor  # int32 [R] absolute position of the first token that may end the output
    counts: torch.Tensor  # int32 [R, V]
    bias: torch.Tensor  # float32 [R, V]


@triton.jit
def _adjust_logits_kernel(
    logits_ptr, rows_ptr, position_ptr, tree_tokens_ptr, ancestor_mask_ptr,
    is_adjusted_ptr, repetition_ptr, presence_ptr, frequency_ptr, min_until_ptr, counts_ptr, bias_ptr, stop_ids_ptr, out_ptr,
    vocab_size, row_stride, num_stop_ids, NUM_NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    logits_row = tl.program_id(0).to(tl.int64)
    batch_row = logits_row // NUM_NODES
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    x = tl.load(logits_ptr + logits_row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if tl.load(is_adjusted_ptr + row) != 0:
        count = tl.load(counts_ptr + row * vocab_size + column, mask=inside, other=0)
        if NUM_NODES > 1:
            for node in range(1, NUM_NODES):
                is_on_path = tl.load(ancestor_mask_ptr + logits_row * NUM_NODES + node) != 0
                token = tl.load(tree_tokens_ptr + batch_row * NUM_NODES + node)
                count += tl.where((column == token) & is_on_path, 2, 0)
        x += tl.load(bias_ptr + row * vocab_size + column, mask=inside, other=0.0)
        repetition = tl.load(repetition_ptr + row)
        x = tl.where(count > 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
        occurrences = count >> 1
        x -= tl.load(frequency_ptr + row) * occurrences.to(tl.float32)
        x -= tl.where(occurrences > 0, tl.load(presence_ptr + row), 0.0)
        if tl.load(position_ptr + logits_row) < tl.load(min_until_ptr + row):
            for i in range(0, num_stop_ids):
                stop_id = tl.load(stop_ids_ptr + row * num_stop_ids + i)
                x = tl.where(column == stop_id, float("-inf"), x)
    tl.store(out_ptr + logits_row * vocab_size + column, x, mask=inside)


def adjust_logits_triton(
    logits: torch.Tensor,
    adjustments: AdjustmentTensors,
    stop_ids: torch.Tensor,
    rows: torch.Tensor,
    position: torch.Tensor,
    tree: DraftTree | None,
) -> torch.Tensor:
    """One launch; see `adjust_logits`."""
    num_nodes = _check(logits, adjustments, stop_ids, rows, position, tree)
    num_logits, vocab_size = logits.shape
    out = torch.empty(num_logits, vocab_size, dtype=torch.float32, device=logits.device)
    if num_logits:
        _adjust_logits_kernel[(num_logits, triton.cdiv(vocab_size, _CHUNK))](
            logits, rows, position, tree and tree.tokens, tree and tree.ancestor_mask,
            adjustments.is_adjusted, adjustments.repetition_penalty, adjustments.presence_penalty, adjustments.frequency_penalty,
            adjustments.min_until, adjustments.counts, adjustments.bias, stop_ids, out,
            vocab_size, logits.stride(0), stop_ids.shape[1], NUM_NODES=num_nodes, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
    return out


def adjust_logits_reference(
    logits: torch.Tensor,
    adjustments: AdjustmentTensors,
    stop_ids: torch.Tensor,
    rows: torch.Tensor,
    position: torch.Tensor,
    tree: DraftTree | None,
) -> torch.Tensor:
    """See `adjust_logits`."""
    num_nodes = _check(logits, adjustments, stop_ids, rows, position, tree)
    out = logits.to(torch.float32, copy=True)
    asking = torch.nonzero(adjustments.is_adjusted[rows].repeat_interleave(num_nodes))[:, 0]
    if not len(asking):
        return out
    batch_row, node = asking // num_nodes, asking % num_nodes
    row = rows[batch_row].long()
    count = adjustments.counts[row]
    if tree is not None:
        on_path = tree.ancestor_mask[batch_row, node]
        on_path[:, 0] = False  # the root is committed
        count.scatter_add_(1, tree.tokens[batch_row], 2 * on_path.int())
    x = out[asking] + adjustments.bias[row]
    repetition = adjustments.repetition_penalty[row, None]
    x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    occurrences = count >> 1
    x -= adjustments.frequency_penalty[row, None] * occurrences
    x -= torch.where(occurrences > 0, adjustments.presence_penalty[row, None], 0.0)
    ids = stop_ids[row]
    is_barred = (position[asking] < adjustments.min_until[row])[:, None] & (ids >= 0) & (ids < logits.shape[1])
    place, column = torch.nonzero(is_barred)[:, 0], ids[is_barred]
    x[place, column] = float("-inf")
    out[asking] = x
    return out


def _check(
    logits: torch.Tensor,
    adjustments: AdjustmentTensors,
    stop_ids: torch.Tensor,
    rows: torch.Tensor,
    position: torch.Tensor,
    tree: DraftTree | None,
) -> int:
    """Nodes of each row's tree. Raises ValueError."""
    require_rows("logits", logits)
    require("rows", rows, torch.int32, -1)
    num_logits, vocab_size = logits.shape
    num_rows, num_batch_rows = adjustments.is_adjusted.shape[0], rows.shape[0]
    num_nodes = 1 if tree is None else tree.tokens.shape[1]
    if num_batch_rows * num_nodes != num_logits:
        raise ValueError(f"{num_batch_rows} rows of {num_nodes} nodes each do not fit {num_logits} rows of logits")
    if tree is not None:
        require("tree tokens", tree.tokens, torch.int64, num_batch_rows, num_nodes)
        require("ancestor mask", tree.ancestor_mask, torch.bool, num_batch_rows, num_nodes, num_nodes)
    require("position", position, torch.int32, num_logits)
    require("stop_ids", stop_ids, torch.int64, num_rows, -1)
    require("is_adjusted", adjustments.is_adjusted, torch.bool, num_rows)
    require("min_until", adjustments.min_until, torch.int32, num_rows)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        require(name, getattr(adjustments, name), torch.float32, num_rows)
    require("counts", adjustments.counts, torch.int32, num_rows, vocab_size)
    require("bias", adjustments.bias, torch.float32, num_rows, vocab_size)
    return num_nodes


def adjust_logits(
    logits: torch.Tensor,
    adjustments: AdjustmentTensors,
    stop_ids: torch.Tensor,
    rows: torch.Tensor,
    position: torch.Tensor,
    tree: DraftTree | None,
) -> torch.Tensor:
    """What tokens are chosen from: float32 [M, V].

    logits [M, V], any floating dtype, M = B * N: the nodes of B trees, or (tree None, N = 1) the ends of B prompts; rows int32 [B];
    stop_ids int64 [R, S] padded with -1; position int32 [M] is the absolute position of the token being chosen.
    """
    launch = adjust_logits_triton if logits.is_cuda else adjust_logits_reference
    return launch(logits, adjustments, stop_ids, rows, position, tree)
