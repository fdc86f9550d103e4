"""Which faults a campaign has: the points armed in each process, and the blows at processes, as a seed has them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """A family of faults, as `--faults` names it."""

    KILL = "kill"  # SIGKILL of a front or an engine
    PAUSE = "pause"  # SIGSTOP of a front or an engine, SIGCONT some time later
    RESTART = "restart"  # SIGTERM; both this and a kill are followed by a start on the same address
    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    RAISE = "raise"
    FULL = "full"
    CLOCK = "clock"
    LEAVE = "leave"  # clients cancel, abort or disconnect
    DEADLINE = "deadline"  # clients have little time


LAST_TOO = 0.2
TURN_S = 15.0  # between two times at which all decode servers end at once
BLOWS = (Kind.KILL, Kind.PAUSE, Kind.RESTART)
_PREFILL, _DECODE, _ROUTER = "prefill", "decode", "router"
_SERVERS = (_PREFILL, _DECODE)
# (kind, processes, chance, fault without chance and seed). Chances are per call; a load of a short prompt makes about
# ten calls of the points of events, so a few in a hundred loads are hit by each of them.
_POINTS: tuple[tuple[Kind, tuple[str, ...], float, str], ...] = (
    (Kind.DELAY, (_PREFILL,), 0.02, "cache_store.send_event:delay=0.05"),
    (Kind.DELAY, (_PREFILL,), 0.001, "cache_store.send_event:delay=2.5"),
    (Kind.DELAY, (_PREFILL,), 0.02, "cache_store.load_open:delay=0.2"),
    (Kind.DELAY, (_PREFILL,), 0.02, "prefill.answer:delay=0.3"),
    (Kind.DELAY, (_DECODE,), 0.02, "cache_store.read_event:delay=0.05"),
    (Kind.DELAY, (_DECODE,), 0.001, "cache_store.read_event:delay=2.5"),
    (Kind.DELAY, (_DECODE,), 0.02, "cache_store.load_start:delay=0.2"),
    (Kind.DELAY, (_DECODE,), 0.03, "cache_store.prove:delay=0.2"),
    (Kind.DELAY, (_DECODE,), 0.005, "decode.tokens:delay=0.1"),
    (Kind.DELAY, _SERVERS, 0.1, "cache_store.handshake:delay=0.5"),
    (Kind.DELAY, _SERVERS, 0.05, "cache_store.release:delay=0.5"),
    (Kind.DELAY, _SERVERS, 0.01, "engine.step:delay=0.1"),
    (Kind.DELAY, (_ROUTER,), 0.01, "router.stage:delay=0.05"),
    (Kind.DROP, (_PREFILL,), 0.002, "cache_store.send_event:drop"),
    (Kind.DROP, (_PREFILL,), 0.0005, "cache_store.send_piece:drop"),
    (Kind.DROP, (_PREFILL,), 0.002, "cache_store.publish:drop"),
    (Kind.DROP, (_PREFILL,), 0.002, "prefill.answer:drop"),
    (Kind.DROP, (_DECODE,), 0.002, "cache_store.read_event:drop"),
    (Kind.DROP, (_DECODE,), 0.3, "cache_store.lease_word:drop"),
    (Kind.DROP, (_DECODE,), 0.005, "decode.reserved:drop"),
    (Kind.DROP, _SERVERS, 0.3, "cache_store.renew:drop"),
    (Kind.DROP, _SERVERS, 0.03, "cache_store.release:drop"),
    (Kind.DUPLICATE, (_PREFILL,), 0.003, "cache_store.send_event:duplicate"),
    (Kind.DUPLICATE, (_PREFILL,), 0.02, "cache_store.publish:duplicate"),
    (Kind.DUPLICATE, (_DECODE,), 0.003, "cache_store.read_event:duplicate"),
    (Kind.DUPLICATE, _SERVERS, 0.05, "cache_store.release:duplicate"),
    (Kind.CORRUPT, (_PREFILL,), 0.02, "cache_store.piece_bytes:corrupt"),
    (Kind.RAISE, (_PREFILL,), 0.01, "cache_store.load_open:raise=CACHE_STORE_STORE_FAILED"),
    (Kind.RAISE, (_PREFILL,), 0.0005, "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED"),
    (Kind.RAISE, (_PREFILL,), 0.001, "cache_store.publish:raise=READ_BUFFER_MISMATCH"),
    (Kind.RAISE, (_PREFILL,), 0.005, "prefill.answer:raise=EXECUTION_EXCEPTION"),
    (Kind.RAISE, (_DECODE,), 0.01, "cache_store.load_start:raise=CACHE_STORE_LOAD_CONNECT_FAILED"),
    (Kind.RAISE, (_DECODE,), 0.01, "cache_store.prove:raise=CONNECTION_RESET_BY_PEER"),
    (Kind.RAISE, (_DECODE,), 0.005, "decode.reserved:raise=DECODE_MALLOC_FAILED"),
    (Kind.RAISE, _SERVERS, 0.05, "cache_store.handshake:raise=CACHE_STORE_CALL_PREFILL_TIMEOUT"),
    (Kind.RAISE, _SERVERS, 0.01, "request.admit:raise=MALLOC_FAILED"),
    (Kind.RAISE, _SERVERS, 0.001, "engine.step:raise=EXECUTION_EXCEPTION"),
    (Kind.RAISE, _SERVERS, 0.0005, "engine.layer:raise=EXECUTION_EXCEPTION"),
    (Kind.RAISE, _SERVERS, 0.05, "engine.load:raise=MALLOC_FAILED"),
    (Kind.RAISE, (_ROUTER,), 0.0005, "router.stage:raise=EXECUTION_EXCEPTION"),
    (Kind.FULL, _SERVERS, 0.002, "cache_store.queue:full"),
    (Kind.FULL, (_ROUTER,), 0.003, "router.queue:full"),
    (Kind.DELAY, _SERVERS, 0.02, "cache_store.tier:delay=0.3"),
    (Kind.DELAY, _SERVERS, 0.002, "cache_store.tier:delay=4"),
    (Kind.DROP, _SERVERS, 0.02, "cache_store.tier:drop"),
    (Kind.CORRUPT, _SERVERS, 0.02, "cache_store.tier:corrupt"),
    (Kind.RAISE, _SERVERS, 0.02, "cache_store.tier:raise=UNKNOWN_ERROR"),
    (Kind.FULL, _SERVERS, 0.02, "cache_store.tier:full"),
    (Kind.CLOCK, _SERVERS, 0.0002, "cache_store.clock:jump=45,times=2"),
    # Deadlines are readings of the front's clock: an engine that is ahead leaves every later request less time.
    (Kind.CLOCK, _SERVERS, 0.0002, "engine.clock:jump=5,times=1"),
)


def armament(role: str, kinds: Collection[Kind], seed: int, file: Path, intensity: float = 1.0) -> str:
    """BATON_FAULTS of one start of a process of this role, in force while `file` exists. `intensity`: factor of the
    chances."""
    armed = []
    for kind, roles, chance, point in _POINTS:
        if role in roles and kind in kinds:
            armed.append(f"{point},probability={min(1.0, chance * intensity):g},seed={seed},while={file}")
    return ";".join(armed)


@dataclass(frozen=True)
class Blow:
    """One blow at one process. `part`: front or engine. `lasts_s`: a pause's length, or the wait before a new start.
    `last_too`: dealt also when no other server of the role stands, which leaves the router none. `waits`: other blows
    do not come after it, and when it cannot be dealt in its time, it is dealt as soon as it can."""

    after_s: float  # since the blow before; of one that waits, since the first fault
    kind: Kind
    role: str
    index: int
    part: str
    lasts_s: float
    last_too: bool
    waits: bool = False
    turn: int = 0  # not dealt to a server that has been started more often already; 0: dealt all the same


def can_start_again(kinds: Collection[Kind]) -> bool:
    """Whether servers are started again in a campaign with these kinds."""
    return Kind.KILL in kinds or Kind.RESTART in kinds


def _first_blows(possible: list[Kind], servers: dict[str, int], turns: int) -> Iterator[Blow]:
    if Kind.PAUSE in possible and servers.get(_PREFILL):
        yield Blow(0.0, Kind.PAUSE, _PREFILL, 0, "front", 1.0, False, waits=True)
    ends = [kind for kind in possible if kind is not Kind.PAUSE]
    for turn in range(1, 1 + turns if ends else 0):
        for index in range(servers.get(_DECODE, 0)):
            kind = ends[(turn + index) % len(ends)]
            yield Blow(turn * TURN_S, kind, _DECODE, index, "front", 0.0, True, waits=True, turn=turn)


def blows(seed: int, kinds: Collection[Kind], servers: dict[str, int], gap_s: float, turns: int = 0) -> Iterator[Blow]:
    """Blows without end, `gap_s` apart on average; none when `kinds` has none.

    Some leave nothing to chance: a pause, and `turns` times all decode servers end at once, by kills and restarts in
    turn, so that each starts as often as that.
    """
    draws = random.Random(f"blows:{seed}")
    possible = [kind for kind in BLOWS if kind in kinds]
    yield from _first_blows(possible, servers, turns)
    targets = [(role, index) for role, count in servers.items() for index in range(count)]
    while possible and targets:
        # A pause costs nothing, a start seconds of a processor.
        weights = [3 if kind is Kind.PAUSE else 2 if kind is Kind.KILL else 1 for kind in possible]
        (kind,) = draws.choices(possible, weights)
        role, index = draws.choice(targets)
        part = "front" if kind is Kind.RESTART else draws.choice(("front", "engine"))
        lasts_s = 0.1 * 60 ** draws.random() if kind is Kind.PAUSE else draws.uniform(0.0, 2.0)
        last_too = draws.random() < LAST_TOO
        yield Blow(draws.expovariate(1 / gap_s), kind, role, index, part, lasts_s, last_too)
