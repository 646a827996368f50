"""Who runs: admission by reservation and prefill in chunks. Pure bookkeeping, no tensors.

All pages of a request (prompt, output cap, look-ahead) are taken when it is admitted and given back when it ends, so
nothing grows and nothing can run out in the steady state.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from eaglecli.engine.pages import PagePool
from eaglecli.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """One admitted or waiting request and how far it has come."""

    request: Request
    row: int = -1  # -1 while waiting
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    added_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def limit(self) -> int:
        """Tokens the row may ever know: prompt and output cap."""
        return self.prompt_len + self.request.sampling.max_new_tokens


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..end of a sequence's prompt; `is_last` when end is the end of the prompt."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.end == self.sequence.prompt_len


class Scheduler:
    """Waiting -> prefilling -> running. First come, first served: a request that does not fit now waits at the head."""

    def __init__(self, pool: PagePool, num_rows: int, lookahead: int, chunk_size: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._lookahead = lookahead
        self._chunk_size = chunk_size
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.waiting or self.prefilling or self.running)

    def num_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence takes for its whole life."""
        return self.pool.pages_for(sequence.limit + self._lookahead)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that wait."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give rows and pages to as many waiting requests as fit, in order."""
        admitted = []
        while self.waiting and self._free_rows and self.pool.can_allocate(self.num_pages(self.waiting[0])):
            sequence = self.waiting.popleft()
            sequence.row = self._free_rows.pop()
            sequence.pages = self.pool.allocate(self.num_pages(sequence))
            sequence.admitted_s = time.perf_counter()
            admitted.append(sequence)
        self.prefilling.extend(admitted)
        return admitted

    def next_chunks(self) -> list[PrefillChunk]:
        """The prompt tokens of this step, at most `chunk_size`; sequences whose prompt is done by them start running."""
        chunks, budget = [], self._chunk_size
        for sequence in self.prefilling:
            if budget == 0:
                break
            end = min(sequence.prompt_len, sequence.num_prefilled + budget)
            chunks.append(PrefillChunk(sequence, sequence.num_prefilled, end))
            budget -= end - sequence.num_prefilled
            sequence.num_prefilled = end
        done = [chunk.sequence for chunk in chunks if chunk.is_last]
        self.prefilling = [sequence for sequence in self.prefilling if sequence.num_prefilled < sequence.prompt_len]
        self.running.extend(done)
        return chunks

    def release(self, sequence: Sequence) -> None:
        """Give back the row and all pages of a sequence that has ended."""
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self.pool.free(sequence.pages)
        sequence.pages = []

    def check(self) -> None:
        """Prove that every row and page is free or held by exactly one sequence."""
        held = self.prefilling + self.running
        self.pool.check([sequence.pages for sequence in held])
        rows = self._free_rows + [sequence.row for sequence in held]
        assert len(set(rows)) == len(rows), "a row is held twice"
