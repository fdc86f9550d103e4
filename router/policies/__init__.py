"""Which of several servers that could serve a request gets it."""

from __future__ import annotations

import random

from router.policies.base import Ask, Candidate, Pick, Policy, Tuning
from router.policies.cache_aware import CacheAware
from router.policies.cost import Cost
from router.policies.least_load import LeastLoad
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin
from router.policies.session import Session

__all__ = ["POLICIES", "Ask", "Candidate", "Pick", "Policy", "Tuning", "make_policy"]

POLICIES = ("random", "round_robin", "least_load", "power_of_two", "session", "cache_aware", "cost")
# Names that users of other systems type for the same thing.
ALIASES = {"least_loaded": "least_load"}


def make_policy(name: str, rng: random.Random, tuning: Tuning | None = None, *, generates: bool = False) -> Policy:
    """The policy called `name`, for one role. `generates`: it is that of the decode servers. Raises ValueError that
    lists the names."""
    match ALIASES.get(name, name):
        case "round_robin":
            return RoundRobin()
        case "least_load":
            return LeastLoad()
        case "random":
            return RandomChoice(rng)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "session":
            return Session()
        case "cache_aware":
            return CacheAware(tuning if tuning is not None else Tuning())
        case "cost":
            return Cost(generates=generates)
    raise ValueError(f"policy {name!r} must be one of: {', '.join((*POLICIES, *ALIASES))}")
