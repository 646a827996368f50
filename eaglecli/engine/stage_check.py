"""Does an iteration compute the same by graph, padded, and beside poison? One batch of random rows, run in all these ways.

    reference   the padded stages, eagerly
    graph       the captured graphs, those for short rows too: every buffer, row and cache slot of the batch equal, bit for bit
    poison      NaN in every cache slot that holds no known token, in rows and buffers nobody has NaN and huge numbers, and
                unused columns of the slot table naming poisoned slots: equal to the reference bit for bit, poison untouched
    unpadded    the same rows at their own batch size: the same text in float32, as far as both have come (the draft may have decided
                a near-tie otherwise, which changes how many of its tokens are accepted); in lower precision the difference is
                reported, since products of another size are summed in another order

Rows are random: lengths, caps, samplings, cache contents. Half of them are dealt the target's own next token as first draft, so that
short and long accepted runs meet; several reach their cap. Two iterations, so that the second starts from what the first has left.
Only what belongs to rows that ran to the end is compared of the buffers: padding and finished rows all write to the one dummy slot,
in no fixed order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from eaglecli.engine.check_tools import HUGE, Agreement, Snapshot, differing, restore, spoil, write_random_rows
from eaglecli.engine.graph_runner import GraphRunner
from eaglecli.engine.iteration import Iteration, named_tensors
from eaglecli.engine.row_state import HostHints, RowState
from eaglecli.engine.settings import EngineSettings, SpeculationSettings

Stages = Sequence[Callable[[int, HostHints], None]]

_NUM_ITERATIONS = 2
_MAX_CACHE_SLOTS = 2048  # of all rows together, if that gives each of them enough: what is copied and compared stays small
_MAX_PROMPT_LEN = 256
_MIN_PROMPT_LEN = 4


@dataclass(frozen=True, eq=False)
class CheckedParts:
    """What of an engine the check runs and looks at."""

    iteration: Iteration
    runners: Sequence[GraphRunner]
    state: RowState
    caches: Mapping[str, torch.Tensor]
    settings: EngineSettings
    speculation: SpeculationSettings  # of the iteration
    hints: HostHints  # those the graphs were captured for


@dataclass(frozen=True, kw_only=True)
class StageCheck(Agreement):
    """Of one batch. Padding is looked for in the texts and in the first iteration's features at the roots."""

    num_requests: int
    size: int  # rows run, padding included
    num_accepted: int  # drafts, in both iterations: a check in which none is accepted proves little


