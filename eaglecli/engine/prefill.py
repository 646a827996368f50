"""Stage prefill: prompt chunks through the target, then through the draft, shifted by one token.

At the end of a chunk that is not the prompt's last, the draft sees the prompt's next token; at the end of the prompt it
sees the token the target has just chosen (row B19 of the known failures). A preempted sequence that begins again has a prompt
of all it knows but its last token: that one is not chosen, it is the next token of the last.

The stage is a function of a `PrefillSize` over buffers that never move, so that a graph can capture it. Without graph sizes it runs
eagerly, exactly as large as its chunks.
"""

from collections.abc import Sequence

import torch

from eaglecli.engine.draft import EagleDrafter, RootOnlyDrafter
from eaglecli.engine.iteration import first_rows, named_tensors
from eaglecli.engine.prefill_inputs import PrefillBatch, buffer_len, load_chunks, view_batch
from eaglecli.engine.prefill_sizes import PrefillSize, exact_size, padded_size, smallest_that_holds
from eaglecli.engine.readback import host_record
from eaglecli.engine.row_state import Batch, HostHints, RowState, write_resumed
from eaglecli.engine.sequence import PrefillChunk
from eaglecli.engine.settings import EngineSettings
from eaglecli.engine.token_choice import adjusted_logits, count_output, record_logprobs
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.choose_tokens import choose_tokens
from eaglecli.kernels.commit_run import commit_run, empty_outputs
from eaglecli.models.target import TargetModel

Drafter = EagleDrafter | RootOnlyDrafter


class PrefillStage:
    """`size_of` chunks says how large they run, `load` fills the buffers with them, `run` computes that much of the buffers."""

    name = "prefill"

    def __init__(
        self,
        target: TargetModel,
        kv_cache: torch.Tensor,
        drafter: Drafter,
        state: RowState,
        settings: EngineSettings,
        graph_sizes: Sequence[PrefillSize],
        logprob_width: int,
    ) -> None:
        """`graph_sizes`, the cheapest first, are what prefills are padded to; none of them: no padding."""
        self.graph_sizes = tuple(graph_sizes)
        self._target = target
        self._kv_cache = kv_cache
        self._drafter = drafter
        self._state = state
        most_rows, device = settings.max_running_requests, state.lengths.device
        largest = padded_size(settings.chunked_prefill_size, most_rows)
        self._inputs = torch.zeros(buffer_len([largest, *graph_sizes]), dtype=torch.int32, device=device)
        self._outputs = empty_outputs(most_rows, 0, settings.run_width, device)
        self._logprobs = torch.zeros(most_rows, logprob_width, dtype=torch.int32, device=device)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Tensors that graphs rely on, by name."""
        own = {"the prefill's inputs": self._inputs, "the prefill's log-probabilities": self._logprobs}
        return own | named_tensors("the prefill's outputs", self._outputs)

    def extent(self, size: PrefillSize) -> tuple[int, int]:
        """Requests and tokens of a size."""
        return size.num_rows, size.num_tokens

    def size_of(self, chunks: Sequence[PrefillChunk]) -> PrefillSize:
        """The size that these chunks run at: a graph size that holds them, else their own."""
        exact = self.exact_size_of(chunks)
        return smallest_that_holds(self.graph_sizes, exact.num_tokens, exact.num_rows) or exact

    def exact_size_of(self, chunks: Sequence[PrefillChunk]) -> PrefillSize:
        """Without any padding."""
        return exact_size([chunk.end - chunk.start for chunk in chunks])

    def load(self, chunks: Sequence[PrefillChunk], size: PrefillSize) -> None:
        """Fill the buffers with chunks, those that choose a token first, and let rows that begin again stand where they were."""
        load_chunks(self._inputs, chunks, size, self._state.dummy_row)
        resumed = [chunk.sequence for chunk in chunks if chunk.is_last and chunk.sequence.is_resumed]
        if resumed:
            write_resumed(self._state, resumed)

    def load_padding(self, size: PrefillSize) -> None:
        """Fill the buffers with nothing but padding."""
        load_chunks(self._inputs, [], size, self._state.dummy_row)

    def run(self, size: PrefillSize, hints: HostHints) -> None:
        """Run what was loaded. `hints.max_length`: no segment has a longer prefix."""
        packed = view_batch(self._inputs, size)
        attention = self._attention(packed, size, hints)
        output = self._target.forward(packed.input_ids.long(), packed.positions, self._kv_cache, attention, self._drafter.tap_boundaries)
        last_index = packed.last_index.long()
        self._choose_first(Batch(packed.choosing_rows, hints), output.hidden[last_index], packed.num_known)
        chosen = self._state.verified_id[packed.token_rows]
        next_ids = torch.where(packed.next_ids < 0, chosen, packed.next_ids.long())
        self._drafter.extend_prompt(Batch(packed.rows, hints), attention, next_ids, output.features, last_index)

    def host_record(self, num_choosing: int, with_logprobs: bool) -> torch.Tensor:
        """int32 [num_choosing, run_width + 3], after the log-probabilities if wanted: see `readback.StepResult`."""
        return host_record(self._outputs.record, self._logprobs, num_choosing, with_logprobs)

    def _attention(self, packed: PrefillBatch, size: PrefillSize, hints: HostHints) -> AttentionInputs:
        state = self._state
        return AttentionInputs(
            rows=packed.segment_rows,
            query_start=packed.segment_start,
            prefix_lens=packed.prefix_lens,
            slot_table=state.slot_table,
            out_slots=state.slot_table[packed.token_rows, packed.positions],
            positions=packed.positions,
            tail_mask=None,
            max_query_len=size.segment_len,
            max_prefix_len=hints.max_length,
            attend=state.attend,
        )

    def _choose_first(self, batch: Batch, hidden: torch.Tensor, num_known: torch.Tensor) -> None:
        """Choose the first token of the output from the prompt's last logits and commit it."""
        state, count = self._state, len(batch)
        logits = self._target.logits(hidden)
        scores = adjusted_logits(state, batch, logits, num_known, None)
        token = choose_tokens(scores, state.sampling(batch, 1), num_known)
        outputs = first_rows(self._outputs, count)
        commit_run(state.progress, batch.rows, num_known - 1, token[:, None], None, None, outputs)
        count_output(state, batch, outputs.record)
        record_logprobs(state, batch, logits, outputs, self._logprobs[:count])
