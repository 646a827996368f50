"""All that is recomputed of one answer, each part once and only when it is asked for."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eaglecli.engine.request import Completion
from eaglecli.engine.settings import SpeculationSettings
from eaglecli.verification.difference import LEAST_LIMIT
from eaglecli.verification.expected_tree import ExpectedTree, StepPlace, grow_expected_trees
from eaglecli.verification.text_pass import Models, TextPass, pass_over_text
from eaglecli.verification.token_rule import choice_scores


@dataclass(frozen=True)
class RunRules:
    """What the verified engine was told."""

    speculation: SpeculationSettings
    context_length: int
    is_deterministic: bool


class ReferenceRun:
    """One answer of at least one token, computed anew: all tokens at once, and (for limits) one by one."""

    def __init__(self, models: Models, rules: RunRules, completion: Completion) -> None:
        self.completion = completion
        self.ids = np.concatenate([completion.request.prompt_ids, completion.output_ids]).astype(np.int64)
        self._models, self._rules = models, rules
        self._prompt_len = len(completion.request.prompt_ids)

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        """float32 [m, V]: what each of the m output tokens should be the arg-max of."""
        return self._scores(self._at_once)

    @functools.cached_property
    def trees(self) -> dict[int, ExpectedTree]:
        """The tree of every verify step that had drafts, by its number."""
        return self._trees(self._at_once)

    def score_limit(self, index: int) -> float:
        """Below this gap two scores of output token `index` may change places."""
        if self._rules.is_deterministic:
            return 0.0
        moved = (self.scores[index] - self._scores_by_rows[index]).abs()
        return max(LEAST_LIMIT, 2 * float(moved.nan_to_num(0.0).max()))

    def tree_limit(self, step: int) -> float:
        """Below this gap two candidates of a step's tree may change places."""
        if self._rules.is_deterministic:
            return 0.0
        by_rows = self._trees_by_rows[step].scores
        moved = (abs(score - by_rows[path]) for path, score in self.trees[step].scores.items() if path in by_rows)
        return max([LEAST_LIMIT, *(2 * distance for distance in moved if np.isfinite(distance))])

    @functools.cached_property
    def places(self) -> Sequence[StepPlace]:
        """Where each verify step began, by the counts that the engine gave."""
        known, places = self._prompt_len + 1, []
        for accepted in self.completion.accept_counts.tolist():
            places.append(StepPlace(known - 1, min(accepted + 1, len(self.ids) - known)))
            known += accepted + 1
        return places

    @functools.cached_property
    def _at_once(self) -> TextPass:
        return self._pass(by_rows=False)

    @functools.cached_property
    def _by_rows(self) -> TextPass:
        return self._pass(by_rows=True)

    @functools.cached_property
    def _scores_by_rows(self) -> torch.Tensor:
        return self._scores(self._by_rows)

    @functools.cached_property
    def _trees_by_rows(self) -> dict[int, ExpectedTree]:
        return self._trees(self._by_rows)

    def _pass(self, by_rows: bool) -> TextPass:
        ids = torch.from_numpy(self.ids).to(self._models.device)
        return pass_over_text(self._models, ids, self._prompt_len, by_rows)

    def _scores(self, text: TextPass) -> torch.Tensor:
        positions = torch.arange(self._prompt_len, len(self.ids), device=self._models.device)
        return choice_scores(text.logits, self.completion.request, positions)

    def _trees(self, text: TextPass) -> dict[int, ExpectedTree]:
        request, rules = self.completion.request, self._rules
        drafted = np.flatnonzero(self.completion.proposed_counts).tolist()
        places = [self.places[step] for step in drafted]
        trees = grow_expected_trees(self._models, text, request, places, rules.speculation, rules.context_length)
        return dict(zip(drafted, trees, strict=True))
