"""Documents to train on: a prompt and one answer to it, loops cut off, and what became of the answers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from eaglecli.training.answers import Answer

_MIN_ANSWER_TOKENS = 3  # fewer have no drafted token to learn from


@dataclass(frozen=True, eq=False)
class Document:
    """token_ids int32 [n]: the prompt, then from `answer_start` on the answer with its end token."""

    token_ids: np.ndarray
    answer_start: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def answer_ids(self) -> np.ndarray:
        """The answer alone."""
        return self.token_ids[self.answer_start :]


@dataclass
class DocumentCounts:
    """Answers by what became of them, and tokens."""

    num_answers: int = 0
    num_finished: int = 0
    num_loops_cut: int = 0  # the answer ends where its loop begins to repeat
    num_loops_dropped: int = 0  # nothing was left before the loop
    num_loop_tokens: int = 0
    num_too_short: int = 0
    num_answer_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True)
class DocumentSet:
    """Documents to train on, and those of held-out prompts."""

    training: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)
    counts: DocumentCounts = field(default_factory=DocumentCounts)


def make_documents(answers: Iterable[Answer], held_out: frozenset[int]) -> DocumentSet:
    """One document an answer, in the order of (prompt, sample); `counts` are of the training documents."""
    documents = DocumentSet()
    for answer in sorted(answers, key=lambda item: (item.prompt, item.sample)):
        if answer.prompt in held_out:
            document = _document(answer, DocumentCounts())
            if document is not None and answer.sample == 0:
                documents.held_out.append(document)
        else:
            document = _document(answer, documents.counts)
            if document is not None:
                documents.training.append(document)
    return documents


def _document(answer: Answer, counts: DocumentCounts) -> Document | None:
    counts.num_answers += 1
    kept = answer.answer_ids if answer.loop_start is None else answer.answer_ids[: answer.loop_start]
    counts.num_loop_tokens += len(answer.answer_ids) - len(kept)
    is_dropped = len(kept) < _MIN_ANSWER_TOKENS
    if answer.loop_start is not None:
        counts.num_loops_cut += not is_dropped
        counts.num_loops_dropped += is_dropped
    elif is_dropped:
        counts.num_too_short += 1
    if is_dropped:
        return None
    counts.num_finished += answer.is_finished and answer.loop_start is None
    counts.num_answer_tokens += len(kept)
    counts.num_prompt_tokens += len(answer.prompt_ids)
    return Document(np.concatenate([answer.prompt_ids, kept]).astype(np.int32), len(answer.prompt_ids))
