# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""Log-probabilities of what was committed: of each token of a run, and of the K most probable tokens at the node it was chosen at.

They are of the target's own law: log-softmax, in float32, of the logits as the model gave them, before bias, penalties, temperature
and filters. The work is done after the commit, at the nodes of the path alone, and only for rows that ask for it.

    log p(token) = (x[token] - max x) - log sum exp(x - max x)       K best: by logit, ties lowest id first

The kernel cuts a row of logits into chunks of one fixed size, so that no sum depends on the batch. A program takes maximum, sum and
K best of its chunk; the last one of a row merges them. What goes to the host is one int32 record a token: the bits of log p(token),
the K ids, the bits of their K log-probabilities.
"""

import torch
import triton
import triton.language as tl

from eaglecli.kernels.contract import require, require_rows
from eaglecli.kernels.last_arrival import arrival_counters, is_last_arrival

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_FLOAT32 = tl.constexpr(_LARGEST)
_CHUNK = 1024  # logits of one program


def logprob_columns(num_top: int) -> int:
    """Columns of the record of one token."""
    return 1 + 2 * num_top


@triton.jit
def _store_chunk(
    logits_ptr, max_ptr, sum_ptr, id_ptr, first, vocab_size, NUM_TOP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exp(x - maximum) and the best ids of one chunk."""
    column = first + tl.arange(0, CHUNK)
    exists = column < vocab_size
    x = tl.load(logits_ptr + column, mask=exists, other=float("-inf")).to(tl.float32)
    chunk_max = tl.maximum(tl.max(x, axis=0), -_LARGEST_FLOAT32)
    tl.store(max_ptr, chunk_max)
    tl.store(sum_ptr, tl.sum(tl.exp(x - chunk_max), axis=0))
    key = tl.where(exists, tl.maximum(x, -_LARGEST_FLOAT32), float("-inf"))  # -inf marks what does not exist or is taken
    for i in tl.static_range(NUM_TOP):
        best = tl.max(key, axis=0)
        best_id = tl.min(tl.where(key == best, column, vocab_size), axis=0)
        tl.store(id_ptr + i, tl.where(best > float("-inf"), best_id, -1))
        key = tl.where(column == best_id, float("-inf"), key)


@triton.jit
def _merge_chunks(
    logits_ptr, max_ptr, sum_ptr, id_ptr, chosen, out_ptr, num_chunks, vocab_size,
    NUM_TOP: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, WINNERS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The record of one token from the parts of all chunks."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    maxima = tl.load(max_ptr + chunk, mask=chunk < num_chunks, other=-_LARGEST_FLOAT32)
    sums = tl.load(sum_ptr + chunk, mask=chunk < num_chunks, other=0.0)
    row_max = tl.max(maxima, axis=0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxima - row_max), axis=0))
    chosen_logprob = tl.load(logits_ptr + chosen).to(tl.float32) - row_max - log_sum
    tl.store(out_ptr, chosen_logprob.to(tl.int32, bitcast=True))
    if NUM_TOP > 0:
        place = tl.arange(0, WINNERS_BLOCK)
        winner = tl.load(id_ptr + place, mask=place < num_chunks * NUM_TOP, other=-1)
        score = tl.load(logits_ptr + winner, mask=winner >= 0, other=0.0).to(tl.float32)
        logprob = score - row_max - log_sum
        key = tl.where(winner >= 0, tl.maximum(score, -_LARGEST_FLOAT32), float("-inf"))
        for i in tl.static_range(NUM_TOP):
            best = tl.max(key, axis=0)
            best_id = tl.min(tl.where(key == best, winner, vocab_size), axis=0)
            is_best = winner == best_id
            tl.store(out_ptr + 1 + i, best_id)
            best_logprob = tl.max(tl.where(is_best, logprob, float("-inf")), axis=0)
            tl.store(out_ptr + 1 + NUM_TOP + i, best_logprob.to(tl.int32, bitcast=True))
            key = tl.where(is_best, float("-inf"), key)


@triton.jit
def _token_logprobs_kernel(
    logits_ptr, rows_ptr, is_wanted_ptr, tokens_ptr, path_ptr, max_ptr, sum_ptr, id_ptr, counter_ptr, out_ptr,
    vocab_size, num_chunks, row_stride, num_nodes, out_stride, WIDTH: tl.constexpr, NUM_TOP: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, WINNERS_BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)  # one token of one run
    chunk = tl.program_id(1)
    batch_row, step = place // WIDTH, place % WIDTH
    node = tl.load(path_ptr + place)
    if (node >= 0) & (tl.load(is_wanted_ptr + tl.load(rows_ptr + batch_row)) != 0):
        node_logits_ptr = logits_ptr + (batch_row * num_nodes + node) * row_stride
        parts = place * num_chunks
        here = parts + chunk
        _store_chunk(
            node_logits_ptr, max_ptr + here, sum_ptr + here, id_ptr + here * NUM_TOP, chunk * CHUNK, vocab_size, NUM_TOP, CHUNK
        )  # fmt: skip
        if is_last_arrival(counter_ptr + place, num_chunks):
            chosen = tl.maximum(tl.load(tokens_ptr + place), 0)  # -1: nothing was chosen, and the token is not part of the output
            record_ptr = out_ptr + batch_row * out_stride + step * (1 + 2 * NUM_TOP)
            _merge_chunks(
                node_logits_ptr, max_ptr + parts, sum_ptr + parts, id_ptr + parts * NUM_TOP, chosen, record_ptr, num_chunks, vocab_size,
                NUM_TOP, CHUNKS_BLOCK, WINNERS_BLOCK,
            )  # fmt: skip


