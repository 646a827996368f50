"""Records of several turns: each later turn is asked after the model's own answer to the one before."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from eaglecli.engine.request import Completion, Request
from eaglecli.io.chat_messages import Message
from eaglecli.io.prefetch import Prefetch
from eaglecli.io.records import PromptRecord, RecordError, RecordFault
from eaglecli.io.stop_strings import answer_text
from eaglecli.io.tokenizer import PromptTokenizer

BURST_S = 0.1

AskNext = Callable[[PromptRecord, list[Message], int], Request]  # (record, conversation, sample); raises RecordFault


@dataclass
class _Dialogue:
    record: PromptRecord
    messages: list[Message]
    completions: list[Completion] = field(default_factory=list)


class Dialogues:
    """Those whose first turn was asked and whose last one is not answered."""

    def __init__(self, tokenizer: PromptTokenizer, ask_next: AskNext) -> None:
        self._tokenizer, self._ask_next = tokenizer, ask_next
        self._open: dict[tuple[int, int], _Dialogue] = {}

    def begin(self, record: PromptRecord, sample: int) -> None:
        """Takes note of a sample whose first turn is being asked; records of one turn need no note."""
        if record.turns is not None and len(record.turns) > 1:
            first: Message = {"role": "user", "content": record.turns[0]}
            self._open[record.key.index, sample] = _Dialogue(record, [first])

    def next_turn(self, completion: Completion) -> Request | RecordError | None:
        """The request for the turn after this answer; None when it was the last. An error ends the dialogue."""
        name = _name(completion.request)
        dialogue = self._open.get(name)
        if dialogue is None:
            return None
        record = dialogue.record
        dialogue.completions.append(completion)
        number = len(dialogue.completions)
        if number == len(record.turns or ()):
            return None
        answer = answer_text(self._tokenizer.decode, completion.output_ids, completion.stop_reason)
        dialogue.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": (record.turns or ())[number]}]
        try:
            return self._ask_next(record, dialogue.messages, completion.request.sample)
        except RecordFault as fault:
            del self._open[name]
            return RecordError(record.key, fault.code, f"turn {number + 1}: {fault.message}", record.raw, sample=completion.request.sample)

    def end(self, completion: Completion) -> list[Completion]:
        """All answers of the record in order, this one the last; the dialogue is forgotten."""
        dialogue = self._open.pop(_name(completion.request), None)
        return [completion] if dialogue is None else dialogue.completions


class RequestSource:
    """Requests for the engine in input order, follow-ups first. After an end it may go on: `has_more` says so.

    The source ends for the moment when nothing is ready and the engine has `enough` requests to work on. With `is_live` a pipe
    that pauses is no reason to let even fewer of them wait.
    """

    def __init__(
        self,
        prepared: Prefetch[Request | RecordError],
        take_error: Callable[[RecordError], None],
        enough: int,
        is_live: bool = False,
    ) -> None:
        self._queue, self._enough, self._is_live = prepared, enough, is_live
        self.num_read = 0  # records, good and bad
        self._prepared: Iterator[Request | RecordError] = iter(prepared)
        self._take_error = take_error
        self._num_running, self._last_s = 0, 0.0
        self._follow_ups: deque[Request] = deque()
        self._is_exhausted = False

    @property
    def has_more(self) -> bool:
        """Whether there may be another request now."""
        return bool(self._follow_ups) or not self._is_exhausted

    def put(self, request: Request) -> None:
        """A request that comes before all others."""
        self._follow_ups.append(request)

    def finished(self) -> None:
        """One of the requests came back."""
        self._num_running -= 1

    def __iter__(self) -> "RequestSource":
        return self

    def __next__(self) -> Request:
        while not self._follow_ups and not self._is_exhausted and not self._pauses():
            item = next(self._prepared, None)
            self._last_s = time.monotonic()
            self.num_read += item is not None
            if isinstance(item, Request):
                self._num_running += 1
                return item
            if item is None:
                self._is_exhausted = True
            else:
                self._take_error(item)
        if not self._follow_ups:
            raise StopIteration
        self._num_running += 1
        return self._follow_ups.popleft()

    def _pauses(self) -> bool:
        """Whether there is nothing to take now while others run. Behind an item of a pipe more may follow at once: that is waited for."""
        if self._num_running >= self._enough:
            return not self._queue.is_ready()
        if not self._is_live or not self._num_running:
            return False
        return not self._queue.is_ready(max(0.0, self._last_s + BURST_S - time.monotonic()))


def _name(request: Request) -> tuple[int, int]:
    return request.key.index, request.sample  # type: ignore[attr-defined]
