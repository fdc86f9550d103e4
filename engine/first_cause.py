"""Which rank ended an engine of several, and why. Pure.

When one rank fails, all of them end within moments of each other, and most have only lost the others. What counts is
the first rank with a reason of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rpc.errors import BatonError, ErrorCode

PEERS_LOST = "collective_failed"  # cause of a rank that lost its peers in an operation of all of them


@dataclass(frozen=True, slots=True)
class _Word:
    rank: int
    error: BatonError

    @property
    def accused(self) -> int | None:
        """Another rank that is at fault, as this one sees it."""
        named = self.error.metadata.get("rank", "")
        return int(named) if named.isdigit() and int(named) != self.rank else None

    @property
    def own(self) -> bool:
        """Whether the rank ends for a reason of its own."""
        return self.accused is None and self.error.metadata.get("cause") != PEERS_LOST


class FirstCause:
    """What the ranks of one engine said at its end, in the order in which it was heard."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._words: list[_Word] = []

    def heard(self, rank: int, error: BatonError) -> None:
        """A rank reports its failure, or has ended without a report. Its first word counts."""
        if all(word.rank != rank for word in self._words):
            self._words.append(_Word(rank, error))

    @property
    def settled(self) -> bool:
        """Whether nothing better can come."""
        return any(word.own for word in self._words) or len(self._words) == self._size

    def cause(self) -> BatonError | None:
        """The error that ended the engine, with the `rank` at fault in its metadata; None while nobody has said
        anything. With one rank it is the error as it was, and so is one that keeps an engine from its start."""
        if not self._words:
            return None
        own = next((word for word in self._words if word.own), None)
        if own is not None:
            return _with_rank(own.error, own.rank) if self._size > 1 else own.error
        accusing = {word.rank: word for word in self._words if word.accused is not None}
        if accusing:
            return _last_accused(accusing).error
        # All who spoke lost their peers: at fault is who did not speak.
        silent = sorted(set(range(self._size)) - {word.rank for word in self._words})
        first = self._words[0]
        if not silent:
            return _with_rank(first.error, first.rank)
        return BatonError(
            ErrorCode.ENGINE_DEAD,
            f"rank {silent[0]} of the engine does not answer",
            metadata={"rank": str(silent[0]), "cause": "silent", "noticed": first.error.message},
        )


def _last_accused(accusing: Mapping[int, _Word]) -> _Word:
    """Who is accused may have left because of somebody else, as it says: then that is the one. accusing: by rank, in
    the order in which they were heard. Of ranks that accuse each other the first one is believed."""
    word = next(iter(accusing.values()))
    passed = {word.rank}
    while (rank := word.accused) is not None and rank in accusing and rank not in passed:
        word = accusing[rank]
        passed.add(rank)
    return next(iter(accusing.values())) if word.accused in passed else word


def _with_rank(error: BatonError, rank: int) -> BatonError:
    error.metadata.setdefault("rank", str(rank))
    error.metadata.setdefault("cause", error.code.name)
    return error


def ended(rank: int, status: int, ranks: Iterable[int]) -> BatonError:
    """A process that ended without a report. status: negative for a signal; ranks: of the engine."""
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    if status == -signal.SIGBUS:  # memory behind which the file has gone
        how += "; a file of the model was cut off or cannot be read, or shared memory ran out"
    metadata = {"exit_status": str(status)}
    if len(list(ranks)) == 1:
        return BatonError(ErrorCode.ENGINE_DEAD, f"the engine process {how}", metadata=metadata)
    metadata |= {"rank": str(rank), "cause": f"signal_{-status}" if status < 0 else "exited"}
    return BatonError(ErrorCode.ENGINE_DEAD, f"the process of rank {rank} of the engine {how}", metadata=metadata)
