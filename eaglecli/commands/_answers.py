"""From what the engine completed to the answer of a record: one turn as it is, several turns added up."""

from collections.abc import Sequence

import numpy as np

from eaglecli.engine.request import Completion
from eaglecli.io.accept_statistics import AnswerCounts
from eaglecli.io.logprob_fields import AnswerLogprobs
from eaglecli.io.results import Answer, TurnAnswer


def build_answer(completions: Sequence[Completion], end_token_ids: tuple[int, ...]) -> Answer:
    """The answer of the turns of one record, in order. Tokens and counts are of all turns; text, ending and seed of the last."""
    last = completions[-1]
    token_ids = last.output_ids if len(completions) == 1 else np.concatenate([turn.output_ids for turn in completions])
    return Answer(
        key=last.request.key,  # type: ignore[arg-type]
        token_ids=token_ids,
        finish_reason=last.finish_reason,  # type: ignore[arg-type]
        stop_reason=last.stop_reason,
        num_prompt_tokens=sum(len(turn.request.prompt_ids) for turn in completions),
        counts=counts_of(completions, end_token_ids),
        seed=last.request.sampling.seed,
        sample=last.request.sample,
        queue_s=sum(turn.queue_s for turn in completions),
        ttft_s=completions[0].ttft_s,
        e2e_s=sum(turn.e2e_s for turn in completions),
        turns=() if len(completions) == 1 else tuple(map(_turn_of, completions)),
        logprobs=_logprobs_of(completions),
    )


def _logprobs_of(completions: Sequence[Completion]) -> AnswerLogprobs | None:
    given = [turn.logprobs for turn in completions if turn.logprobs is not None]
    if not given:
        return None
    return AnswerLogprobs(*(np.concatenate([getattr(turn, name) for turn in given]) for name in ("chosen", "top_ids", "top_values")))


def _turn_of(turn: Completion) -> TurnAnswer:
    return TurnAnswer(turn.output_ids, turn.finish_reason, turn.stop_reason, len(turn.request.prompt_ids))  # type: ignore[arg-type]


def counts_of(completions: Sequence[Completion], end_token_ids: tuple[int, ...]) -> AnswerCounts:
    """Of several turns each may hold an end token: then no first one is named, and all steps count."""
    ends = np.flatnonzero(np.isin(completions[0].output_ids, end_token_ids)) if len(completions) == 1 else ()
    return AnswerCounts(
        num_completion_tokens=sum(len(turn.output_ids) for turn in completions),
        num_verify_steps=sum(turn.num_verify_steps for turn in completions),
        num_accepted_drafts=sum(turn.num_accepted_drafts for turn in completions),
        num_proposed_drafts=sum(turn.num_proposed_drafts for turn in completions),
        num_cut_tokens=sum(turn.num_cut_tokens for turn in completions),
        accept_counts=np.concatenate([turn.accept_counts for turn in completions]),
        first_end_position=int(ends[0]) if len(ends) else None,
        num_turns=len(completions),
    )
