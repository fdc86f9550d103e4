"""The fault points of the product: where each stands, what can be told apart there, and what can go wrong there.

`rpc.faults` refuses every name, label and action that is not in this table, so that a misspelt one is an error and not
a test of nothing. docs/chaos.md shows the table; a test keeps the two alike.
"""

from __future__ import annotations

from dataclasses import dataclass

DELAY = "delay"  # =SECONDS: whoever passes the point waits
RAISE = "raise"  # =CODE: a typed error arises there
DROP = "drop"  # what the point stands for is left out
DUPLICATE = "duplicate"  # it happens twice
CORRUPT = "corrupt"  # one byte of a payload is another, after its checksum was made
FULL = "full"  # the queue refuses, as if it had no room
JUMP = "jump"  # =SECONDS: the clock goes forward at once, and stays so
ACTIONS = (DELAY, RAISE, DROP, DUPLICATE, CORRUPT, FULL, JUMP)


@dataclass(frozen=True)
class FaultPoint:
    """`of`: the processes that pass it, R router, P prefill server, D decode server. `labels`: what `key=value` may
    ask for."""

    name: str
    of: str
    labels: tuple[str, ...]
    actions: tuple[str, ...]
    what: str


_FAILS = (DELAY, RAISE)
_LOST = (DELAY, RAISE, DROP)
_MESSAGE = (DELAY, RAISE, DROP, DUPLICATE)
_TABLE = (
    FaultPoint("router.stage", "R", ("stage", "request_id"), _FAILS, "a request enters a stage of the router"),
    FaultPoint("router.queue", "R", ("request_id",), (FULL,), "a request asks for its turn"),
    FaultPoint("request.admit", "P D", ("role", "request_key"), _FAILS, "a front takes a request in"),
    FaultPoint("prefill.answer", "P", ("request_key",), _LOST, "the answer to Prefill"),
    FaultPoint("decode.reserved", "D", ("request_key",), _LOST, "the word that KV blocks are reserved"),
    FaultPoint("decode.tokens", "D", ("request_key",), _FAILS, "each message with tokens, before it is sent"),
    FaultPoint("engine.load", "P D", ("rank",), _FAILS, "an engine begins to load its model"),
    FaultPoint("engine.stage", "P D", ("stage", "request_key"), _FAILS, "a request enters a stage of the engine"),
    FaultPoint("engine.step", "P D", ("kind", "request_key", "rank"), _FAILS, "a step; its first row's request"),
    FaultPoint("engine.layer", "P D", ("group", "layer", "rank"), _FAILS, "a layer of a prefill step is computed"),
    FaultPoint("engine.ordered", "P D", ("kind",), _FAILS, "rank 0, once the other ranks have the step"),
    FaultPoint("engine.rest", "P D", ("rank",), _FAILS, "an engine with nothing to do"),
    FaultPoint("engine.stop", "P D", ("rank",), _FAILS, "an engine is told to end"),
    FaultPoint("engine.clock", "P D", ("rank",), (JUMP,), "the clock of the scheduler: waits and deadlines"),
    FaultPoint("prefill_graph.capture", "P D", ("phase", "bucket"), _FAILS, "a prefill graph is captured"),
    FaultPoint("prefill_graph.prepare", "P D", ("step",), _FAILS, "the inputs of a prefill graph are laid out"),
    FaultPoint("cache_store.clock", "P D", ("rank",), (JUMP,), "the clock of leases, parked loads and loads"),
    FaultPoint("cache_store.queue", "P D", ("key", "what", "rank"), (FULL,),
               "a publish or a load of the engine is queued (what: publish, load), or a load is parked (what: park)"),
    FaultPoint("cache_store.handshake", "P D", ("side", "peer", "rank"), _FAILS,
               "a handshake, before it is asked for (side: decode) or answered (side: prefill)"),
    FaultPoint("cache_store.load_start", "D", ("key", "peer", "rank"), _FAILS, "a load begins"),
    FaultPoint("cache_store.load_open", "P", ("key", "rank"), _FAILS, "a load is opened"),
    FaultPoint("cache_store.publish", "P", ("key", "rank"), _MESSAGE, "blocks of a layer have become ready"),
    FaultPoint("cache_store.send_event", "P", ("key", "kind", "rank"), _MESSAGE,
               "an event of a load is sent (kind: started, running, pieces, computed, done); a delay is a slow sender"),
    FaultPoint("cache_store.send_piece", "P", ("key", "group", "layer", "block", "rank"), _LOST,
               "each block of a layer, before it goes into an event"),
    FaultPoint("cache_store.piece_bytes", "P", ("key", "group", "layer", "rank"), (CORRUPT,),
               "the payload of an event, once its checksum is made; of a transport that reads memory there is none"),
    FaultPoint("cache_store.read_event", "D", ("key", "rank"), _MESSAGE,
               "an event of a load is read; a delay is a slow reader"),
    FaultPoint("cache_store.lease_word", "D", ("key", "rank"), (DROP,),
               "the word that says that the lease stood is looked at; with a drop it says nothing"),
    FaultPoint("cache_store.prove", "D", ("key", "rank"), _FAILS,
               "whether the lease stood is asked, once everything was read in the peer's memory"),
    FaultPoint("cache_store.renew", "P D", ("key", "side", "rank"), _LOST,
               "a lease is renewed, by an open load (side: prefill), a queued request or a long read (side: decode)"),
    FaultPoint("cache_store.tier", "P D", ("tier", "operation"), (DELAY, RAISE, DROP, CORRUPT, FULL),
               "a tier is asked (operation: find, get), which a drop makes a miss, or given a block (put), which full "
               "makes it refuse; corrupt changes what get has read"),
    FaultPoint("cache_store.release", "P D", ("key", "side", "rank"), _MESSAGE,
               "the word that blocks may go, before it is sent (side: decode) or taken (side: prefill)"),
)  # fmt: skip
_points = {point.name: point for point in _TABLE}


def points() -> tuple[FaultPoint, ...]:
    """All points, in the order in which the documentation has them."""
    return tuple(_points.values())


def find(name: str) -> FaultPoint | None:
    return _points.get(name)


def add(point: FaultPoint) -> None:
    """One more point, of code that is not part of the product (a test's own)."""
    if _points.setdefault(point.name, point) != point:
        raise ValueError(f"there is a fault point {point.name} already")