def token_logprobs_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    is_wanted: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    num_top: int,
    out: torch.Tensor,
) -> None:
    """One launch; see `token_logprobs`."""
    num_nodes = _check(logits, rows, is_wanted, tokens, path, num_top, out)
    (num_rows, width), vocab_size, device = tokens.shape, logits.shape[1], logits.device
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    if num_rows:
        num_places = num_rows * width
        chunk_max = torch.empty(num_places, num_chunks, dtype=torch.float32, device=device)
        chunk_sum = torch.empty(num_places, num_chunks, dtype=torch.float32, device=device)
        chunk_id = torch.empty(num_places, num_chunks, max(num_top, 1), dtype=torch.int32, device=device)
        _token_logprobs_kernel[(num_places, num_chunks)](
            logits, rows, is_wanted, tokens, path, chunk_max, chunk_sum, chunk_id, arrival_counters(num_places, device), out,
            vocab_size, num_chunks, logits.stride(0), num_nodes, out.stride(0), WIDTH=width, NUM_TOP=num_top,
            CHUNK=_CHUNK, CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
            WINNERS_BLOCK=triton.next_power_of_2(num_chunks * max(num_top, 1)), num_warps=4,
        )  # fmt: skip


def token_logprobs_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    is_wanted: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    num_top: int,
    out: torch.Tensor,
) -> None:
    """See `token_logprobs`."""
    num_nodes = _check(logits, rows, is_wanted, tokens, path, num_top, out)
    batch_row, step = torch.nonzero((path >= 0) & is_wanted[rows][:, None], as_tuple=True)
    scores = logits[batch_row * num_nodes + path[batch_row, step]].to(torch.float32)
    shifted = scores - scores.amax(dim=1, keepdim=True)
    logprobs = shifted - shifted.exp().sum(dim=1, keepdim=True).log()
    chosen = logprobs.gather(1, tokens[batch_row, step].clamp_min(0)[:, None])
    top_ids = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :num_top]  # stable: equal logits stay in id order
    values = logprobs.gather(1, top_ids)
    record = torch.cat([chosen.view(torch.int32), top_ids.int(), values.view(torch.int32)], dim=1)
    columns = logprob_columns(num_top)
    out[:, : tokens.shape[1] * columns].unflatten(1, (-1, columns))[batch_row, step] = record


def _check(
    logits: torch.Tensor,
    rows: torch.Tensor,
    is_wanted: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    num_top: int,
    out: torch.Tensor,
) -> int:
    """Nodes of each row. Raises ValueError."""
    require_rows("logits", logits)
    require("rows", rows, torch.int32, -1)
    num_rows = rows.shape[0]
    require("is_wanted", is_wanted, torch.bool, -1)
    require("tokens", tokens, torch.int64, num_rows, -1)
    require("path", path, torch.int32, *tokens.shape)
    require("out", out, torch.int32, num_rows, -1)
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"the {num_top} most probable of {logits.shape[1]} tokens cannot be had")
    if out.shape[1] < tokens.shape[1] * logprob_columns(num_top):
        raise ValueError(f"a record of {out.shape[1]} columns has no room for {tokens.shape[1]} tokens and their {num_top} best")
    num_nodes = logits.shape[0] // max(num_rows, 1)
    if num_nodes * num_rows != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits are not a whole number of nodes for each of {num_rows} rows")
    return num_nodes


def token_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    is_wanted: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    num_top: int,
    out: torch.Tensor,
) -> None:
    """Write the records of the runs of all rows that want them; nothing else of `out` is touched.

    logits [B * N, V] as the model gave them; rows int32 [B]; is_wanted bool [R]; tokens int64 and path int32 [B, W] of a commit (path
    -1 past the end); out int32 [B, >= W * (1 + 2K)], K = num_top: per token the bits of its log-probability, K ids, K bits of theirs.
    """
    launch = token_logprobs_triton if logits.is_cuda else token_logprobs_reference
    launch(logits, rows, is_wanted, tokens, path, num_top, out)
