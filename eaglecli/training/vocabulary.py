"""The draft vocabulary: the tokens that answers use most, and the tables `d2t` and `t2d` of the published layout.

Source: Li et al., "EAGLE-3"; tables as in SafeAILab/EAGLE and SpecForge.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from eaglecli.training.documents import Document


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """token_ids int64 [Vd]: target ids in ascending order. `coverage`: their share of all answer tokens."""

    token_ids: torch.Tensor
    vocab_size: int
    coverage: float

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [Vd]: target id of draft id j, less j."""
        return self.token_ids - torch.arange(len(self.token_ids))

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V]: membership."""
        members = torch.zeros(self.vocab_size, dtype=torch.bool)
        members[self.token_ids] = True
        return members


def count_answer_tokens(documents: Iterable[Document], vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token stands in an answer."""
    counts = np.zeros(vocab_size, np.int64)
    answers = [document.answer_ids for document in documents]
    if answers:
        counts += np.bincount(np.concatenate(answers), minlength=vocab_size)
    return counts


def choose_vocabulary(counts: np.ndarray, draft_vocab_size: int) -> DraftVocabulary:
    """The most frequent tokens (the lower id where counts are equal), filled up with the lowest unused ids."""
    size = min(draft_vocab_size, len(counts))
    by_frequency = np.argsort(-counts, kind="stable")[:size]
    token_ids = np.sort(by_frequency)
    total = int(counts.sum())
    return DraftVocabulary(
        torch.from_numpy(token_ids.astype(np.int64)), len(counts), float(counts[token_ids].sum() / total) if total else 0.0
    )
