# ruff: noqa: ANN001, ANN202 - Triton infers the types of a kernel's arguments
"""From the target's choices to rows brought up to date: accept, cut, commit, all in one launch.

    walk        along the choices, see `accept_path`; the accepted nodes' slots move to the front of the row's tail
    cut         the run (accepted drafts and the bonus token) ends after its first stop id, before a choice that was not
                possible, or where the row's room ends
    commit      the row's length, its last token and whether it is finished
    record      what the host reads of the run

The walk does not look at stop ids: what it accepts is counted in full, then cut. A finished row is frozen: its length never
passes its limit. The first token after a prompt is a run of a root alone and takes the same way.
"""

import enum
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from eaglecli.kernels.accept_path import AcceptedPath, accept_path_reference, permute_slots, permute_tail_reference, walk_tree
from eaglecli.kernels.build_tree import DraftTree
from eaglecli.kernels.contract import require
from eaglecli.kernels.launch import launch_options, start_dependent


class Status(enum.IntEnum):
    """Where a row stands after a run of tokens."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NUMERIC = 3  # the target's logits were not finite where the next token had to be chosen


_RUNNING, _STOP = tl.constexpr(int(Status.RUNNING)), tl.constexpr(int(Status.STOP))
_LENGTH, _NUMERIC = tl.constexpr(int(Status.LENGTH)), tl.constexpr(int(Status.NUMERIC))


@dataclass(frozen=True, eq=False)
class RowProgress:
    """What a commit reads and changes of R rows; the last is the dummy row, which never changes."""

    lengths: torch.Tensor  # int32 [R] changed
    limits: torch.Tensor  # int32 [R]
    verified_id: torch.Tensor  # int64 [R] changed
    finished: torch.Tensor  # bool [R] changed
    slot_table: torch.Tensor  # int32 [R, C] permuted
    stop_ids: torch.Tensor  # int64 [R, max_stop_ids] padded with -1


@dataclass(frozen=True, eq=False)
class RunOutputs:
    """Where a commit writes what it knows of B runs of at most S + 1 tokens; the record is W >= S + 1 tokens wide."""

    tokens: torch.Tensor  # int64 [B, S + 1] accepted drafts, then the bonus token, 0 past the end
    path: torch.Tensor  # int32 [B, S + 1] nodes whose choice those tokens are, root first, -1 past the end
    extend_lens: torch.Tensor  # int32 [B] tokens of the run the draft must see: accepted + 1, or 0 for rows that do not go on
    record: torch.Tensor  # int32 [B, W + 3] tokens, accepted drafts, emitted tokens, `Status`


def empty_outputs(num_rows: int, num_steps: int, run_width: int, device: torch.device) -> RunOutputs:
    """Unwritten outputs for runs of num_steps + 1 tokens, with a record for run_width."""
    width = num_steps + 1
    return RunOutputs(
        tokens=torch.empty(num_rows, width, dtype=torch.int64, device=device),
        path=torch.empty(num_rows, width, dtype=torch.int32, device=device),
        extend_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
        record=torch.empty(num_rows, run_width + 3, dtype=torch.int32, device=device),
    )


@triton.jit
def _commit_run_kernel(
    rows_ptr, base_lengths_ptr, chosen_ptr, tree_tokens_ptr, parents_ptr, allowed_ptr,
    lengths_ptr, limits_ptr, verified_id_ptr, finished_ptr, slot_table_ptr, stop_ids_ptr,
    tokens_ptr, path_ptr, extend_lens_ptr, record_ptr, dummy_row, num_columns, num_stop_ids,
    NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, NUM_STEPS: tl.constexpr,
    RUN_WIDTH: tl.constexpr, STEP_BLOCK: tl.constexpr, STOP_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_dependent(DEPENDENT)
    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + batch_row).to(tl.int64)
    base_length = tl.load(base_lengths_ptr + batch_row)
    room = tl.maximum(tl.load(limits_ptr + row) - base_length - 1, 0)
    stop = tl.arange(0, STOP_BLOCK)
    stop_ids = tl.load(stop_ids_ptr + row * num_stop_ids + stop, mask=stop < num_stop_ids, other=-1)
    node = tl.arange(0, NODE_BLOCK)
    step = tl.arange(0, STEP_BLOCK)
    nodes = batch_row * NUM_NODES
    chosen = tl.load(chosen_ptr + nodes + node, mask=node < NUM_NODES, other=-1)
    last, num_accepted, tokens, path, place = walk_tree(
        chosen, tree_tokens_ptr, parents_ptr, allowed_ptr, nodes, node, step, NUM_NODES, NODE_BLOCK, NUM_STEPS
    )
    if NUM_NODES > 1:
        permute_slots(slot_table_ptr + row * num_columns + base_length, place, num_accepted, node, NUM_NODES)

    num_tokens = num_accepted + 1
    num_valid = tl.where(last >= 0, num_tokens, num_accepted)
    is_stop = (tl.max((tokens[:, None] == stop_ids[None, :]).to(tl.int32), axis=1) > 0) & (step < num_valid)
    until_stop = tl.min(tl.where(is_stop, step + 1, STEP_BLOCK + 1), axis=0)
    num_emitted = tl.minimum(tl.minimum(num_valid, until_stop), room)
    status = tl.where(last >= 0, _RUNNING, _NUMERIC)
    status = tl.where(num_emitted == room, _LENGTH, status)
    status = tl.where(num_emitted == until_stop, _STOP, status)

    is_live = row != dummy_row
    tl.store(lengths_ptr + row, base_length + num_emitted, mask=is_live)
    tl.store(verified_id_ptr + row, tl.maximum(last, 0), mask=is_live)
    tl.store(finished_ptr + row, status != _RUNNING, mask=is_live)
    in_run = step <= NUM_STEPS
    tl.store(tokens_ptr + batch_row * (NUM_STEPS + 1) + step, tokens, mask=in_run)
    tl.store(path_ptr + batch_row * (NUM_STEPS + 1) + step, path, mask=in_run)
    tl.store(extend_lens_ptr + batch_row, tl.where(is_live & (status == _RUNNING), num_tokens, 0))
    record_ptr += batch_row * (RUN_WIDTH + 3)
    tl.store(record_ptr + step, tokens.to(tl.int32), mask=step < RUN_WIDTH)
    tl.store(record_ptr + RUN_WIDTH, num_accepted)
    tl.store(record_ptr + RUN_WIDTH + 1, num_emitted)
    tl.store(record_ptr + RUN_WIDTH + 2, status)


def commit_run_triton(
    progress: RowProgress,
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    chosen: torch.Tensor,
    tree: DraftTree | None,
    allowed: torch.Tensor | None,
    out: RunOutputs,
) -> None:
    """One launch, one program a row; see `commit_run`."""
    _check(progress, rows, base_lengths, chosen, tree, allowed, out)
    num_rows, num_nodes = chosen.shape
    run_width, num_stop_ids = out.record.shape[1] - 3, progress.stop_ids.shape[1]
    if num_rows:
        _commit_run_kernel[(num_rows,)](
            rows, base_lengths, chosen, tree and tree.tokens, tree and tree.parents, allowed,
            progress.lengths, progress.limits, progress.verified_id, progress.finished, progress.slot_table, progress.stop_ids,
            out.tokens, out.path, out.extend_lens, out.record,
            progress.lengths.shape[0] - 1, progress.slot_table.shape[1], num_stop_ids,
            NUM_NODES=num_nodes, NODE_BLOCK=triton.next_power_of_2(num_nodes), NUM_STEPS=out.tokens.shape[1] - 1,
            RUN_WIDTH=run_width, STEP_BLOCK=triton.next_power_of_2(run_width), STOP_BLOCK=triton.next_power_of_2(num_stop_ids), num_warps=1,
            **launch_options(rows.device),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Ending:
    """num_emitted int32 [B] tokens of the run that belong to the output; status int32 [B], see `Status`."""

    num_emitted: torch.Tensor
    status: torch.Tensor


def _cut_run(
    tokens: torch.Tensor, num_tokens: torch.Tensor, last_is_finite: torch.Tensor, stop_ids: torch.Tensor, room: torch.Tensor
) -> _Ending:
    """Cut each run after its first stop id or where the room ends.

    tokens int64 [B, W], the first num_tokens int32 [B] (>= 1) of a row are its run; last_is_finite bool [B]: whether the last of them
    was chosen from finite logits; stop_ids int64 [B, S] padded with -1; room int32 [B]: tokens the output may still take.
    """
    width = tokens.shape[1]
    num_valid = num_tokens - (~last_is_finite).int()
    index = torch.arange(width, device=tokens.device)
    is_stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(2) & (index < num_valid[:, None])
    until_stop = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, width + 1).int()
    num_emitted = torch.minimum(torch.minimum(num_valid, until_stop), room)
    status = torch.full_like(num_emitted, Status.RUNNING)
    status = torch.where(last_is_finite, status, Status.NUMERIC)
    status = torch.where(num_emitted == room, Status.LENGTH, status)
    status = torch.where(num_emitted == until_stop, Status.STOP, status)
    return _Ending(num_emitted, status.int())


def commit_run_reference(
    progress: RowProgress,
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    chosen: torch.Tensor,
    tree: DraftTree | None,
    allowed: torch.Tensor | None,
    out: RunOutputs,
) -> None:
    """See `commit_run`."""
    _check(progress, rows, base_lengths, chosen, tree, allowed, out)
    num_accepted, path, tokens = torch.zeros_like(rows), torch.zeros_like(chosen, dtype=torch.int32), chosen
    if tree is not None and allowed is not None:
        walk: AcceptedPath = accept_path_reference(tree.tokens, tree.parents, chosen, allowed, out.tokens.shape[1] - 1)
        num_accepted, path, tokens = walk.num_accepted, walk.path, walk.tokens
        permute_tail_reference(progress.slot_table, rows, base_lengths, path, num_accepted, chosen.shape[1])
    last = tokens.gather(1, num_accepted.long()[:, None])[:, 0]
    room = (progress.limits[rows] - base_lengths - 1).clamp(min=0)
    ending = _cut_run(tokens, num_accepted + 1, last >= 0, progress.stop_ids[rows], room)
    is_dummy = rows == progress.lengths.shape[0] - 1
    is_running = ending.status == Status.RUNNING
    progress.lengths[rows] = torch.where(is_dummy, progress.lengths[-1], base_lengths + ending.num_emitted)
    progress.verified_id[rows] = torch.where(is_dummy, progress.verified_id[-1], last.clamp(min=0))
    progress.finished[rows] = torch.where(is_dummy, progress.finished[-1], ~is_running)
    out.tokens.copy_(tokens)
    out.path.copy_(path)
    out.extend_lens.copy_(torch.where(is_running & ~is_dummy, num_accepted + 1, 0))
    widened = functional.pad(tokens, (0, out.record.shape[1] - 3 - tokens.shape[1]))
    out.record.copy_(torch.cat([widened, torch.stack([num_accepted, ending.num_emitted, ending.status], 1)], 1))


def _check(
    progress: RowProgress,
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    chosen: torch.Tensor,
    tree: DraftTree | None,
    allowed: torch.Tensor | None,
    out: RunOutputs,
) -> None:
    require("chosen", chosen, torch.int64, -1, -1)
    num_rows, num_nodes = chosen.shape
    require("rows", rows, torch.int32, num_rows)
    require("base_lengths", base_lengths, torch.int32, num_rows)
    require("tokens", out.tokens, torch.int64, num_rows, -1)
    width = out.tokens.shape[1]
    if (tree is None) != (allowed is None) or (tree is None and (num_nodes, width) != (1, 1)):
        raise ValueError(f"{num_nodes} nodes and runs of {width} tokens need a tree and the nodes allowed; a root alone has neither")
    if tree is not None and allowed is not None:
        require("tree tokens", tree.tokens, torch.int64, num_rows, num_nodes)
        require("tree parents", tree.parents, torch.int32, num_rows, num_nodes)
        require("allowed", allowed, torch.bool, num_rows, num_nodes)
    require("path", out.path, torch.int32, num_rows, width)
    require("extend_lens", out.extend_lens, torch.int32, num_rows)
    require("record", out.record, torch.int32, num_rows, -1)
    if out.record.shape[1] < width + 3:
        raise ValueError(f"a record of {out.record.shape[1]} columns has no room for {width} tokens and 3 counts")
    require("lengths", progress.lengths, torch.int32, -1)
    total = progress.lengths.shape[0]
    require("limits", progress.limits, torch.int32, total)
    require("verified_id", progress.verified_id, torch.int64, total)
    require("finished", progress.finished, torch.bool, total)
    require("slot_table", progress.slot_table, torch.int32, total, -1)
    require("stop_ids", progress.stop_ids, torch.int64, total, -1)


def commit_run(
    progress: RowProgress,
    rows: torch.Tensor,
    base_lengths: torch.Tensor,
    chosen: torch.Tensor,
    tree: DraftTree | None,
    allowed: torch.Tensor | None,
    out: RunOutputs,
) -> None:
    """Accept, cut and commit the runs of B rows; changes `progress` and fills `out`.

    rows int32 [B], live ones distinct, or the dummy row; base_lengths int32 [B]: known tokens before the run, less one; chosen
    int64 [B, N] of `choose_tokens`, -1 where no choice was possible; tree and allowed bool [B, N], both None for the root alone.
    """
    launch = commit_run_triton if rows.is_cuda else commit_run_reference
    launch(progress, rows, base_lengths, chosen, tree, allowed, out)
