"""What is known of every running request, on the device, at a fixed row number.

A batch is an int32 vector of row numbers. The last row is the *dummy row*: it never changes, owns only the dummy slot
and counts as finished. Padding names it, and a finished row is replaced by it before every stage, so neither can write
anywhere but to the dummy slot. Nothing is compacted when requests finish.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from eaglecli.engine.logit_adjustments import write_adjustments
from eaglecli.engine.pages import PagePool
from eaglecli.engine.scheduler import Growth
from eaglecli.engine.sequence import Sequence
from eaglecli.engine.settings import PLAIN, EngineSettings
from eaglecli.engine.staging import to_device
from eaglecli.kernels.adjust_logits import AdjustmentTensors
from eaglecli.kernels.attention_inputs import AttentionFunction, QkvAttentionFunction
from eaglecli.kernels.choose_tokens import SamplingTensors
from eaglecli.kernels.commit_run import RowProgress
from eaglecli.kernels.draft_topk import DraftCandidates


@dataclass(frozen=True)
class HostHints:
    """Bounds that the host knows and the device need not be asked for. A captured graph is made for the widest ones."""

    max_length: int  # no row has more committed tokens
    any_sampled: bool
    any_filtered: bool
    any_adjusted: bool = False  # penalties, bias or a least length
    any_logprobs: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that run together: `rows` int32 [B], finished rows already replaced by the dummy row."""

    rows: torch.Tensor
    hints: HostHints

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class RowState:
    """Device tensors of R rows, the dummy row included. C columns in the slot table, K branches, H draft hidden size."""

    context_length: int  # positions end before it: rotary tables are as long
    attend: AttentionFunction  # how keys are read through the slot table: of the backend chosen at the start
    attend_qkv: QkvAttentionFunction | None  # the same with rotary embedding and store, if the backend can
    lengths: torch.Tensor  # int32 [R] tokens whose target KV exists
    limits: torch.Tensor  # int32 [R] tokens the row may ever know: prompt and output cap
    verified_id: torch.Tensor  # int64 [R] the last known token, which has no KV yet
    finished: torch.Tensor  # bool [R]
    slot_table: torch.Tensor  # int32 [R, C] the row's slots in token order, then the dummy slot
    stop_ids: torch.Tensor  # int64 [R, max_stop_ids] padded with -1
    temperature: torch.Tensor  # float32 [R]
    top_k: torch.Tensor  # int32 [R]
    top_p: torch.Tensor  # float32 [R]
    min_p: torch.Tensor  # float32 [R]
    seed: torch.Tensor  # int64 [R]
    sample: torch.Tensor  # int32 [R]
    draft_start: torch.Tensor | None  # int32 [R] the draft's cache begins there, see `backlog`; None: at 0, always
    draft_hidden: torch.Tensor  # [R, H] left by the last extend: what the draft's next step starts from
    draft_log_q: torch.Tensor  # float32 [R, K] and its best tokens; a tree of fewer branches takes the first ones
    draft_token: torch.Tensor  # int64 [R, K]
    adjustments: AdjustmentTensors | None  # None: no request may ask for any
    wants_logprobs: torch.Tensor | None  # bool [R]; None: no request may want them

    @property
    def dummy_row(self) -> int:
        """The last row, which padding names."""
        return self.lengths.shape[0] - 1

    @property
    def progress(self) -> RowProgress:
        """What a commit reads and changes."""
        return RowProgress(self.lengths, self.limits, self.verified_id, self.finished, self.slot_table, self.stop_ids)

    @property
    def candidates(self) -> DraftCandidates:
        """Level 0 of every row's next tree."""
        return DraftCandidates(self.draft_log_q, self.draft_token)

    def sampling(self, batch: Batch, repeats: int) -> SamplingTensors:
        """Sampling settings of the batch, each row `repeats` times in a row. Launches nothing: kernels look the settings up."""
        return SamplingTensors(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            sample=self.sample,
            rows=batch.rows,
            repeats=repeats,
            any_sampled=batch.hints.any_sampled,
            any_filtered=batch.hints.any_filtered,
        )

    def owned_slots(self, sequence: Sequence, pool: PagePool) -> None:
        """Prove that a row is a permutation of the slots of its pages. Reads the device; raises AssertionError."""
        owned = sorted(slots_of(sequence.pages, pool.page_size).tolist())
        row = self.slot_table[sequence.row].tolist()
        assert sorted(row[: len(owned)]) == owned, f"row {sequence.row} lost a slot"
        assert not any(row[len(owned) :]), f"row {sequence.row} holds slots past its pages"


