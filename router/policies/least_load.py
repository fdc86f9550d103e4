"""Least load: the server with the fewest open requests."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate
from router.policies.round_robin import RoundRobin


class LeastLoad:
    """Equals take turns; otherwise an idle cluster would send everything to its first server."""

    name = "least_load"

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, candidates: Sequence[Candidate]) -> int:
        least = min(c.load for c in candidates)
        equals = [i for i, c in enumerate(candidates) if c.load == least]
        return equals[self._turns.choose([candidates[i] for i in equals])]
