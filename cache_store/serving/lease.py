"""Leases: who keeps staged KV alive on the prefill server, and when it may be freed. Pure, with an injected clock.

States and transitions are those of docs/protocol.md, section "Lease". A lease ends exactly once (`take_ended`), and
only when no reader holds its blocks.

Several ranks of the decode server may read one rank's KV, each by loads of its own; the lease is released when every
one of them has released it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cache_store.events import ExpiryCause, LeaseEnded, Outcome, Timeline
from cache_store.failures import again
from cache_store.geometry.layout import GroupLayout
from cache_store.observations import Observe, ignore
from cache_store.serving.reader import ONLY_RANK, Caller, Reader, ReaderState, WantedGroup
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode

MAX_LOADS = 2  # the load and its one reload


class LeaseState(StrEnum):
    RUNNING = "running"  # the prompt is being computed; no clock runs
    COMPUTED = "computed"  # staged; ends at `expires_at` unless renewed
    ENDING = "ending"  # its end is decided, but a reader still holds the blocks
    ENDED = "ended"


@dataclass
class Served:
    """What one rank of the decode server has had of a lease."""

    loads: int = 0
    last: ReaderState | None = None  # how its last load ended
    direct: bool = False  # it reads here itself, and may go on when the reader is closed
    released: bool = False


@dataclass
class Lease:
    """Staged KV of one request. `ready[tag][layer]` is the number of leading blocks that may be read."""

    key: str
    generation: int
    prompt_tokens: int
    blocks: dict[str, list[int]]
    ready: dict[str, list[int]]
    cached_blocks: int
    admitted_at: float
    state: LeaseState = LeaseState.RUNNING
    hold: bool = True
    result: common_pb2.PrefillResult | None = None
    readers: dict[int, Reader] = field(default_factory=dict)  # open ones, by rank of the decode server
    served: dict[int, Served] = field(default_factory=dict)  # by rank of the decode server
    group: tuple[int, ...] = ()  # ranks that have to release it; empty until the first of them has called
    reader_tp_size: int = 0  # of their server
    published: int = 0  # how often a layer got further
    expires_at: float | None = None
    computed_at: float | None = None
    publish_seconds: float = 0.0
    outcome: Outcome = "released"
    cause: ExpiryCause = ""
    error: BatonError | None = None  # what later and open loads end with, once the end is decided
    events: Timeline = field(default_factory=list)
    load_times: list[tuple[str, int, int]] = field(default_factory=list)
    word: tuple[int, int] | None = None  # index and value of its word, once a direct reader has come

    @property
    def sent(self) -> bool:
        """Everything was sent to every rank that reads it."""
        return bool(self.group) and all(
            rank in self.served and (self.served[rank].last is ReaderState.SENT or self.served[rank].released)
            for rank in self.group
        )

    @property
    def released(self) -> bool:
        return bool(self.group) and all(rank in self.served and self.served[rank].released for rank in self.group)

    @property
    def unneeded(self) -> bool:
        """Nobody reads it, and of those who have to do with it each has had its load. One that reads by itself may go
        on when its load is closed, until it releases."""
        return not self.readers and all(
            rank in self.served and not (self.served[rank].direct and self.served[rank].last is ReaderState.SENT)
            for rank in self.group
        )


@dataclass(frozen=True)
class Remembered:
    """An ended, failed or aborted key: what a late reference to it gets."""

    error: BatonError
    until: float
    generation: int | None = None
    released: bool = False
    tombstone: bool = False


class Words(Protocol):
    """Where direct readers see whether a lease stands (`memory.lease_words`)."""

    def take(self) -> tuple[int, int] | None:
        """Index and value of a word; None when there is none."""
        ...

    def clear(self, index: int) -> None:
        """The lease stands no longer."""
        ...


def _served() -> BatonError:
    return BatonError(ErrorCode.DUPLICATE_REQUEST, "this key was served and released already")


def stale(kind: str, message: str) -> BatonError:
    return BatonError(ErrorCode.KV_STALE_REFERENCE, message, metadata={"kind": kind})


class LeaseTable:
    """All leases of one engine rank. Not thread-safe; belongs to the agent's loop."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        lease_seconds: float,
        load_stall_s: float,
        remember_s: float,
        max_remembered: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        observe: Observe = ignore,
        words: Words | None = None,
    ) -> None:
        self._words = words
        self.lease_seconds = lease_seconds
        self._layouts = {layout.tag: layout for layout in layouts}
        self._load_stall_s = load_stall_s
        self._remember_s = remember_s
        self._max_remembered = max_remembered
        self._clock = clock
        self._clock_ns = clock_ns
        self._observe = observe
        self._leases: dict[str, Lease] = {}
        self._remembered: OrderedDict[str, Remembered] = OrderedDict()
        self._tombstones = 0
        self._ended: list[LeaseEnded] = []
        self._next_tick = clock() + lease_seconds / 3

    # ---- the engine's side

    def admit(
        self,
        key: str,
        generation: int,
        prompt_tokens: int,
        blocks: Mapping[str, Sequence[int]],
        ready_tokens: int,
    ) -> Lease | None:
        """RUNNING; blocks of the first `ready_tokens` tokens may be read at once. A key that was tombstoned or has
        failed gives an ended lease at once, and None.

        Raises ValueError for a key that has a lease already, and for blocks that do not fit the prompt.
        """
        if key in self._leases:
            raise ValueError(f"{key} has a lease already")
        counts = {tag: layout.num_blocks(prompt_tokens) for tag, layout in self._layouts.items()}
        if prompt_tokens < 1 or set(blocks) != set(counts) or not 0 <= ready_tokens <= prompt_tokens:
            raise ValueError(
                f"{key}: blocks of groups {sorted(blocks)} for {prompt_tokens} tokens, {ready_tokens} ready"
            )
        for tag, count in counts.items():
            if len(blocks[tag]) < count:
                raise ValueError(f"{key}: {len(blocks[tag])} blocks of {count} in {tag!r}")
        ready = {
            tag: count if ready_tokens == prompt_tokens else ready_tokens // self._layouts[tag].block_size
            for tag, count in counts.items()
        }
        now = self._clock()
        lease = Lease(
            key,
            generation,
            prompt_tokens,
            {tag: list(blocks[tag][:count]) for tag, count in counts.items()},
            {tag: [ready[tag]] * layout.num_layers for tag, layout in self._layouts.items()},
            max(ready.values()),
            now,
        )
        self._mark(lease, "admitted")
        known = self._recall(key)
        if known is not None:
            self._finish(lease, "aborted", known.error)
            return None
        self._leases[key] = lease
        for tag, count in counts.items():
            if ready[tag] >= count:
                self._mark_published(lease, tag, range(self._layouts[tag].num_layers))
        return lease

    def publish(self, key: str, group: str, layer: int, upto_block: int) -> None:
        """Blocks [0, upto_block) of a layer are final. A key without lease is ignored.

        Raises ValueError for a group, layer or block that the request does not have.
        """
        lease = self._leases.get(key)
        if lease is None:
            return
        ready = lease.ready.get(group)
        if ready is None or not 0 <= layer < len(ready) or not 0 <= upto_block <= len(lease.blocks[group]):
            raise ValueError(f"{key}: block {upto_block} of layer {layer} of group {group!r} does not exist")
        if lease.state is not LeaseState.RUNNING or upto_block <= ready[layer]:
            return
        ready[layer] = upto_block
        lease.published += 1
        if upto_block == len(lease.blocks[group]):
            self._mark_published(lease, group, (layer,))
        self._notify(lease)

    def computed(self, key: str, result: common_pb2.PrefillResult, hold: bool, called_at: float | None = None) -> None:
        """COMPUTED: the lease clock starts. Without `hold` the lease ends as soon as no reader is left.

        `called_at` is the time at which the engine said so. Raises ValueError when a block was not published.
        """
        lease = self._leases.get(key)
        if lease is None or lease.state is not LeaseState.RUNNING:
            return
        for tag, ready in lease.ready.items():
            if min(ready) < len(lease.blocks[tag]):
                raise ValueError(f"{key}: computed with unpublished blocks in group {tag!r}")
        now = self._clock()
        lease.state = LeaseState.COMPUTED
        lease.result = result
        lease.hold = hold
        lease.computed_at = now if called_at is None else called_at
        lease.publish_seconds = max(0.0, now - lease.computed_at)
        lease.expires_at = now + self.lease_seconds
        self._mark(lease, "computed")
        self._notify(lease)
        if lease.released:
            self._end(lease, "released", _served())
        elif not hold and lease.unneeded:
            self._end(lease, "released", self._gone("the prompt's KV was not kept"))

    def fail(self, key: str, error: BatonError) -> bool:
        """The request failed or was aborted. False: the key has no lease, or its end was decided before."""
        lease = self._leases.get(key)
        if lease is None:
            if self._recall(key) is None:
                self._remember(key, Remembered(error, self._clock() + self._remember_s))
            return False
        return self._end(lease, "aborted", error)

    def tombstone(self, key: str) -> BatonError:
        """Aborts a key that has no lease; a lease that exists ends like by `fail`."""
        error = BatonError(ErrorCode.REQUEST_TOMBSTONED, "the request was aborted before it came")
        if key in self._leases:
            self.fail(key, error)
        elif self._recall(key) is None:
            self._remember(key, Remembered(error, self._clock() + self._remember_s, tombstone=True))
        return error

    def close(self, error: BatonError) -> None:
        """Ends every lease."""
        for key in list(self._leases):
            self.fail(key, error)

    # ---- the peers' side

    def open_load(
        self,
        key: str,
        generation: int | None,
        prompt_tokens: int,
        wanted: tuple[WantedGroup, ...],
        chunk_bytes: int,
        direct: bool = False,
        caller: Caller = ONLY_RANK,
    ) -> Reader | None:
        """A reader of the key's blocks; None when the key is not admitted yet, so that the load has to be parked.

        Each rank of the caller's server has one load open at a time, and one reload."""
        lease = self._leases.get(key)
        if lease is None:
            self._refuse_unknown(key, generation)
            return None
        self._check_generation(lease, generation)
        if lease.error is not None:
            raise again(lease.error)
        served = self._of(lease, caller)
        if caller.rank in lease.readers:
            raise BatonError(ErrorCode.DUPLICATE_REQUEST, "a load of this key is open already")
        if served.released or served.loads >= MAX_LOADS or (served.last is ReaderState.SENT and generation is None):
            raise BatonError(ErrorCode.DUPLICATE_REQUEST, "this key was served already, with its one reload")
        if served.loads and generation is None:
            raise BatonError(
                ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
                "reference.generation is required in a reload",
                param="reference.generation",
            )
        if prompt_tokens != lease.prompt_tokens:
            raise self._out_of_range(f"prompt of {prompt_tokens} tokens, staged are {lease.prompt_tokens}")
        for group in wanted:
            have = group.blocks_of(prompt_tokens)
            if group.end > have:
                raise self._out_of_range(
                    f"blocks [{group.first_block}, {group.end}) of {group.layout.tag!r}, staged are {have}"
                )
        self._attach(lease, caller, served)
        served.loads += 1
        served.direct = direct
        if direct and lease.word is None and self._words is not None:
            lease.word = self._words.take()
        reader = Reader(lease, wanted, chunk_bytes, self._clock(), direct, caller.rank)
        lease.readers[caller.rank] = reader
        self._mark(lease, "load_opened")
        return reader

    def open_reader(self, key: str, rank: int) -> Reader | None:
        """Of that rank of the decode server."""
        lease = self._leases.get(key)
        return None if lease is None else lease.readers.get(rank)

    def close_load(self, reader: Reader, sent: bool) -> None:
        """The reader lets go of the blocks. `sent`: everything and the result were handed over. Idempotent."""
        if reader.state is not ReaderState.OPEN:
            return
        reader.state = ReaderState.SENT if sent else ReaderState.FAILED
        lease = reader.lease
        lease.served[reader.rank].last = reader.state
        del lease.readers[reader.rank]
        for call in reader.on_close:
            call()
        if reader.traceparent:
            lease.load_times.append((reader.traceparent, reader.called_ns, self._clock_ns()))
        if lease.state is LeaseState.ENDING:
            if not lease.readers:
                self._finish(lease, lease.outcome, lease.error)
        elif lease.state is LeaseState.COMPUTED and not lease.hold and lease.unneeded:
            self._end(lease, "released", self._gone("the prompt's KV was not kept"))
        elif lease.state is LeaseState.COMPUTED:
            lease.expires_at = self._clock() + self.lease_seconds

    def renew(self, key: str, generation: int | None, source: str = "queued") -> float:
        """Renewal for a request that waits on the decode server, or reads (source `open_load`); seconds until the lease
        ends. Success says that the blocks of this generation were never given back up to now."""
        lease = self._leases.get(key)
        try:
            if lease is None:
                known = self._recall(key)
                if known is not None and (generation is None or generation == known.generation):
                    raise again(known.error)
                if known is not None:
                    raise self._reused()
                raise BatonError(
                    ErrorCode.KV_LEASE_EXPIRED, "no lease of this key is known", metadata={"kind": "unknown"}
                )
            self._check_generation(lease, generation)
            if lease.error is not None:
                raise again(lease.error)
        except BatonError as error:
            ended = error.code is ErrorCode.KV_LEASE_EXPIRED and error.metadata.get("kind") != "unknown"
            self._observe("kv_lease_renewals_total", source=source, result="expired" if ended else "unknown")
            raise
        self._observe("kv_lease_renewals_total", source=source, result="ok")
        if lease.state is LeaseState.COMPUTED:
            lease.expires_at = self._clock() + self.lease_seconds
        return self.lease_seconds

    def release(
        self,
        key: str,
        generation: int | None,
        complete: bool,
        cause: BatonError | None = None,
        caller: Caller = ONLY_RANK,
    ) -> bool:
        """A rank of the decode server has everything, or gives up. False: no such lease, or it has ended; nothing was
        done. When one rank gives up, the lease ends for all.

        Raises KV_STALE_REFERENCE for another generation, INVALID_PARAMS for `complete` before everything was sent.
        """
        lease = self._leases.get(key)
        if lease is None:
            return False
        self._check_generation(lease, generation)
        if lease.error is not None:
            return False
        if complete:
            served = self._of(lease, caller)
            if caller.reads and served.last is not ReaderState.SENT:
                raise BatonError(
                    ErrorCode.INVALID_PARAMS,
                    "complete must be false as long as the load has not ended",
                    param="complete",
                )
            if served.released:
                return False
            self._attach(lease, caller, served)
            served.released = True
            if lease.state is LeaseState.COMPUTED:
                lease.expires_at = self._clock() + self.lease_seconds
                # A rank that only releases may be earlier than the computation here, which still needs the blocks.
                if lease.released:
                    self._end(lease, "released", _served())
            return True
        gone = self._gone("the decode server gave up the KV")
        if cause is not None:
            gone.with_context(cause=cause.code.name, cause_code=str(int(cause.code)))
        return self._end(lease, "aborted", gone)

    # ---- the clock's side

    def tick(self, may_renew: Callable[[str], bool] = lambda key: True) -> None:
        """Renews what open loads keep alive, then ends every lease whose time has come.

        An open load renews as long as its reader took something within `load_stall_s`. `may_renew` is a fault point.
        """
        now = self._clock()
        renewal_due = now >= self._next_tick
        if renewal_due:
            self._next_tick = now + self.lease_seconds / 3
        for lease in list(self._leases.values()):
            if lease.state is not LeaseState.COMPUTED or lease.expires_at is None:
                continue
            if lease.readers and (renewal_due or lease.expires_at <= now):
                last = max(reader.last_progress for reader in lease.readers.values())
                moving = now - max(last, lease.computed_at or 0.0) < self._load_stall_s
                if moving and may_renew(lease.key):
                    lease.expires_at = now + self.lease_seconds
                    self._observe("kv_lease_renewals_total", source="open_load", result="ok")
            if lease.expires_at <= now:
                if lease.sent:
                    lease.cause = "never_released"
                else:
                    lease.cause = "load_stalled" if lease.served else "never_loaded"
                self._observe("kv_lease_expirations_total", cause=lease.cause)
                self._end(lease, "expired", self._gone("the lease on the prompt's KV has expired", lease.cause))
        self._purge(now)

    def next_tick_in(self) -> float:
        """Seconds until `tick` has something to do, at most a third of a lease."""
        now = self._clock()
        due = min(
            (lease.expires_at for lease in self._leases.values() if lease.expires_at is not None),
            default=self._next_tick,
        )
        return max(0.0, min(due, self._next_tick) - now)

    # ---- state; the figures may be read from any thread

    def take_ended(self) -> list[LeaseEnded]:
        """Leases that ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def get(self, key: str) -> Lease | None:
        return self._leases.get(key)

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def tombstones(self) -> int:
        return self._tombstones

    def readers(self) -> int:
        return sum(len(lease.readers) for lease in list(self._leases.values()))

    def oldest_computed(self) -> float | None:
        """When the oldest staged KV was computed; None when none is staged."""
        staged = [lease.computed_at for lease in list(self._leases.values())]
        return min((at for at in staged if at is not None), default=None)

    # ---- inside

    @staticmethod
    def _notify(lease: Lease) -> None:
        for reader in list(lease.readers.values()):
            reader.notify()

    @staticmethod
    def _of(lease: Lease, caller: Caller) -> Served:
        """What the caller has had of a lease. Raises DUPLICATE_REQUEST when another server reads it."""
        if lease.group and (lease.group != caller.group or lease.reader_tp_size != caller.tp_size):
            raise BatonError(
                ErrorCode.DUPLICATE_REQUEST,
                "another decode server loads this key",
                metadata={"tp_size": f"{caller.tp_size} / {lease.reader_tp_size}"},
            )
        return lease.served.get(caller.rank) or Served()

    @staticmethod
    def _attach(lease: Lease, caller: Caller, served: Served) -> None:
        lease.group = caller.group
        lease.reader_tp_size = caller.tp_size
        lease.served[caller.rank] = served

    @staticmethod
    def _gone(message: str, cause: str = "") -> BatonError:
        metadata = {"cause": cause} if cause else {}
        return BatonError(ErrorCode.KV_LEASE_EXPIRED, message, metadata={"kind": "expired", **metadata})

    def _reused(self) -> BatonError:
        return stale("reused", "the reference is to an earlier allocation of this key")

    def _out_of_range(self, what: str) -> BatonError:
        error = stale("out_of_range", "the reference is to blocks that this request does not have")
        return error.with_context(asked=what)

    def _check_generation(self, lease: Lease, generation: int | None) -> None:
        if generation is not None and generation != lease.generation:
            raise self._reused()

    def _refuse_unknown(self, key: str, generation: int | None) -> None:
        known = self._recall(key)
        if known is None:
            if generation is not None:  # it was admitted once, so it will not be again
                raise stale("unknown", "no KV of this generation is staged")
            return
        named = generation is not None and known.generation is not None
        if named and (generation != known.generation or known.released):
            raise self._reused()
        raise again(known.error)

    def _end(self, lease: Lease, outcome: Outcome, error: BatonError) -> bool:
        """Decides the end, once; the first cause stays."""
        if lease.error is not None:
            return False
        lease.error = error
        lease.outcome = outcome
        lease.expires_at = None
        if lease.word is not None and self._words is not None:  # before anybody else can have the blocks
            self._words.clear(lease.word[0])
            lease.word = None
        if lease.readers:
            lease.state = LeaseState.ENDING
            for reader in list(lease.readers.values()):
                reader.stop = error
                reader.notify()
        else:
            self._finish(lease, outcome, error)
        return True

    def _finish(self, lease: Lease, outcome: Outcome, error: BatonError | None) -> None:
        now = self._clock()
        lease.state = LeaseState.ENDED
        self._mark(lease, "lease_ended")
        self._leases.pop(lease.key, None)
        since = lease.admitted_at if lease.computed_at is None else lease.computed_at
        held = max(0.0, now - since)
        self._observe("kv_lease_hold_seconds", held, outcome=outcome)
        if error is not None and self._recall(lease.key) is None:
            released = outcome == "released"
            self._remember(lease.key, Remembered(error, now + self._remember_s, lease.generation, released=released))
        self._ended.append(
            LeaseEnded(
                lease.key,
                lease.generation,
                outcome,
                lease.cause,
                error if outcome == "aborted" else None,
                lease.publish_seconds,
                held if lease.computed_at is not None else 0.0,
                lease.events,
                lease.load_times,
            )
        )

    def _remember(self, key: str, what: Remembered) -> None:
        self._purge(self._clock())
        self._drop_remembered(key)
        self._remembered[key] = what
        self._tombstones += what.tombstone
        while len(self._remembered) > self._max_remembered:
            self._drop_remembered(next(iter(self._remembered)))

    def _drop_remembered(self, key: str) -> None:
        known = self._remembered.pop(key, None)
        if known is not None:
            self._tombstones -= known.tombstone

    def _recall(self, key: str) -> Remembered | None:
        known = self._remembered.get(key)
        return known if known is not None and known.until > self._clock() else None

    def _purge(self, now: float) -> None:
        # Every entry lives equally long, so the order is that of expiry.
        while self._remembered:
            key, known = next(iter(self._remembered.items()))
            if known.until > now:
                return
            self._drop_remembered(key)

    def _mark(self, lease: Lease, name: str) -> None:
        lease.events.append((name, self._clock_ns()))

    def _mark_published(self, lease: Lease, tag: str, layers: Sequence[int]) -> None:
        at = self._clock_ns()
        prefix = "layer_published:" if len(self._layouts) == 1 else f"layer_published:{tag}:"
        lease.events.extend((f"{prefix}{layer}", at) for layer in layers)