def allocate_row_state(
    settings: EngineSettings,
    draft_hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    attend: AttentionFunction,
    attend_qkv: QkvAttentionFunction | None,
    adjustments: AdjustmentTensors | None = None,
) -> RowState:
    """Empty rows: all finished, all slots the dummy slot."""
    num_rows = settings.max_running_requests + 1

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return RowState(
        context_length=settings.context_length,
        attend=attend,
        attend_qkv=attend_qkv,
        lengths=zeros(dtype=torch.int32),
        limits=zeros(dtype=torch.int32),
        verified_id=zeros(dtype=torch.int64),
        finished=~zeros(dtype=torch.bool),
        slot_table=zeros(settings.row_capacity, dtype=torch.int32),
        stop_ids=zeros(settings.max_stop_ids, dtype=torch.int64) - 1,
        temperature=zeros(dtype=torch.float32),
        top_k=zeros(dtype=torch.int32) - 1,
        top_p=zeros(dtype=torch.float32) + 1,
        min_p=zeros(dtype=torch.float32),
        seed=zeros(dtype=torch.int64),
        sample=zeros(dtype=torch.int32),
        draft_start=zeros(dtype=torch.int32) if pauses(settings) and draft_hidden_size else None,
        draft_hidden=zeros(draft_hidden_size, dtype=dtype),
        draft_log_q=zeros(settings.num_candidates, dtype=torch.float32),
        draft_token=zeros(settings.num_candidates, dtype=torch.int64),
        adjustments=adjustments,
        wants_logprobs=None if settings.max_logprobs is None else zeros(dtype=torch.bool),
    )


def pauses(settings: EngineSettings) -> bool:
    """Whether rows may go on without the draft for a while."""
    return len(settings.all_speculation) > 1 and PLAIN in settings.all_speculation


def slots_of(pages: Rows[int], page_size: int) -> np.ndarray:
    """int32: the slots of the pages, in order."""
    return (np.asarray(pages, np.int32)[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)


def write_admitted(state: RowState, admitted: list[Sequence], page_size: int) -> None:
    """Set the rows of newly admitted requests, whose prompts are not in the cache yet: one copy, whatever their number."""
    num_stop_ids, most_pages = state.stop_ids.shape[1], max(len(sequence.pages) for sequence in admitted)
    samplings = [sequence.request.sampling for sequence in admitted]
    floats = np.array([(sampling.temperature, sampling.top_p, sampling.min_p) for sampling in samplings], np.float32)
    integers = [
        (sequence.row, sequence.limit, sampling.top_k, sampling.seed, sequence.request.sample, len(sequence.pages) * page_size)
        for sequence, sampling in zip(admitted, samplings, strict=True)
    ]
    stop_ids = [(*sampling.stop_token_ids, *[-1] * (num_stop_ids - len(sampling.stop_token_ids))) for sampling in samplings]
    pages = [(*sequence.pages, *[0] * (most_pages - len(sequence.pages))) for sequence in admitted]
    numbers = np.hstack([np.array(part, np.int64) for part in (floats.view(np.int32), integers, stop_ids, pages)])
    device = state.lengths.device
    floats_d, integers_d, stop_ids_d, pages_d = to_device(numbers, device).split((3, 6, num_stop_ids, most_pages), dim=1)
    rows, limits, top_k, seed, sample, num_slots = integers_d.unbind(1)
    slots = (pages_d[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)
    slots = torch.where(torch.arange(slots.shape[1], device=device) < num_slots[:, None], slots, 0)
    num_columns = state.slot_table.shape[1]
    state.slot_table[rows] = functional.pad(slots, (0, num_columns - slots.shape[1])).int()  # cut where the pages reach past the columns
    state.limits[rows] = limits.int()
    state.top_k[rows] = top_k.int()
    state.seed[rows] = seed
    state.sample[rows] = sample.int()
    state.stop_ids[rows] = stop_ids_d
    state.temperature[rows], state.top_p[rows], state.min_p[rows] = floats_d.int().view(torch.float32).unbind(1)
    state.lengths.index_fill_(0, rows, 0)  # assigning a number through an index waits for the device
    if state.draft_start is not None:
        state.draft_start.index_fill_(0, rows, 0)
    if state.adjustments is not None:
        write_adjustments(state.adjustments, admitted)
    if state.wants_logprobs is not None:
        state.wants_logprobs[rows] = to_device(np.array([s.request.sampling.logprobs is not None for s in admitted]), device)


def write_growths(state: RowState, growths: Rows[Growth], page_size: int) -> None:
    """Put pages that rows got behind those that they had, one copy for all. Whatever is in flight looks at no column so far out."""
    slots = [slots_of(growth.pages, page_size) for growth in growths]
    starts = [growth.num_before * page_size for growth in growths]
    columns = [np.arange(start, start + len(row_slots)) for start, row_slots in zip(starts, slots, strict=True)]
    rows = np.repeat([growth.sequence.row for growth in growths], [len(row_slots) for row_slots in slots])
    places = np.stack([rows, np.concatenate(columns), np.concatenate(slots)]).astype(np.int64)
    rows_d, columns_d, slots_d = to_device(places, state.lengths.device)
    state.slot_table[rows_d, columns_d] = slots_d.int()


def write_resumed(state: RowState, resumed: Rows[Sequence]) -> None:
    """Let rows go on whose known tokens but the last are in the cache, as if they had just committed the last one."""
    known = np.array([[sequence.row, sequence.num_to_prefill, sequence.emitted.token_ids[-1]] for sequence in resumed], np.int64)
    rows, lengths, last = to_device(known, state.lengths.device).unbind(1)
    state.lengths[rows] = lengths.int()
    state.verified_id[rows] = last
    state.finished[rows] = torch.zeros_like(rows, dtype=torch.bool)
