"""What a policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Candidate(Protocol):
    """A server that can serve the request."""

    @property
    def order(self) -> int:
        """Position in the order of registration; unique within a role."""
        ...

    @property
    def address(self) -> str:
        """host:port; unique within a role, and the same for every router."""
        ...

    @property
    def load(self) -> int:
        """Requests that are open there, as far as the router knows."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this router has given it to compute and that are not known to be computed."""
        ...

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompts that it generates after, for this router."""
        ...


class Ask(Protocol):
    """The request as a policy sees it, for one choice."""

    @property
    def session(self) -> str:
        """What keeps requests together; empty for none."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def computes(self) -> bool:
        """Whether the chosen server computes the prompt, in place of loading its KV."""
        ...

    def cached_tokens(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        """How much of the prompt each candidate has in its prefix cache, as far as the router knows: below
        `prompt_tokens`. Takes time, by the length of what is cached."""
        ...


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of the policies that have some; what they mean is in router/settings.py."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5


class Pick(NamedTuple):
    """`place`: index of the chosen candidate. `fallback`: the policy left its own rule and went by load."""

    place: int
    fallback: bool = False


class Policy(Protocol):
    """Chooses for one role. Keeps its own state; not thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def uses_index(self) -> bool:
        """Whether it asks for cached tokens."""
        ...

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        """`candidates` is never empty and is in the order of registration."""
        ...
