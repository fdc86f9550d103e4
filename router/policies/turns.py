"""Turns among equals: the next server in the order of registration."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate


class Turns:
    """Goes on after the server that was chosen last, so that servers which come and go change nothing for the
    rest."""

    def __init__(self) -> None:
        self._last = -1

    def next(self, candidates: Sequence[Candidate]) -> int:
        index = next((i for i, c in enumerate(candidates) if c.order > self._last), 0)
        self._last = candidates[index].order
        return index

    def lowest(self, candidates: Sequence[Candidate], values: Sequence[float]) -> int:
        """The candidate with the lowest value; equals take turns, otherwise an idle cluster would send everything to
        its first server."""
        least = min(values)
        equals = [i for i, value in enumerate(values) if value == least]
        return equals[self.next([candidates[i] for i in equals])]
