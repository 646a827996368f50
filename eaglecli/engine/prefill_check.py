"""Does a prefill compute the same by graph, padded, and beside poison? Random chunks of one size, run in all these ways.

    reference   the padded stage, eagerly
    graph       the captured graph: records, rows and cache slots equal, bit for bit
    poison      NaN in every cache slot that holds nothing yet, and NaN and huge numbers in rows and buffers nobody has: equal bit for bit
    unpadded    exactly as large as the chunks: the same first tokens in float32; in lower precision the difference is reported

Some chunks begin behind tokens that are in the cache already, some do not reach the end of their prompt, some end in the known output
of a sequence that begins again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from eaglecli.engine.check_tools import Agreement, Snapshot, differing, restore, spoil, write_random_rows
from eaglecli.engine.graph_runner import GraphRunner
from eaglecli.engine.iteration import named_tensors
from eaglecli.engine.prefill import PrefillStage
from eaglecli.engine.prefill_sizes import PrefillSize
from eaglecli.engine.request import Request, SamplingParams
from eaglecli.engine.row_state import HostHints, RowState
from eaglecli.engine.sequence import NOTHING_EMITTED, PrefillChunk, Sequence

_MOST_BEFORE = 16  # tokens of a prompt that are in the cache before its chunk begins
_MOST_BEHIND = 4  # tokens of a prompt that are left behind its chunk


@dataclass(frozen=True, eq=False)
class PrefillParts:
    """What of an engine the check runs and looks at."""

    stage: PrefillStage
    runner: GraphRunner[PrefillSize]
    state: RowState
    caches: Mapping[str, torch.Tensor]
    context_length: int
    vocab_size: int
    hints: HostHints  # those the graphs were captured for


@dataclass(frozen=True, kw_only=True)
class PrefillCheck(Agreement):
    """Of one batch of chunks. Padding is looked for in the first tokens and in the target's cache."""

    num_rows: int
    num_tokens: int
    size_rows: int  # rows run, padding included
    size_tokens: int


@dataclass(frozen=True, eq=False)
class RandomChunks:
    """Chunks, those that choose a token first, and where they live."""

    chunks: list[PrefillChunk]
    rows: torch.Tensor  # int64 [n]
    known_slots: torch.Tensor  # int64 slots of tokens before the chunks
    owned_slots: torch.Tensor  # int64 these and the slots of the chunks
    free_slots: torch.Tensor  # int64 at least one that nobody owns


@torch.inference_mode()
def check_prefill(parts: PrefillParts, size: PrefillSize, seed: int) -> PrefillCheck:
    """Check one size. The rows are left as they were found; the caches are not."""
    found = {name: tensor.clone() for name, tensor in named_tensors("state", parts.state).items()}
    try:
        return _Check(parts, size, seed).run()
    finally:
        restore(named_tensors("state", parts.state), found)


class _Check:
    """The ways to run one batch of chunks."""

    def __init__(self, parts: PrefillParts, size: PrefillSize, seed: int) -> None:
        self.parts, self.size = parts, size
        self.batch = _deal_chunks(parts, size, seed)
        self.num_choosing = sum(chunk.chooses_token for chunk in self.batch.chunks)
        self.start = {name: tensor.clone() for name, tensor in self._statics().items()}
        self.known = {name: cache[:, :, self.batch.known_slots] for name, cache in parts.caches.items()}

    def run(self) -> PrefillCheck:
        """Run them all."""
        stage, runner, chunks = self.parts.stage, self.parts.runner, self.batch.chunks
        reference = self._run(stage.run, self.size)
        graph_differs, run = None, stage.run
        if self.size in runner.captured_sizes:
            run = runner.run
            graph_differs = differing(reference, self._run(run, self.size))
        poison_differs = differing(reference, self._run(run, self.size, self._poison))
        exact = stage.exact_size_of(chunks)
        unpadded = self._run(stage.run, exact)
        cache_name = next(iter(self.parts.caches))
        return PrefillCheck(
            num_rows=len(chunks),
            num_tokens=exact.num_tokens,
            size_rows=self.size.num_rows,
            size_tokens=self.size.num_tokens,
            graph_differs=graph_differs,
            poison_differs=poison_differs,
            num_padding_differs=int((reference["record"][:, 0] != unpadded["record"][:, 0]).sum()),
            padding_difference=float((reference[cache_name].float() - unpadded[cache_name].float()).abs().max()),
        )

    def _run(self, run: Callable[[PrefillSize, HostHints], None], size: PrefillSize, poison: Callable[[], None] | None = None) -> Snapshot:
        restore(self._statics(), self.start)
        for name, cache in self.parts.caches.items():
            cache[:, :, self.batch.owned_slots] = 0
            cache[:, :, self.batch.free_slots] = 0
            cache[:, :, :1] = 0
            cache[:, :, self.batch.known_slots] = self.known[name]
        if poison is not None:
            poison()
        self.parts.stage.load(self.batch.chunks, size)
        run(size, self.parts.hints)
        outcome = {"record": self.parts.stage.host_record(self.num_choosing, self.parts.hints.any_logprobs).clone()}
        outcome |= {name: tensor[self.batch.rows] for name, tensor in named_tensors("state", self.parts.state).items()}
        return outcome | {name: cache[:, :, self.batch.owned_slots] for name, cache in self.parts.caches.items()}

    def _statics(self) -> Snapshot:
        return named_tensors("state", self.parts.state) | self.parts.stage.buffers

    def _poison(self) -> None:
        """Spoil all that must not be read: the caches but for known tokens, other rows, and all that the prefill is to write."""
        parts, batch = self.parts, self.batch
        for name, cache in parts.caches.items():
            for slots in (batch.owned_slots, batch.free_slots, slice(0, 1)):
                cache[:, :, slots] = torch.nan
            cache[:, :, batch.known_slots] = self.known[name]
        for tensor in parts.stage.buffers.values():
            spoil(tensor, slice(None))
        is_unused = torch.ones_like(parts.state.finished)
        is_unused[batch.rows] = False
        is_unused[parts.state.dummy_row] = False
        for name, tensor in named_tensors("state", parts.state).items():
            if name != "state.slot_table":
                spoil(tensor, is_unused)


