"""Which records of the input are taken: --offset, --limit, --shard, --samples, --shuffle-seed. Indices always count the whole input.

With a shuffle seed, offset, limit and shard count places in the shuffled order; the records taken keep their own places.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from eaglecli.errors import UserError
from eaglecli.io.records import RecordKey


@dataclass(frozen=True)
class RecordChoice:
    """`shard` is (number from 1, how many). `samples`: ids, as text or as JSON."""

    offset: int = 0
    limit: int | None = None
    shard: tuple[int, int] | None = None
    samples: frozenset[str] = frozenset()
    shuffle_seed: int | None = None

    def takes_place(self, place: int) -> bool:
        """Whether the record at this place of the (shuffled) order is taken, its id not looked at."""
        if place < self.offset or (self.limit is not None and place >= self.offset + self.limit):
            return False
        return self.shard is None or place % self.shard[1] == self.shard[0] - 1

    def takes_id(self, key: RecordKey) -> bool:
        """Whether the record's id is among the samples."""
        if not self.samples or key.id_json in self.samples:
            return True
        return key.id_json.startswith('"') and json.loads(key.id_json) in self.samples


def places_of(num_records: int, choice: RecordChoice) -> Sequence[int] | None:
    """Place of every record in the shuffled order (8 bytes each); None when nothing is shuffled."""
    if choice.shuffle_seed is None:
        return None
    import numpy as np

    order = np.random.Generator(np.random.PCG64(choice.shuffle_seed)).permutation(num_records)
    return np.argsort(order)  # type: ignore[return-value]


def parse_shard(text: str) -> tuple[int, int]:
    """ "2/8" to (2, 8). Raises ValueError."""
    number, slash, count = text.partition("/")
    if not (slash and number.strip().isdecimal() and count.strip().isdecimal()) or not 1 <= int(number) <= int(count):
        raise ValueError(f"must be i/n with i from 1 to n, not {text!r}")
    return int(number), int(count)


def parse_samples(values: Sequence[str]) -> frozenset[str]:
    """Ids joined by commas, or a file of ids, one a line, after an `@`. Raises UserError."""
    found: set[str] = set()
    for value in values:
        if value.startswith("@"):
            try:
                with open(value[1:], encoding="utf-8") as stream:
                    found.update(line.rstrip("\r\n") for line in stream if line.strip())
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--samples {value} cannot be read: {error}", "name a file with one id a line") from error
        else:
            found.update(part for part in value.split(",") if part)
    return frozenset(found)
