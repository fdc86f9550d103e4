"""Power of two: the less loaded of two servers drawn at random.

Nearly as even as the least load, without every router of a fleet running to the same idle server at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Ask, Candidate, Pick


class PowerOfTwo:
    name = "power_of_two"
    uses_index = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        if len(candidates) == 1:
            return Pick(0)
        first, second = self._rng.sample(range(len(candidates)), 2)
        return Pick(first if candidates[first].load <= candidates[second].load else second)
