"""One pass of the target and of the draft over a finished text: what every number of the run should have been.

The models' own layers, run in the plainest way: one sequence, its own cache, slots in order, the causal mask. No pages, no tables that are
permuted, no trees, no graphs, no batches, no state between steps. `by_rows` runs the answer one token at a time instead of all at once:
the distance of the two is how far the numbers of a token move with the number of rows they are computed with.
"""

from dataclasses import dataclass, replace

import torch

from eaglecli.kernels.attention_inputs import AttentionFunction, AttentionInputs
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.target import TargetModel


@dataclass(frozen=True, eq=False)
class Models:
    """What is verified: both models, and the attention function they run with."""

    target: TargetModel
    draft: DraftModel
    attend: AttentionFunction

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.target.embed_weight.device


@dataclass(frozen=True, eq=False)
class TextPass:
    """n tokens, the first `prompt_len` of them the prompt. True pair i of the draft is (token i + 1, feature i) at position i."""

    ids: torch.Tensor  # int64 [n]
    prompt_len: int
    logits: torch.Tensor  # [n - prompt_len, V] in the run's dtype: row j chose token prompt_len + j
    draft_cache: torch.Tensor  # [layers, 2, n - 1, nkv, hd] keys and values of the true pairs, slot i = pair i
    draft_logits: torch.Tensor  # [n - prompt_len, Vd] after pair prompt_len - 1 + j: what is drafted for token prompt_len + 1 + j
    draft_feedback: torch.Tensor  # [n - prompt_len, H] after the same pairs


def addressing(
    models: Models, slot_table: torch.Tensor, prefix_lens: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor, queries: int
) -> AttentionInputs:
    """`queries` tokens of each of B rows: slot_table int32 [B, C], prefix_lens int32 [B], positions and out_slots int32 [B * queries]."""
    count = slot_table.shape[0]
    return AttentionInputs(
        rows=torch.arange(count, dtype=torch.int32, device=models.device),
        query_start=torch.arange(count + 1, dtype=torch.int32, device=models.device) * queries,
        prefix_lens=prefix_lens,
        slot_table=slot_table,
        out_slots=out_slots,
        positions=positions,
        tail_mask=None,
        max_query_len=queries,
        max_prefix_len=slot_table.shape[1] - queries,
        attend=models.attend,
    )


@torch.inference_mode()
def pass_over_text(models: Models, ids: torch.Tensor, prompt_len: int, by_rows: bool = False) -> TextPass:
    """ids int64 [n] on the models' device, n > prompt_len."""
    target, draft, n = models.target, models.draft, len(ids)
    layer = target.config.layer
    cache = _empty_cache(models, target.config.num_layers, n, layer.num_kv_heads, layer.head_dim)
    outputs = []
    for start, end in _runs(n, prompt_len if by_rows else n):
        positions, inputs = _places(models, start, end)
        outputs.append(target.forward(ids[start:end], positions, cache, inputs, draft.tap_boundaries))
    chooses = slice(prompt_len - 1, n - 1)
    hidden = torch.cat([output.hidden for output in outputs])[chooses]
    features = torch.cat([output.features for output in outputs])
    draft_cache = _empty_cache(models, draft.num_layers, n - 1, draft.num_kv_heads, draft.head_dim)
    drafted = []
    for start, end in _runs(n - 1, max(prompt_len - 1, 1) if by_rows else n - 1):
        positions, inputs = _places(models, start, end)
        drafted.append(draft.forward(ids[start + 1 : end + 1], draft.fuse(features[start:end]), positions, draft_cache, inputs))
    head_input = torch.cat([output.head_input for output in drafted])[prompt_len - 1 :]
    step = 1 if by_rows else len(ids)
    return TextPass(
        ids=ids,
        prompt_len=prompt_len,
        logits=torch.cat([target.logits(rows) for rows in hidden.split(step)]),
        draft_cache=draft_cache,
        draft_logits=torch.cat([draft.logits(rows) for rows in head_input.split(step)]),
        draft_feedback=torch.cat([output.feedback for output in drafted])[prompt_len - 1 :],
    )


def with_room(text: TextPass, num_slots: int) -> TextPass:
    """The same with `num_slots` more slots in the draft's cache, behind those of the true pairs."""
    cache = text.draft_cache
    room = cache.new_zeros(*cache.shape[:2], num_slots, *cache.shape[3:])
    return replace(text, draft_cache=torch.cat([cache, room], 2).contiguous())


def _runs(length: int, first: int) -> list[tuple[int, int]]:
    """The first `first` tokens at once, the others one by one."""
    return [(0, first), *((start, start + 1) for start in range(first, length))]


def _places(models: Models, start: int, end: int) -> tuple[torch.Tensor, AttentionInputs]:
    """Positions start .. end of one sequence whose slots are its positions."""
    positions = torch.arange(end, dtype=torch.int32, device=models.device)
    own = positions[start:]
    return own, addressing(models, positions[None], torch.full_like(own[:1], start), own, own, end - start)


def _empty_cache(models: Models, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    return torch.zeros(num_layers, 2, num_slots, num_kv_heads, head_dim, dtype=models.target.dtype, device=models.device)