def _deal_chunks(parts: PrefillParts, size: PrefillSize, seed: int) -> RandomChunks:
    """Chunks that fill the size, as far as caches and context allow, on random rows; random numbers in the slots before them."""
    state, random = parts.state, np.random.default_rng(seed)
    num_slots = next(iter(parts.caches.values())).shape[2]
    most_before, most_behind = min(_MOST_BEFORE, parts.context_length // 4), min(_MOST_BEHIND, parts.context_length // 4)
    count = min(size.num_rows, size.num_tokens, max(1, (num_slots - 2) // (most_before + 1)))
    longest = parts.context_length - most_before - most_behind
    total = min(size.num_tokens, num_slots - 2 - count * most_before, count * longest)
    lengths = np.minimum(1 + random.multinomial(total - count, random.dirichlet(np.ones(count))), longest)
    starts = random.integers(0, most_before + 1, count) * (random.random(count) < 0.5)
    behind = random.integers(0, most_behind + 1, count) * (random.random(count) < 0.5)
    resumes = (behind == 1) & (starts + lengths > 1)  # the one token behind is the last of its output
    ends = starts + lengths
    rows = random.permutation(state.dummy_row)[:count]
    slots = 1 + random.permutation(int(ends.sum()) + 1)
    table = np.zeros((count, state.slot_table.shape[1]), np.int32)
    known = []
    for index, (first, end) in enumerate(zip(np.cumsum(ends) - ends, ends, strict=True)):
        table[index, :end] = slots[first : first + end]
        known.append(table[index, : starts[index]])
    write_random_rows(state, parts.vocab_size, rows, table, np.zeros(count, np.int64), ends + behind + 2, random)
    device = state.lengths.device
    known_slots, owned_slots, free_slots = (
        torch.from_numpy(part.astype(np.int64)).to(device) for part in (np.concatenate(known), slots[:-1], slots[-1:])
    )
    generator = torch.Generator(device).manual_seed(seed)
    for cache in parts.caches.values():
        for layer in cache:
            values = torch.empty(2, len(known_slots), *cache.shape[3:], dtype=cache.dtype, device=device).normal_(generator=generator)
            layer[:, known_slots] = values
    chunks = []
    for row, start, end, num_behind, is_resumed in zip(*(part.tolist() for part in (rows, starts, ends, behind, resumes)), strict=True):
        known = random.integers(0, parts.vocab_size, end + num_behind).astype(np.int32)
        prompt_len = random.integers(1, end + 1) if is_resumed else len(known)
        request = Request(row, known[:prompt_len], SamplingParams(max_new_tokens=2))
        emitted = replace(NOTHING_EMITTED, token_ids=known[prompt_len:])
        chunks.append(PrefillChunk(Sequence(request, row=row, emitted=emitted), start, end))
    chunks.sort(key=lambda chunk: not chunk.chooses_token)
    return RandomChunks(chunks, torch.from_numpy(rows).to(device), known_slots, owned_slots, free_slots)
