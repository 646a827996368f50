"""Records to requests, some at a time: in a thread, or in a helper process so that the engine's thread keeps the interpreter."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from eaglecli.commands._request_maker import Prepared, RequestMaker, RequestRules
from eaglecli.commands._samples import SamplePlan
from eaglecli.config import GenerateSettings
from eaglecli.io.helper_process import HelperProcess
from eaglecli.io.prompts import InputSelection, read_prompts
from eaglecli.io.record_ids import IdPlan
from eaglecli.io.records import PromptRecord, RecordError
from eaglecli.io.tokenizer import PromptTokenizer

BLOCK = 32  # requests: to take in more at once would keep the interpreter from the engine for too long


def prepare_blocks(
    records: Iterable[PromptRecord | RecordError], maker: RequestMaker, plan: SamplePlan, size: int
) -> Iterator[list[Prepared]]:
    """What is left of the records, `size` requests or errors at a time."""
    prepared = chain.from_iterable(maker.prepare_samples(record, plan) for record in records if not plan.is_done(record))
    while block := list(islice(prepared, size)):
        yield block


def call_for_blocks(reading: HelperProcess, settings: GenerateSettings, rules: RequestRules, size: int) -> Iterator[list[Prepared]]:
    """The same from a process that was made with `BlockReader`."""
    reading.call("begin", settings, rules, size)
    while block := reading.call("next"):
        yield block


class BlockReader:
    """The helper's side. It is made while the models load, and told what they ask of requests when that is known."""

    def __init__(self, tokenizer: PromptTokenizer, selection: InputSelection, ids: IdPlan, plan: SamplePlan) -> None:
        self._tokenizer, self._selection, self._ids, self._plan = tokenizer, selection, ids, plan
        self._blocks: Iterator[list[Prepared]] = iter(())

    def begin(self, settings: GenerateSettings, rules: RequestRules, size: int) -> None:
        """Comes before the first `next`."""
        maker = RequestMaker(settings, self._tokenizer, rules)
        self._blocks = prepare_blocks(read_prompts(self._selection, self._ids), maker, self._plan, size)

    def next(self) -> list[Prepared]:
        """Empty at the end."""
        return next(self._blocks, [])
