"""Cache aware: the server that has most of the prompt in its prefix cache, unless that makes the load uneven.

1. The loads are uneven when the highest exceeds the lowest by more than `balance_abs_threshold` requests and by more
   than the factor `balance_rel_threshold`: then the least loaded server.
2. Some server has more than `cache_threshold` of the prompt: the one that has most of it; of equals the least loaded.
3. Otherwise the least loaded server, where the prompt will be cached from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Ask, Candidate, Pick, Tuning
from router.policies.turns import Turns


class CacheAware:
    name = "cache_aware"
    uses_index = True

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        loads = [c.load for c in candidates]
        most, least = max(loads), min(loads)
        tuning = self._tuning
        if most - least > tuning.balance_abs_threshold and most > tuning.balance_rel_threshold * least:
            return Pick(self._turns.lowest(candidates, loads), fallback=True)
        cached = ask.cached_tokens(candidates)
        best = max(cached)
        if best <= tuning.cache_threshold * ask.prompt_tokens:
            return Pick(self._turns.lowest(candidates, loads))
        equals = [i for i, tokens in enumerate(cached) if tokens == best]
        return Pick(equals[self._turns.lowest([candidates[i] for i in equals], [loads[i] for i in equals])])
