"""Which of several servers that could serve a request gets it."""

from __future__ import annotations

import random

from router.policies.base import Candidate, Policy
from router.policies.least_load import LeastLoad
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin

__all__ = ["POLICIES", "Candidate", "Policy", "make_policy"]

POLICIES = ("random", "round_robin", "least_load", "power_of_two")
# Names that users of other systems type for the same thing.
ALIASES = {"least_loaded": "least_load"}


def make_policy(name: str, rng: random.Random) -> Policy:
    """The policy called `name`, for one role. Raises ValueError that lists the names."""
    match ALIASES.get(name, name):
        case "round_robin":
            return RoundRobin()
        case "least_load":
            return LeastLoad()
        case "random":
            return RandomChoice(rng)
        case "power_of_two":
            return PowerOfTwo(rng)
    raise ValueError(f"policy {name!r} must be one of: {', '.join((*POLICIES, *ALIASES))}")
