"""What a place for blocks below the KV pool can do."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Record: TypeAlias = "bytes | bytearray | memoryview"  # see record.py; contiguous


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds now. A shared tier that cannot tell has zeros."""

    blocks: int = 0
    stored_bytes: int = 0
    limit_bytes: int = 0
    evicted_blocks: int = 0  # since the start, for want of room
    wasted_blocks: int = 0  # since the start: fetched before they were asked for, which nobody did


class TierError(Exception):
    """An operation of a tier could not be done; `reason` is a label of its metric, one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


# full: no room at all; io: the medium failed; denied: not permitted; unreachable: the other end is gone; timeout:
# it did not answer in time; other: anything else, bugs of a client library included
REASONS = ("full", "io", "denied", "unreachable", "timeout", "other")


class Tier(Protocol):
    """Records by key. Every record of one store has the same size, that of a block with all its layers.

    Calls may block and are made by the tier's own threads alone, several at a time: two or more readers (`find`, `get`)
    beside one writer (`put`, `touch`). A call fails with TierError, which costs a miss or a lost write and is counted;
    anything else that it raises is counted as `other`. A tier may lose records at any time. It need not check what it
    gives out: whoever asked checks key and checksum of what lies in his own memory then.
    """

    name: str  # label `tier` of metrics: host, disk, mooncake
    shared: bool  # whether other servers put records here too, and read them

    @property
    def takes(self) -> bool:
        """Whether it is worth copying a block for a `put` now; not for a store that cannot be reached, until it can.
        Answers at once, from any thread."""
        ...

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys` (16 bytes each) are here. May be wrong, as a later `get` will tell."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether the record is here. Is no use of it."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Those of `keys` that are here were used, the first one last: a beginning is of use without what follows."""
        ...

    def get(self, key: bytes, into: memoryview) -> bool:
        """Copies the record into `into` (writable, contiguous, format 'B'). False: it is not here, or not of this size;
        the memory's content is undefined then."""
        ...

    def lent(self, key: bytes) -> bytes | None:
        """The record where it lies in this process's memory, if it does and nobody can change it; then nothing need be
        copied to be checked. None: `get` it."""
        ...

    def put(self, key: bytes, record: Record) -> bool:
        """Keeps a copy of the record, for which others may have to go. True: it is here now, or was before. False: it
        was not taken, e.g. because it is larger than the tier. `record` may be reused after the return."""
        ...

    def discard(self, key: bytes) -> None:
        """The record turned out to be damaged: it is not to be given out again, if that can be had."""
        ...

    def clear(self) -> None:
        """Forgets every record. A shared tier does nothing: its records belong to others too."""
        ...

    def stats(self) -> TierStats:
        """Answers at once, from any thread."""
        ...

    def close(self) -> None:
        """Gives back what the tier holds of this process; what it has stored stays where it outlives the process. No
        call is under way, unless one hangs; an operation after it fails."""
        ...


def leading(keys: Sequence[bytes], here: Container[bytes]) -> int:
    """How many leading ones of `keys` are `here`."""
    return next((count for count, key in enumerate(keys) if key not in here), len(keys))


def reason_of(error: BaseException) -> str:
    """The metric's label of what a tier's call failed with."""
    return error.reason if isinstance(error, TierError) and error.reason in REASONS else "other"
