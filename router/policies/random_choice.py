"""Random: each server with the same probability."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate


class RandomChoice:
    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate]) -> int:
        return self._rng.randrange(len(candidates))
