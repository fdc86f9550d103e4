"""Power of two: the less loaded of two servers drawn at random.

Nearly as even as the least load, without every router of a fleet running to the same idle server at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate


class PowerOfTwo:
    name = "power_of_two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate]) -> int:
        if len(candidates) == 1:
            return 0
        first, second = self._rng.sample(range(len(candidates)), 2)
        return first if candidates[first].load <= candidates[second].load else second
