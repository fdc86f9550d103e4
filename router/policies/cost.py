"""Cost: the server on which the request is expected to cost least, itself and by what it waits for.

The unit is the work of one prompt token. With, of each server,

    uncached   tokens of the prompt that its prefix cache lacks
    queued     prompt tokens that this router has given it to compute, and that are not computed yet
    load       open requests, those of other routers too
    context    tokens of the prompts that it generates after, for this router

a server that computes the prompt and hands its KV over costs

    uncached + queued

one that loads the KV and generates costs

    LOAD * uncached + STEPS * (load + context / CONTEXT)

and one that does both costs

    uncached + queued + STEPS * (load + context / CONTEXT)

STEPS * (…) is what STEPS decode steps take with the batch that the request joins. In each step an open request costs
as much as a prompt token, because either goes once through all the weights, and reading the KV of CONTEXT tokens costs
as much again: for a model of 8e9 parameters on a processor with 4e14 FLOP/s and 3e12 B/s, 2 * 8e9 / 4e14 = 40 us
against 131072 B / 3e12 = 44 ns. Sending a token's KV over a link of 25e9 B/s takes 5 us, an eighth of computing it.
Other models and hosts shift these ratios by small factors, which changes the choice only between near equals.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Ask, Candidate, Pick
from router.policies.turns import Turns

LOAD = 1 / 8
STEPS = 32
CONTEXT = 1024


class Cost:
    """`generates`: whether the candidates do so, or hand over what they computed."""

    name = "cost"
    uses_index = True

    def __init__(self, *, generates: bool) -> None:
        self._generates = generates
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        return Pick(self._turns.lowest(candidates, self.costs(candidates, ask)))

    def costs(self, candidates: Sequence[Candidate], ask: Ask) -> list[float]:
        """Of each candidate, in prompt tokens."""
        prompt_tokens, computes = ask.prompt_tokens, ask.computes
        found = []
        for candidate, cached in zip(candidates, ask.cached_tokens(candidates), strict=True):
            uncached = prompt_tokens - cached
            cost = float(uncached + candidate.queued_tokens) if computes else LOAD * uncached
            if self._generates:
                cost += STEPS * (candidate.load + candidate.context_tokens / CONTEXT)
            found.append(cost)
        return found
