"""Several samples of one record: how many it asks for, and which of them an earlier session did not finish."""

from collections.abc import Iterator
from dataclasses import dataclass

from eaglecli.io.earlier_run import DoneRecords
from eaglecli.io.records import PromptRecord, RecordError


@dataclass(frozen=True)
class SamplePlan:
    """`num_samples` holds for records that name no number of their own. All of them have one prompt and one seed."""

    num_samples: int
    done: DoneRecords

    def left(self, record: PromptRecord | RecordError) -> Iterator[int]:
        """The samples still to do, ascending. A record that cannot be used counts as one."""
        num_samples = record.options.get("num_samples", self.num_samples) if isinstance(record, PromptRecord) else 1
        return (sample for sample in range(num_samples) if not self.done.has(record.key.index, sample))

    def is_done(self, record: PromptRecord | RecordError) -> bool:
        """Whether nothing of the record is left."""
        return next(self.left(record), None) is None
