"""What a policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Candidate(Protocol):
    """A server that can serve the request."""

    @property
    def order(self) -> int:
        """Position in the order of registration; unique within a role."""
        ...

    @property
    def load(self) -> int:
        """Requests that are open there, as far as the router knows."""
        ...


class Policy(Protocol):
    """Chooses for one role. Keeps its own state; not thread-safe."""

    @property
    def name(self) -> str: ...

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Index of the chosen candidate. `candidates` is never empty and is in the order of registration."""
        ...
