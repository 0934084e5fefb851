"""The step record: what each of a rank's last thousand steps computed, in digests that a resumed run compares.

A record is kept in memory that outlives the rank, and in each checkpoint; see `checkpointing.proof`. Its bytes are a
file format.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import xxhash

# Steps that a file has. Memory has room for some more, which are recorded while the file is made.
FILE_STEPS = 1000
CAPACITY = 1024
# What is compared, in the order in which one is the cause of those after it; the position is its bit in a file.
GENERATORS = ("torch", "device", "numpy", "python")
FIELDS = (
    *("batch", *GENERATORS),
    *("loss", "gradient_norm", "loss_scale", "learning_rate", "parameters"),
)
# How digests are made: raised when `checkpointing.proof.digests` makes others, which are not comparable.
DIGESTS = 1
_WORD = (1 << 64) - 1
_NUMBERS = {name: number for number, name in enumerate(FIELDS)}
# Step, history, which fields are known and which have differed, tokens, the fields; after it a checksum (XXH32).
_RECORD, _CHECKSUM_BYTES = struct.Struct(f"<QIII{len(FIELDS)}Q"), 4
RECORD_BYTES = _RECORD.size + _CHECKSUM_BYTES
RING_BYTES = CAPACITY * RECORD_BYTES


def history_of(stage: str, rank: int, world_size: int) -> int:
    """Return the number of a history: the steps of another stage, rank or number of ranks are not comparable."""
    return zlib.crc32(f"{DIGESTS}/{stage}/{rank}/{world_size}".encode())


def float_bits(value: float) -> int:
    """Return the bits of a number; every NaN and infinity has its own."""
    return int.from_bytes(struct.pack("<d", value), "little")


@dataclass(frozen=True)
class StepRecord:
    """What one rank computed in one step.

    Attributes:
        step: Number of the step.
        values: 64-bit digests, or the bits of a number, by the names in `FIELDS`; what is not known is left out.
        tokens: Number of tokens, or of other numbers, in the first tensor of each micro-batch.
        differed: What differed, where this was a repetition, from what was computed before.
    """

    step: int
    values: Mapping[str, int]
    tokens: int = 0
    differed: tuple[str, ...] = ()

    def differences(self, other: StepRecord) -> tuple[str, ...]:
        """Return the names of what both know and is not the same, in the order of `FIELDS`."""
        both = [name for name in FIELDS if name in self.values and name in other.values]
        return tuple(name for name in both if self.values[name] != other.values[name])

    def pack(self, history: int) -> bytes:
        """Return the bytes in a ring."""
        known, values = _bits(self.differed) << len(FIELDS), [0] * len(FIELDS)
        for name, value in self.values.items():
            number = _NUMBERS[name]
            known |= 1 << number
            values[number] = value & _WORD
        data = _RECORD.pack(self.step, history, known, min(self.tokens, 0xFFFFFFFF), *values)
        return data + xxhash.xxh32_digest(data)

    @classmethod
    def unpack(cls, data: bytes | memoryview, history: int) -> StepRecord | None:
        """Parse the bytes in a ring; None for what is torn, empty, or of another history."""
        step, of, known, tokens, *values = _RECORD.unpack_from(data)
        if of != history or bytes(data[-_CHECKSUM_BYTES:]) != xxhash.xxh32_digest(data[:-_CHECKSUM_BYTES]):
            return None
        every = dict(zip(FIELDS, values, strict=True))
        found = {name: every[name] for name in _names(known)}
        return cls(step, found, tokens, tuple(_names(known >> len(FIELDS))))


def _bits(names: Collection[str]) -> int:
    return sum(1 << _NUMBERS[name] for name in names)


def _names(bits: int) -> list[str]:
    return [name for number, name in enumerate(FIELDS) if bits >> number & 1]


class StepRing:
    """The newest records of one rank, in memory of `RING_BYTES`.

    Args:
        memory: Writable; zeros where nothing was recorded.
        history: See `history_of`; records of another one count as missing.
    """

    def __init__(self, memory: memoryview, history: int) -> None:
        self._memory, self._history = memory, history

    def put(self, record: StepRecord) -> None:
        """Write a step's record, in place of an older step's."""
        self._memory[self._place(record.step)] = record.pack(self._history)

    def get(self, step: int) -> StepRecord | None:
        """Return a step's record; None where there is none."""
        found = StepRecord.unpack(self._memory[self._place(step)], self._history)
        return found if found is not None and found.step == step else None

    def is_free(self, step: int) -> bool:
        """Return whether no record, of any history, is where a step's would be."""
        data = self._memory[self._place(step)]
        return StepRecord.unpack(data, _RECORD.unpack_from(data)[1]) is None

    def records(self) -> dict[int, StepRecord]:
        """Return all records, by step, in order."""
        return parse_records(self._memory, self._history)

    def to_bytes(self, last: int | None = None) -> bytes:
        """Return the records up to a step as a file, in order."""
        records = self.records()
        end = max(records, default=0) if last is None else last
        kept = (record for step, record in records.items() if end - FILE_STEPS < step <= end)
        return b"".join(record.pack(self._history) for record in kept)

    @staticmethod
    def _place(step: int) -> slice:
        start = step % CAPACITY * RECORD_BYTES
        return slice(start, start + RECORD_BYTES)


def parse_records(data: bytes | memoryview, history: int) -> dict[int, StepRecord]:
    """Return the records of a history in a file, or a ring, by step, in order; what is torn is left out."""
    whole = len(data) // RECORD_BYTES * RECORD_BYTES
    found = (StepRecord.unpack(data[at : at + RECORD_BYTES], history) for at in range(0, whole, RECORD_BYTES))
    return in_order(record for record in found if record is not None)


def first_difference(one: bytes, other: bytes, without: Collection[str] = ()) -> tuple[int, tuple[str, ...]] | None:
    """Return the first step that two files of one rank have both recorded with other values, and what differs; or None.

    Args:
        one: The file of one run of a job.
        other: That of another run of it.
        without: Fields that are not compared.
    """
    found = [{record.step: record for record in _every(data)} for data in (one, other)]
    for step in sorted(found[0].keys() & found[1].keys()):
        differs = [name for name in found[0][step].differences(found[1][step]) if name not in without]
        if differs:
            return step, tuple(differs)
    return None


def _every(data: bytes) -> Iterator[StepRecord]:
    for at in range(0, len(data) // RECORD_BYTES * RECORD_BYTES, RECORD_BYTES):
        part = data[at : at + RECORD_BYTES]
        if (record := StepRecord.unpack(part, _RECORD.unpack_from(part)[1])) is not None:
            yield record


def newest_step(data: bytes | memoryview) -> int:
    """Return the newest step that a ring has a record of, of any history; 0 where it is empty."""
    return max(int(_RECORD.unpack_from(data, at)[0]) for at in range(0, RING_BYTES, RECORD_BYTES))


def in_order(records: Iterable[StepRecord]) -> dict[int, StepRecord]:
    """Return records by step, in order."""
    return {record.step: record for record in sorted(records, key=lambda record: record.step)}
