"""Stage prefill: prompt chunks through the target, then through the draft, shifted by one token.

At the end of a chunk that is not the prompt's last, the draft sees the prompt's next token; at the end of the prompt it
sees the token the target has just chosen (row B19 of the known failures). A preempted sequence that begins again has a prompt
of all it knows but its last token: that one is not chosen, it is the next token of the last.
"""

from dataclasses import dataclass

import numpy as np
import torch

from eaglecli.engine.draft import EagleDrafter, RootOnlyDrafter
from eaglecli.engine.row_state import Batch, HostHints, RowState, write_resumed
from eaglecli.engine.sequence import PrefillChunk
from eaglecli.engine.staging import to_device
from eaglecli.engine.token_choice import adjusted_logits, count_output, record_logprobs
from eaglecli.kernels.attention_inputs import AttentionInputs
from eaglecli.kernels.choose_tokens import choose_tokens
from eaglecli.kernels.commit_run import commit_run, empty_outputs
from eaglecli.models.target import TargetModel

Drafter = EagleDrafter | RootOnlyDrafter


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """Packed chunks: T tokens of B rows. `ends_prompt` names those whose prompt ends here and whose first token is chosen."""

    rows: torch.Tensor  # int32 [B]
    input_ids: torch.Tensor  # int64 [T]
    next_ids: torch.Tensor  # int64 [T] the next token that is known; 0 after the last
    attention: AttentionInputs
    last_index: torch.Tensor  # int64 [B] packed index of each chunk's last token
    ends_prompt: torch.Tensor  # int64 [E] which of the B chunks end their prompt
    prompt_lens: torch.Tensor  # int32 [E]


def pack_chunks(chunks: list[PrefillChunk], state: RowState) -> PrefillBatch:
    """Build the packed inputs on the host and copy them in one go."""
    prompts = [chunk.sequence.known_ids for chunk in chunks]
    sizes = np.array([chunk.end - chunk.start for chunk in chunks])
    ends = np.array([i for i, chunk in enumerate(chunks) if chunk.chooses_token], np.int64)
    ids = np.concatenate([prompt[chunk.start : chunk.end] for chunk, prompt in zip(chunks, prompts, strict=True)])
    following = np.concatenate(
        [np.append(prompt, 0)[chunk.start + 1 : chunk.end + 1] for chunk, prompt in zip(chunks, prompts, strict=True)]
    )
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    row_of_token = np.repeat([chunk.sequence.row for chunk in chunks], sizes)
    per_token = to_device(np.stack([ids, following, positions, row_of_token]).astype(np.int64), state.lengths.device)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    per_chunk = np.stack(
        [[chunk.sequence.row for chunk in chunks], [chunk.start for chunk in chunks], starts[1:], [len(prompt) for prompt in prompts]]
    )
    per_chunk_d = to_device(np.concatenate([per_chunk.astype(np.int64).reshape(-1), ends]), state.lengths.device)
    rows, prefix_lens, query_end, prompt_lens = per_chunk_d[: 4 * len(chunks)].view(4, -1).int()
    ends_d = per_chunk_d[4 * len(chunks) :]
    token_positions = per_token[2].int()
    return PrefillBatch(
        rows=rows,
        input_ids=per_token[0],
        next_ids=per_token[1],
        attention=AttentionInputs(
            rows=rows,
            query_start=torch.cat([query_end.new_zeros(1), query_end]),
            prefix_lens=prefix_lens,
            slot_table=state.slot_table,
            out_slots=state.slot_table[per_token[3], per_token[2]],
            positions=token_positions,
            tail_mask=None,
            max_query_len=int(sizes.max()),
            max_prefix_len=max(chunk.start for chunk in chunks),
            attend=state.attend,
        ),
        last_index=(query_end - 1).long(),
        ends_prompt=ends_d,
        prompt_lens=prompt_lens[ends_d],
    )


class PrefillStage:
    """Runs packed chunks; returns the record of the rows whose first token came out."""

    def __init__(
        self, target: TargetModel, kv_cache: torch.Tensor, drafter: Drafter, state: RowState, run_width: int, logprob_width: int
    ) -> None:
        self._target = target
        self._kv_cache = kv_cache
        self._drafter = drafter
        self._state = state
        self._run_width = run_width
        self._logprob_width = logprob_width

    def run(self, chunks: list[PrefillChunk], hints: HostHints) -> torch.Tensor:
        """int32 [E, run_width + 3], after the log-probabilities if hints.any_logprobs: see `readback.StepResult`.

        One row for each chunk that ends its prompt, in order.
        """
        packed = pack_chunks(chunks, self._state)
        output = self._target.forward(
            packed.input_ids, packed.attention.positions, self._kv_cache, packed.attention, self._drafter.tap_boundaries
        )
        finishing = Batch(packed.rows[packed.ends_prompt], hints)
        last = packed.last_index[packed.ends_prompt]
        record = self._choose_first(finishing, output.hidden[last], packed.prompt_lens)
        next_ids = packed.next_ids.index_copy(0, last, self._state.verified_id[finishing.rows])
        resumed = [chunk.sequence for chunk in chunks if chunk.is_last and chunk.sequence.is_resumed]
        if resumed:
            write_resumed(self._state, resumed)
        everyone = Batch(packed.rows, hints)
        self._drafter.extend_prompt(everyone, packed.attention, next_ids, output.features, packed.last_index)
        return record

    def _choose_first(self, finishing: Batch, hidden: torch.Tensor, prompt_lens: torch.Tensor) -> torch.Tensor:
        """Choose the first token of the output from the prompt's last logits and commit it."""
        state = self._state
        logits = self._target.logits(hidden)
        scores = adjusted_logits(state, finishing, logits, prompt_lens, None)
        token = choose_tokens(scores, state.sampling(finishing, 1), prompt_lens)
        outputs = empty_outputs(len(finishing), 0, self._run_width, token.device)
        commit_run(state.progress, finishing.rows, prompt_lens - 1, token[:, None], None, None, outputs)
        count_output(state, finishing, outputs.record)
        if not finishing.hints.any_logprobs:
            return outputs.record
        logprobs = torch.empty(len(finishing), self._logprob_width, dtype=torch.int32, device=token.device)
        record_logprobs(state, finishing, logits, outputs, logprobs)
        return torch.cat([logprobs, outputs.record], dim=1)
