"""Round robin: one after the other, in the order of registration."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate


class RoundRobin:
    """Goes on after the server that was chosen last, so that servers which come and go change nothing for the
    rest."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate]) -> int:
        index = next((i for i, c in enumerate(candidates) if c.order > self._last), 0)
        self._last = candidates[index].order
        return index