@dataclass(frozen=True, eq=False)
class RandomBatch:
    """Rows, the slots that hold their known tokens, all slots that they own, and slots that nobody owns."""

    rows: np.ndarray  # int64 [n]
    known_slots: torch.Tensor  # int64
    owned_slots: torch.Tensor  # int64
    free_slots: torch.Tensor  # int64, at least one
    columns: torch.Tensor  # int64 [n] columns of the slot table in use


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one way leaves of the batch."""

    tensors: Snapshot  # buffers, rows and cache slots
    records: list[np.ndarray]  # of every iteration, see `commit_run.RunOutputs`
    root_features: torch.Tensor  # [n, F] of the first iteration


@torch.inference_mode()
def check_stages(parts: CheckedParts, num_requests: int, size: int, seed: int) -> StageCheck:
    """Check one batch; `size` is what it is padded to. The rows are left as they were found; the caches are not."""
    found = {name: tensor.clone() for name, tensor in named_tensors("state", parts.state).items()}
    try:
        return _Check(parts, num_requests, size, seed).run()
    finally:
        restore(named_tensors("state", parts.state), found)


class _Check:
    """The ways to run one batch."""

    def __init__(self, parts: CheckedParts, num_requests: int, size: int, seed: int) -> None:
        self.parts, self.size = parts, size
        self.eager = [runner.stage.run for runner in parts.runners]
        self.is_captured = all(size in runner.captured_sizes for runner in parts.runners)
        self.batch = _deal_rows(parts, num_requests, seed)
        self.max_length = int(parts.state.limits[torch.from_numpy(self.batch.rows)].max())
        self.hints = parts.hints if self.is_captured else replace(parts.hints, max_length=self.max_length)
        self.start = self._snapshot_all()
        self._deal_first_drafts()

    def run(self) -> StageCheck:
        """Run them all, keeping no more copies than two are compared."""
        stages = [runner.run for runner in self.parts.runners] if self.is_captured else self.eager
        graph_differs = self._compare_short_graphs(stages) if self.is_captured else None
        reference = self._run(self.eager, self.size, self.hints)
        if graph_differs is not None:
            graph_differs += differing(reference.tensors, self._run(stages, self.size, self.hints).tensors)
        poison_differs = differing(self._known(reference), self._known(self._run(stages, self.size, self.hints, self._poison)))
        poison_differs += self._find_touched_poison()
        unpadded = self._run(self.eager, len(self.batch.rows), self.hints)
        return StageCheck(
            num_requests=len(self.batch.rows),
            size=self.size,
            graph_differs=graph_differs,
            poison_differs=poison_differs,
            num_padding_differs=_count_differing_texts(reference.records, unpadded.records),
            padding_difference=float((reference.root_features.float() - unpadded.root_features.float()).abs().max()),
            num_accepted=int(sum(record[record[:, -2] > 0, -3].sum() for record in reference.records)),
        )

    def _compare_short_graphs(self, graphs: Stages) -> tuple[str, ...]:
        """What differs between the graphs for short rows and the stages run eagerly, for every bound that the rows keep to."""
        found = []
        for length in self.parts.runners[0].captured_lengths(self.size):
            if self.max_length <= length < self.hints.max_length:
                hints = replace(self.hints, max_length=length)
                expected = self._run(self.eager, self.size, hints)
                names = differing(expected.tensors, self._run(graphs, self.size, hints).tensors)
                found += [f"{name} of rows up to {length} tokens" for name in names]
        return tuple(found)

    def _run(self, stages: Stages, size: int, hints: HostHints, spoil: Callable[[], None] | None = None) -> Outcome:
        """All iterations from the start."""
        self._restore_all()
        self.parts.iteration.load_rows(self.batch.rows, size)
        if spoil is not None:
            spoil()
        count, run = len(self.batch.rows), self.parts.iteration.buffers.run
        records, root_features = [], []
        for _ in range(_NUM_ITERATIONS):
            for stage in stages:
                stage(size, hints)
            records.append(run.record[:count].cpu().numpy().copy())
            root_features.append(run.features[:count, 0].clone())
        return Outcome(self._copy_batch(), records, root_features[0])

    def _known(self, outcome: Outcome) -> Snapshot:
        """Of the cache slots only those of known tokens (in the draft's cache: of rows that go on). All others may hold anything."""
        table, lengths = outcome.tensors["state.slot_table"], outcome.tensors["state.lengths"]
        position_of = torch.zeros(int(self.batch.owned_slots.max()) + 1, dtype=torch.int64, device=table.device)
        position_of[self.batch.owned_slots] = torch.arange(len(self.batch.owned_slots), device=table.device)
        is_known = torch.arange(table.shape[1], device=table.device) < lengths[:, None]
        goes_on = ~outcome.tensors["state.finished"][:, None]
        known = dict(outcome.tensors)
        for index, name in enumerate(self.parts.caches):
            slots = table[is_known & goes_on if index else is_known].long()
            known[name] = outcome.tensors[name][:, :, position_of[slots]]
        return known

    def _copy_batch(self) -> Snapshot:
        """All that belongs to the batch."""
        count, rows = len(self.batch.rows), torch.from_numpy(self.batch.rows).to(self.parts.state.lengths.device)
        buffers = self.parts.iteration.buffers
        ran = buffers.live_rows[:count] != self.parts.state.dummy_row
        outcome = {name: tensor[:count][ran] for name, tensor in self._handed_on().items()}
        outcome |= {name: tensor[rows] for name, tensor in named_tensors("state", self.parts.state).items() if name != "state.slot_table"}
        width = int(self.batch.columns.max())
        table = self.parts.state.slot_table[rows, :width]
        is_used = torch.arange(width, device=table.device) < self.batch.columns[:, None]
        outcome["state.slot_table"] = torch.where(is_used, table, 0)
        return outcome | {name: cache[:, :, self.batch.owned_slots] for name, cache in self.parts.caches.items()}

    def _snapshot_all(self) -> Snapshot:
        start = {name: tensor.clone() for name, tensor in self._statics().items()}
        return start | {name: cache[:, :, self.batch.owned_slots] for name, cache in self.parts.caches.items()}

    def _restore_all(self) -> None:
        restore(self._statics(), self.start)
        for name, cache in self.parts.caches.items():
            cache[:, :, self.batch.free_slots] = 0
            cache[:, :, :1] = 0
            cache[:, :, self.batch.owned_slots] = self.start[name]

    def _statics(self) -> Snapshot:
        return named_tensors("state", self.parts.state) | self._handed_on()

    def _handed_on(self) -> Snapshot:
        """The buffers from stage to stage."""
        buffers = self.parts.iteration.buffers
        return named_tensors("tree", buffers.tree) | named_tensors("run", buffers.run)

    def _deal_first_drafts(self) -> None:
        """Make the target's own next token the first draft of every other row."""
        if not self.parts.speculation.num_steps:
            return
        self._restore_all()
        self.parts.iteration.load_rows(self.batch.rows, self.size)
        for stage in self.eager[:2]:
            stage(self.size, self.hints)
        rows = torch.from_numpy(self.batch.rows[::2]).to(self.parts.state.lengths.device)
        next_token = self.parts.iteration.buffers.run.tokens[: len(self.batch.rows) : 2, 0]
        self.start["state.draft_token"][rows, 0] = next_token
        self.start["state.draft_log_q"][rows, 0] = 0.0

    def _poison(self) -> None:
        """Spoil all that must not be read."""
        parts, batch, device = self.parts, self.batch, self.parts.state.lengths.device
        is_unknown = torch.ones(int(batch.owned_slots.max()) + 1, dtype=torch.bool, device=device)
        is_unknown[batch.known_slots] = False
        tail_slots = batch.owned_slots[is_unknown[batch.owned_slots]]
        for cache in parts.caches.values():
            cache[:, :, batch.free_slots] = torch.nan
            cache[:, :, tail_slots] = torch.nan
            cache[:, :, :1] = torch.nan
        for tensor in self._handed_on().values():
            spoil(tensor, slice(self.size, None))
        parts.iteration.buffers.rows[self.size :] = HUGE
        is_unused = torch.ones_like(parts.state.finished)
        is_unused[[*batch.rows.tolist(), parts.state.dummy_row]] = False
        for name, tensor in named_tensors("state", parts.state).items():
            if name != "state.slot_table":
                spoil(tensor, is_unused)
        width = parts.state.slot_table.shape[1]
        rows = torch.from_numpy(batch.rows).to(device)
        is_beyond = torch.arange(width, device=device) >= batch.columns[:, None]
        parts.state.slot_table[rows] = torch.where(is_beyond, batch.free_slots[-1].int(), parts.state.slot_table[rows])

    def _find_touched_poison(self) -> tuple[str, ...]:
        """Caches of which a slot that nobody owns was written."""
        free = self.batch.free_slots
        return tuple(f"unowned slots of {name}" for name, cache in self.parts.caches.items() if not bool(cache[:, :, free].isnan().all()))


def _deal_rows(parts: CheckedParts, num_requests: int, seed: int) -> RandomBatch:
    """Write `num_requests` random rows to the state, and random numbers to the cache slots of their known tokens."""
    state, settings = parts.state, parts.settings
    random = np.random.default_rng(seed)
    device, lookahead, run_width = state.lengths.device, settings.lookahead, settings.run_width
    num_slots = next(iter(parts.caches.values())).shape[2]
    room = min(max(_MAX_CACHE_SLOTS, num_requests * (lookahead + 2 * run_width + _MIN_PROMPT_LEN)), num_slots - 2)
    row_slots = min(room // num_requests, settings.context_length + lookahead, _MAX_PROMPT_LEN + lookahead)
    max_limit = row_slots - lookahead
    if max_limit < 2:
        raise ValueError(f"{num_slots} cache slots are too few to check {num_requests} requests")
    rows = random.permutation(state.dummy_row)[:num_requests]
    limits = random.integers(2, max_limit + 1, num_requests)
    limits[0] = max_limit
    lengths = np.maximum(limits - 1 - random.integers(1, 3 * run_width + 1, num_requests), 0)
    columns = limits + lookahead
    slots = 1 + random.permutation(int(columns.sum()) + 1)
    table = np.zeros((num_requests, state.slot_table.shape[1]), np.int32)
    starts = np.concatenate([[0], np.cumsum(columns)])
    for index, (start, count) in enumerate(zip(starts, columns, strict=False)):
        table[index, :count] = slots[start : start + count]
    known = np.concatenate([table[index, :length] for index, length in enumerate(lengths)])
    known_slots, owned_slots, free_slots = (torch.from_numpy(part.astype(np.int64)).to(device) for part in (known, slots[:-1], slots[-1:]))
    generator = torch.Generator(device).manual_seed(seed)
    for cache in parts.caches.values():
        cache[:, :, : len(slots) + 1] = 0
        for layer in cache:  # a layer at a time: normal_ of a gather of all would be a copy of all
            values = torch.empty(2, len(known), *cache.shape[3:], dtype=cache.dtype, device=device).normal_(generator=generator)
            layer[:, known_slots] = values
    write_random_rows(state, parts.iteration.vocab_size, rows, table, lengths, limits, random)
    state.draft_hidden[torch.from_numpy(rows).to(device)] = torch.empty(
        num_requests, state.draft_hidden.shape[1], dtype=state.draft_hidden.dtype, device=device
    ).normal_(generator=generator)
    return RandomBatch(rows, known_slots, owned_slots, free_slots, torch.from_numpy(columns).to(device))


def _count_differing_texts(expected: list[np.ndarray], found: list[np.ndarray]) -> int:
    """Rows whose emitted tokens are not the same as far as both go."""
    return sum(
        any(ours != theirs for ours, theirs in zip(_text(expected, row), _text(found, row), strict=False))
        for row in range(len(expected[0]))
    )


def _text(records: list[np.ndarray], row: int) -> list[int]:
    return [token for record in records for token in record[row, : record[row, -2]].tolist()]
