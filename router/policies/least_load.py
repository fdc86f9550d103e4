"""Least load: the server with the fewest open requests."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Ask, Candidate, Pick
from router.policies.turns import Turns


class LeastLoad:
    name = "least_load"
    uses_index = False

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        return Pick(self._turns.lowest(candidates, [c.load for c in candidates]))
