"""Round robin: one after the other, in the order of registration."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Ask, Candidate, Pick
from router.policies.turns import Turns


class RoundRobin:
    name = "round_robin"
    uses_index = False

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        return Pick(self._turns.next(candidates))
