"""Which faults a campaign has: the points armed in each process, and the blows at processes, as a seed has them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum


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


BLOWS = (Kind.KILL, Kind.PAUSE, Kind.RESTART)
_PREFILL, _DECODE, _ROUTER = "prefill", "decode", "router"
_SERVERS = (_PREFILL, _DECODE)
# (kind, processes, fault without its seed). Chances are per call; a load of a short prompt makes about ten calls of the
# points of events, so a few in a hundred loads are hit by each of them.
_POINTS: tuple[tuple[Kind, tuple[str, ...], str], ...] = (
    (Kind.DELAY, (_PREFILL,), "cache_store.send_event:delay=0.05,probability=0.02"),
    (Kind.DELAY, (_PREFILL,), "cache_store.send_event:delay=2.5,probability=0.001"),
    (Kind.DELAY, (_PREFILL,), "cache_store.load_open:delay=0.2,probability=0.02"),
    (Kind.DELAY, (_PREFILL,), "prefill.answer:delay=0.3,probability=0.02"),
    (Kind.DELAY, (_DECODE,), "cache_store.read_event:delay=0.05,probability=0.02"),
    (Kind.DELAY, (_DECODE,), "cache_store.read_event:delay=2.5,probability=0.001"),
    (Kind.DELAY, (_DECODE,), "cache_store.load_start:delay=0.2,probability=0.02"),
    (Kind.DELAY, (_DECODE,), "decode.tokens:delay=0.1,probability=0.005"),
    (Kind.DELAY, _SERVERS, "cache_store.handshake:delay=0.5,probability=0.1"),
    (Kind.DELAY, _SERVERS, "cache_store.release:delay=0.5,probability=0.05"),
    (Kind.DELAY, _SERVERS, "engine.step:delay=0.1,probability=0.01"),
    (Kind.DELAY, (_ROUTER,), "router.stage:delay=0.05,probability=0.01"),
    (Kind.DROP, (_PREFILL,), "cache_store.send_event:drop,probability=0.002"),
    (Kind.DROP, (_PREFILL,), "cache_store.send_piece:drop,probability=0.0005"),
    (Kind.DROP, (_PREFILL,), "cache_store.publish:drop,probability=0.002"),
    (Kind.DROP, (_PREFILL,), "prefill.answer:drop,probability=0.002"),
    (Kind.DROP, (_DECODE,), "cache_store.read_event:drop,probability=0.002"),
    (Kind.DROP, (_DECODE,), "decode.reserved:drop,probability=0.005"),
    (Kind.DROP, _SERVERS, "cache_store.renew:drop,probability=0.3"),
    (Kind.DROP, _SERVERS, "cache_store.release:drop,probability=0.03"),
    (Kind.DUPLICATE, (_PREFILL,), "cache_store.send_event:duplicate,probability=0.003"),
    (Kind.DUPLICATE, (_DECODE,), "cache_store.read_event:duplicate,probability=0.003"),
    (Kind.DUPLICATE, _SERVERS, "cache_store.release:duplicate,probability=0.05"),
    (Kind.CORRUPT, (_PREFILL,), "cache_store.piece_bytes:corrupt,probability=0.005"),
    (Kind.RAISE, (_PREFILL,), "cache_store.load_open:raise=CACHE_STORE_STORE_FAILED,probability=0.01"),
    (Kind.RAISE, (_PREFILL,), "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,probability=0.0005"),
    (Kind.RAISE, (_PREFILL,), "cache_store.publish:raise=READ_BUFFER_MISMATCH,probability=0.001"),
    (Kind.RAISE, (_PREFILL,), "prefill.answer:raise=EXECUTION_EXCEPTION,probability=0.005"),
    (Kind.RAISE, (_DECODE,), "cache_store.load_start:raise=CACHE_STORE_LOAD_CONNECT_FAILED,probability=0.01"),
    (Kind.RAISE, (_DECODE,), "decode.reserved:raise=DECODE_MALLOC_FAILED,probability=0.005"),
    (Kind.RAISE, _SERVERS, "cache_store.handshake:raise=CACHE_STORE_CALL_PREFILL_TIMEOUT,probability=0.05"),
    (Kind.RAISE, _SERVERS, "request.admit:raise=MALLOC_FAILED,probability=0.01"),
    (Kind.RAISE, _SERVERS, "engine.step:raise=EXECUTION_EXCEPTION,probability=0.001"),
    (Kind.RAISE, _SERVERS, "engine.layer:raise=EXECUTION_EXCEPTION,probability=0.0005"),
    (Kind.RAISE, _SERVERS, "engine.load:raise=MALLOC_FAILED,probability=0.05"),
    (Kind.RAISE, (_ROUTER,), "router.stage:raise=EXECUTION_EXCEPTION,probability=0.0005"),
    (Kind.FULL, _SERVERS, "cache_store.queue:full,probability=0.002"),
    (Kind.FULL, (_ROUTER,), "router.queue:full,probability=0.003"),
    (Kind.CLOCK, _SERVERS, "cache_store.clock:jump=45,probability=0.0002,times=2"),
    # Deadlines are readings of the front's clock: an engine that is ahead leaves every later request less time.
    (Kind.CLOCK, _SERVERS, "engine.clock:jump=5,probability=0.0002,times=1"),
)


def armament(role: str, kinds: Collection[Kind], seed: int) -> str:
    """BATON_FAULTS of one start of a process of this role."""
    return ";".join(f"{point},seed={seed}" for kind, roles, point in _POINTS if role in roles and kind in kinds)


@dataclass(frozen=True)
class Blow:
    """One blow at one process. `part`: front or engine. `lasts_s`: a pause's length, or the wait before a new start."""

    after_s: float  # since the blow before
    kind: Kind
    role: str
    index: int
    part: str
    lasts_s: float


def blows(seed: int, kinds: Collection[Kind], servers: dict[str, int], gap_s: float) -> Iterator[Blow]:
    """Blows without end, `gap_s` apart on average; none when `kinds` has none."""
    draws = random.Random(f"blows:{seed}")
    possible = [kind for kind in BLOWS if kind in kinds]
    targets = [(role, index) for role, count in servers.items() for index in range(count)]
    while possible and targets:
        # A pause costs nothing, a start seconds of a processor.
        weights = [3 if kind is Kind.PAUSE else 2 if kind is Kind.KILL else 1 for kind in possible]
        (kind,) = draws.choices(possible, weights)
        role, index = draws.choice(targets)
        part = "front" if kind is Kind.RESTART else draws.choice(("front", "engine"))
        lasts_s = 0.1 * 60 ** draws.random() if kind is Kind.PAUSE else draws.uniform(0.0, 2.0)
        yield Blow(draws.expovariate(1 / gap_s), kind, role, index, part, lasts_s)
