"""Random: each server with the same probability."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Ask, Candidate, Pick


class RandomChoice:
    name = "random"
    uses_index = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        return Pick(self._rng.randrange(len(candidates)))
