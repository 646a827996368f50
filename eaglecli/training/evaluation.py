"""How good a draft is: accept length in the real engine, and how often it is right when it is told the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eaglecli.engine.request import Request, SamplingParams
from eaglecli.models.draft_loader import load_draft
from eaglecli.models.loader import LoadedTarget
from eaglecli.training.answer_engine import open_chain_engine
from eaglecli.training.documents import Document
from eaglecli.training.draft_module import DraftModule
from eaglecli.training.packing import make_batch, pack
from eaglecli.training.target_states import FrozenTarget
from eaglecli.training.trainer import run_draft


@dataclass(frozen=True)
class AcceptLength:
    """Greedy chains. `accept_length` = (accepted drafts + verify steps) / verify steps; by position: the share of steps accepting it."""

    accept_length: float
    by_position: tuple[float, ...]
    num_verify_steps: int


@dataclass(frozen=True)
class TeacherForced:
    """`accuracy` by unrolled step; `chain_length`: 1 + first choices in a row that are the target's, over all places of the text."""

    accuracy: tuple[float, ...]
    chain_length: float


def measure_accept_length(
    target: LoadedTarget, draft_dir: Path, prompts: Sequence[np.ndarray], end_ids: tuple[int, ...], max_new_tokens: int, num_steps: int
) -> AcceptLength:
    """Run the draft in `draft_dir` as users do: loaded from its files, greedy, a chain of `num_steps`."""
    context = min(target.model.context_length, max(map(len, prompts)) + max_new_tokens)
    model = target.model
    draft = load_draft(draft_dir, target, model.dtype, model.embed_weight.device, context)
    engine = open_chain_engine(model, draft.model, context, len(prompts), num_steps)
    caps = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    requests = [
        Request(number, prompt, SamplingParams(max_new_tokens=cap, stop_token_ids=end_ids))
        for number, (prompt, cap) in enumerate(zip(prompts, caps, strict=True))
        if cap > 0
    ]
    counts = np.concatenate([np.zeros(0, np.int16), *(completion.accept_counts for completion in engine.generate(requests))])
    num_steps_run = max(len(counts), 1)
    by_position = tuple(float((counts > position).sum() / num_steps_run) for position in range(num_steps))
    return AcceptLength(float(counts.sum() / num_steps_run + 1.0), by_position, len(counts))


@torch.no_grad()
def measure_teacher_forced(
    module: DraftModule,
    target: FrozenTarget,
    documents: Sequence[Document],
    token_ids: torch.Tensor,
    num_unroll_steps: int,
    sequence_length: int,
) -> TeacherForced:
    """Run every place of the documents' answers as the start of a chain, the text being known."""
    hits, drafted, chain_hits, num_starts = torch.zeros(num_unroll_steps), torch.zeros(num_unroll_steps), 0.0, 0.0
    for sequence in pack(documents, sequence_length):
        batch = make_batch(documents, [sequence], sequence_length, num_unroll_steps, token_ids.device)
        is_hit = run_draft(module, target, batch, token_ids, 1.0, batch.num_positions).is_hit
        hits += is_hit.sum(1).cpu()
        drafted += batch.is_drafted.sum(1).cpu()
        by_start = torch.zeros(num_unroll_steps, batch.num_positions, dtype=torch.int64, device=token_ids.device)
        for step in range(num_unroll_steps):
            reached = batch.is_drafted[step]
            by_start[step, batch.label_rows[reached] - step - 1] = is_hit[step, reached].long()
        chain_hits += float(by_start.cumprod(0).sum())
        num_starts += float(batch.is_drafted[0].sum())
    accuracy = tuple((hits / drafted.clamp(min=1)).tolist())
    return TeacherForced(accuracy, 1.0 + chain_hits / max(num_starts, 1.0))
