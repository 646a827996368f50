"""From what the engine completed to the answer of a record: one turn as it is, several turns added up."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eaglecli.engine.request import Completion
from eaglecli.io.accept_statistics import AnswerCounts
from eaglecli.io.logprob_fields import AnswerLogprobs
from eaglecli.io.result_lines import Answer, TurnAnswer


def build_answer(completions: Sequence[Completion], counts: AnswerCounts | None) -> Answer:
    """The answer of the turns of one record, in order. Tokens and `counts` are of all turns; text, ending and seed of the last."""
    last = completions[-1]
    token_ids = last.output_ids if len(completions) == 1 else np.concatenate([turn.output_ids for turn in completions])
    return Answer(
        key=last.request.key,  # type: ignore[arg-type]
        token_ids=token_ids,
        finish_reason=last.finish_reason,  # type: ignore[arg-type]
        stop_reason=last.stop_reason,
        num_prompt_tokens=sum([len(turn.request.prompt_ids) for turn in completions]),
        counts=counts,
        seed=last.request.sampling.seed,
        sample=last.request.sample,
        queue_s=sum([turn.queue_s for turn in completions]),
        ttft_s=completions[0].ttft_s,
        e2e_s=sum([turn.e2e_s for turn in completions]),
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
    if len(completions) == 1:
        (turn,) = completions
        return _counts(turn, len(turn.output_ids), turn.accept_counts, _first_of(turn.output_ids, end_token_ids))
    accept_counts = np.concatenate([turn.accept_counts for turn in completions])
    summed = replace(
        completions[0],
        num_verify_steps=sum(turn.num_verify_steps for turn in completions),
        num_accepted_drafts=sum(turn.num_accepted_drafts for turn in completions),
        num_proposed_drafts=sum(turn.num_proposed_drafts for turn in completions),
        num_cut_tokens=sum(turn.num_cut_tokens for turn in completions),
    )
    return _counts(summed, sum(len(turn.output_ids) for turn in completions), accept_counts, None, len(completions))


def _counts(turn: Completion, num_tokens: int, accept_counts: np.ndarray, first_end: int | None, num_turns: int = 1) -> AnswerCounts:
    return AnswerCounts(
        num_completion_tokens=num_tokens,
        num_verify_steps=turn.num_verify_steps,
        num_accepted_drafts=turn.num_accepted_drafts,
        num_proposed_drafts=turn.num_proposed_drafts,
        num_cut_tokens=turn.num_cut_tokens,
        accept_counts=accept_counts,
        first_end_position=first_end,
        num_turns=num_turns,
    )


def _first_of(token_ids: np.ndarray, wanted: tuple[int, ...]) -> int | None:
    """The first place of any of the ids. One look an id: ten times as fast as `np.isin` for so few."""
    places = [int(found[0]) for found in ((token_ids == token).nonzero()[0] for token in wanted) if len(found)]
    return min(places, default=None)
