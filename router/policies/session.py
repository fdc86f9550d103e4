"""Session: all requests of a session go to the same server, as long as it is there.

Rendezvous hashing: the session and each server's address are hashed together, and the highest hash wins. A server that
goes takes only its own sessions away, which are spread over the rest; one that comes (or comes back) gets its share and
moves no other. Every router with the same servers chooses the same, also after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from router.policies.base import Ask, Candidate, Pick
from router.policies.turns import Turns

_KEY = b"baton.session.v1"


def weight(session: str, address: str) -> bytes:
    """How much the session prefers the server; 8 bytes, compared as they are."""
    # An address has no NUL, so no session can end like the beginning of one.
    return blake2b(f"{address}\0{session}".encode(), digest_size=8, key=_KEY).digest()


class Session:
    """A request without a session goes where the fewest are open."""

    name = "session"
    uses_index = False

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> Pick:
        session = ask.session
        if not session:
            return Pick(self._turns.lowest(candidates, [c.load for c in candidates]), fallback=True)
        return Pick(max(range(len(candidates)), key=lambda i: weight(session, candidates[i].address)))
