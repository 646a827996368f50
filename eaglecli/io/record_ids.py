"""Ids of records: those that were generated, those that appear twice, and the seed that belongs to one.

Memory is 8 bytes a record while the input is scanned, and one number per repeated id afterwards.
"""

import hashlib
import json
import re
from array import array
from dataclasses import dataclass, field, replace

from eaglecli.io.records import RecordKey

GENERATED_ID = re.compile(r'"record(-+)\d+"')
MAX_SEED = 2**63 - 1


def generated_id(prefix: str, index: int) -> str:
    """The id, as JSON text, of a record that has none."""
    return json.dumps(f"{prefix}{index}")


def id_hash(id_json: str) -> int:
    """64 bits that stand for an id. The JSON text tags the type: 7, "7" and 7.0 are three ids."""
    return int.from_bytes(hashlib.blake2b(id_json.encode("utf-8"), digest_size=8).digest(), "little")


def request_seed(run_seed: int, key: RecordKey) -> int:
    """Seed of a record that gives none: 63 bits of (run seed, id with its type or global index, occurrence).

    It depends on nothing else, so order, batch, shard and resume leave sampled text unchanged.
    """
    name = f"id:{key.id_json}" if key.has_own_id else f"index:{key.index}"
    text = json.dumps([run_seed, name, key.occurrence if key.has_own_id else 0], ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little") & MAX_SEED


@dataclass(frozen=True)
class IdPlan:
    """What the scan of the input found out about its ids: which are repeated, and a prefix that no given id begins with."""

    prefix: str = "record-"
    repeated: frozenset[int] = frozenset()

    def counter(self) -> "OccurrenceCounter":
        """A counter for one pass over the file."""
        return OccurrenceCounter(self.repeated)


@dataclass
class OccurrenceCounter:
    """Numbers the records that share an id, in file order."""

    repeated: frozenset[int]
    seen: dict[int, int] = field(default_factory=dict)
    batch_lines: set[int] = field(default_factory=set)  # ids of OpenAI batch lines, of which each may come once

    def number(self, key: RecordKey) -> RecordKey:
        """The key with its occurrence."""
        if not self.repeated or not key.has_own_id:
            return key
        name = id_hash(key.id_json)
        if name not in self.repeated:
            return key
        occurrence = self.seen.get(name, 0)
        self.seen[name] = occurrence + 1
        return replace(key, occurrence=occurrence)

    def is_first_batch_line(self, key: RecordKey) -> bool:
        """Whether no earlier batch line had this id."""
        name = id_hash(key.id_json)
        is_first = name not in self.batch_lines
        self.batch_lines.add(name)
        return is_first


@dataclass
class IdScan:
    """Collects the ids of one pass over the input."""

    hashes: array = field(default_factory=lambda: array("Q"))
    longest_dashes: int = 0

    def add(self, key: RecordKey) -> None:
        """Takes note of one id."""
        if not key.has_own_id:
            return
        self.hashes.append(id_hash(key.id_json))
        taken = GENERATED_ID.fullmatch(key.id_json)
        if taken:
            self.longest_dashes = max(self.longest_dashes, len(taken[1]))

    def plan(self) -> IdPlan:
        """A given id that looks like a generated one makes the generated prefix one dash longer."""
        import numpy as np

        values, counts = np.unique(np.frombuffer(self.hashes, dtype=np.uint64), return_counts=True)
        return IdPlan("record-" + "-" * self.longest_dashes, frozenset(int(value) for value in values[counts > 1]))
