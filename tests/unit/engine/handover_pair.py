"""A prefill and a decode server as pure state machines: schedulers, ledgers, lease table, parking and loads.

Nothing runs by itself. What agents and the network do in between (`cache_store/agent.py`, `puller.py`, `sending.py`)
is done by hand, one event at a time, so that a test can choose any order. KV is what `ScriptedEngine` takes it for: the
token whose KV lies in a slot of a block. A load copies it out of P's pool when its event is sent, so a block that was
given to somebody else meanwhile leads to wrong tokens. With a one-sided transport the event names P's blocks alone: D
copies them at any later time, whatever has become of them, and then asks P whether the lease stood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from cache_store.events import LeaseEnded
from cache_store.failures import blames_request
from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.pieces import Piece
from cache_store.loading import landing, puller
from cache_store.loading.load import TERMINAL, Load, LoadState, WantedHere
from cache_store.serving.lease import LeaseTable
from cache_store.serving.parking import Parked, ParkedState, ParkingTable
from cache_store.serving.reader import Caller, Reader, ReaderState, WantedGroup
from cache_store.transports import GRPC, IPC
from engine.messages import PrefillInfo
from engine.requests import Answer, Request
from engine.scheduler.scheduler import Scheduler
from protos import cache_store_pb2 as pb
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.scripted_engine import ScriptedEngine

BLOCK = 4
LAYERS = 2
LAYOUT = GroupLayout.of("full", num_layers=LAYERS, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")
LEASE_S = 30.0
STALL_S = 60.0
REMEMBER_S = 600.0
PROGRESS_S = 5.0
PUBLISH_S = 20.0


def result_of(answer: Answer) -> common_pb2.PrefillResult:
    token = common_pb2.TokenOutput(index=answer.index, token_id=answer.token_id)
    return common_pb2.PrefillResult(
        first_token=token, cached_tokens=0, prefill_cuda_graph_status=answer.info.cuda_graph_status
    )


class Prefill:
    """P. A restart is another object: nothing of the old one is left but what others remember of it."""

    def __init__(self, engine_id: int, now: float, num_blocks: int = 14) -> None:
        self.engine_id = engine_id
        self.engine = ScriptedEngine(num_blocks=num_blocks, max_num_batched_tokens=8)
        self.engine.now = now
        self.table = LeaseTable(
            (LAYOUT,),
            lease_seconds=LEASE_S,
            load_stall_s=STALL_S,
            remember_s=REMEMBER_S,
            clock=lambda: self.engine.now,
            clock_ns=lambda: int(self.engine.now * 1e9),
        )
        self.parking = ParkingTable(4, 4, PUBLISH_S, lambda: self.engine.now)
        self.engine.transfer = self  # type: ignore[assignment]
        self.engine.scheduler = Scheduler(self.engine.kv, self.engine.limits, self, self.engine.time)  # type: ignore[arg-type]
        self.ended: dict[tuple[str, int], LeaseEnded] = {}
        self.admitted: set[tuple[str, int]] = set()

    # -- what the scheduler asks of its agent

    def admit(self, request: Request) -> None:
        allocation = request.allocation
        assert allocation is not None
        self.admitted.add((request.key, allocation.generation))
        lease = self.table.admit(
            request.key,
            allocation.generation,
            len(request.tokens),
            {"full": allocation.table("full")},
            request.computed,
        )
        if lease is not None:
            self.parking.admit(request.key)

    def computed(self, request: Request, answer: Answer) -> None:
        self.publish()
        if self.table.get(request.key) is not None:
            for layer in range(LAYERS):
                self.table.publish(request.key, "full", layer, LAYOUT.num_blocks(len(request.prompt)))
        self.table.computed(request.key, result_of(answer), True)

    def fail(self, request_key: str, error: BatonError) -> None:
        self.table.fail(request_key, error)
        self.parking.refuse(request_key, error)

    def tombstone(self, request_key: str) -> None:
        self.parking.refuse(request_key, self.table.tombstone(request_key))

    def keep_alive(self, request: Request) -> None:
        raise AssertionError("a prefill server loads nothing")

    # -- what happens to it

    def step(self) -> None:
        self.engine.step()
        self.publish()
        self.deliver()

    def publish(self) -> None:
        """The blocks that a step has filled, of all layers."""
        for request in self.engine.scheduler.open.values():
            if self.table.get(request.key) is not None:
                for layer in range(LAYERS):
                    self.table.publish(request.key, "full", layer, request.computed // BLOCK)

    def tick(self) -> None:
        self.table.tick()
        self.parking.expire()
        self.deliver()

    def deliver(self, again: bool = False) -> None:
        """Tells the scheduler of leases that have ended; with `again` of one that it has heard of before, too."""
        for ended in self.table.take_ended():
            identity = (ended.request_key, ended.generation)
            assert identity not in self.ended, "a lease ended twice"
            self.ended[identity] = ended
            self.tell(ended)
        if again and self.ended:
            self.tell(next(reversed(self.ended.values())))
        self.engine.collect()

    def tell(self, ended: LeaseEnded) -> None:
        self.engine.time.refresh()
        self.engine.scheduler.lease_ended(
            ended.request_key, ended.generation, ended.outcome, ended.cause, ended.error, 0.0, 0.0, []
        )


@dataclass(frozen=True)
class Event:
    """Blocks of a layer on their way to D: where they lie at P and, unless D is to read them there, what they hold."""

    layer: int
    blocks: list[int]
    sources: list[int]
    contents: list[list[int]]


@dataclass(frozen=True)
class Copy:
    """What D has begun to read in P's memory."""

    piece: Piece
    targets: list[int]


@dataclass(eq=False)
class Stream:
    """The load of one rank: D's end (`load`), and P's once it is open (`reader`, `parked`)."""

    key: str
    rank: int
    load: Load
    source: Prefill
    generation: int | None
    reader: Reader | None = None
    parked: Parked | None = None
    told_computed: bool = False
    sent: int = 0
    on_the_way: list[Event] = field(default_factory=list)
    copying: list[Copy] = field(default_factory=list)
    asked: bool = False  # whether the lease stood
    proof: BatonError | bool = False  # P's answer


@dataclass(eq=False)
class Pull:
    """One load of one key, of all ranks of the decode server. It ends once, when nothing writes its blocks any more."""

    request: Request
    streams: list[Stream]
    reload: bool
    error: BatonError | None = None
    cancelled: bool = False


class Decode:
    """D, with `ranks` readers, each of which has its part of every block in a pool of its own. `direct`: it reads P's
    memory itself."""

    def __init__(self, source: Prefill, now: float, ranks: int = 1, num_blocks: int = 14, direct: bool = False) -> None:
        self.source = source
        self.direct = direct
        self.ranks = ranks
        self.group = tuple(range(ranks))
        self.engine = ScriptedEngine(
            num_blocks=num_blocks, reserve_timeout_s=20.0, reserve_attempts=100_000, max_num_batched_tokens=8
        )
        self.engine.now = now
        self.engine.transfer = self  # type: ignore[assignment]
        self.engine.scheduler = Scheduler(self.engine.kv, self.engine.limits, self, self.engine.time)  # type: ignore[arg-type]
        self.pulls: dict[str, Pull] = {}
        self.kept: dict[str, tuple[Prefill, list[int | None]]] = {}  # failed, may be repeated
        self.copies: dict[tuple[int, int, int, int], int] = {}  # rank, layer, block, slot -> token

    def caller(self, rank: int) -> Caller:
        return Caller(rank, self.ranks, self.group)

    # -- what the scheduler asks of its agent

    def load(self, request: Request, deadline_s: float | None, reload: bool) -> None:
        assert request.key not in self.pulls, "a second load beside an open one"
        assert request.allocation is not None
        held = request.allocation.groups["full"]
        first, last = held.receiving
        source, generations = self.kept.pop(request.key, (self.source, [None] * self.ranks))
        wanted = WantedHere(LAYOUT, first, held.blocks[first:last], LAYOUT.block_bytes, ((0, LAYOUT.block_bytes),))
        deadline = math.inf if deadline_s is None else self.engine.now + deadline_s
        streams = [
            Stream(
                request.key,
                rank,
                Load(
                    (wanted,),
                    "off",
                    PROGRESS_S,
                    PUBLISH_S,
                    deadline,
                    lambda: self.engine.now,
                    transport=IPC if self.direct else GRPC,
                ),
                source,
                generations[rank],
            )
            for rank in self.group
        ]
        self.pulls[request.key] = Pull(request, streams, reload)

    def keep_alive(self, request: Request) -> None:
        """The test renews, or does not."""

    def forget(self, request_key: str) -> None:
        self.kept.pop(request_key, None)

    def tombstone(self, request_key: str) -> None:
        """Of a key that this engine does not know: nobody loads from it."""

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        pull = self.pulls.get(request_key)
        if pull is not None:
            if pull.error is None:
                pull.error = error
            pull.cancelled = True
            return
        source, generations = self.kept.pop(request_key, (self.source, [None] * self.ranks))
        self._release(source, request_key, generations, error)

    # -- what happens to its streams

    def open(self, stream: Stream) -> None:
        """The call reaches P, or P looks again at a load that it has parked."""
        load, source = stream.load, stream.source
        if load.state in TERMINAL or stream.reader is not None:
            return
        try:
            if source is not self.source:
                raise BatonError(ErrorCode.PEER_RESTARTED)
            if stream.parked is not None:
                if stream.parked.state is ParkedState.PARKED:
                    return
                if stream.parked.error is not None:
                    raise stream.parked.error
            tokens = len(self.pulls[stream.key].request.tokens)
            wanted = tuple(WantedGroup(LAYOUT, each.first_block, len(each.block_ids)) for each in load.wanted)
            reader = source.table.open_load(
                stream.key,
                stream.generation,
                tokens,
                wanted,
                LAYOUT.block_bytes,
                self.direct,
                self.caller(stream.rank),
            )
            if reader is None:
                if stream.parked is not None:
                    raise BatonError(ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT)
                stream.parked = source.parking.park(stream.key, "d", stream.rank)
                return
        except BatonError as error:
            load.fail(error)
            return
        stream.reader = reader
        stream.generation = reader.lease.generation
        load.on_started(pb.Started(generation=reader.lease.generation, cached_blocks=0))
        load.on_state(pb.COMPUTE_STATE_RUNNING)

    def send(self, stream: Stream) -> None:
        """P's end: the next event, with the bytes that are in its pool now."""
        reader = stream.reader
        if reader is None or reader.state is not ReaderState.OPEN:
            return
        if reader.stop is not None:
            stream.source.table.close_load(reader, sent=False)
            self._fail(stream, reader.stop)
            return
        run = reader.next_run()
        if run is not None:
            ids = reader.lease.blocks["full"][run.first : run.first + run.count]
            contents = [] if self.direct else read(stream.source, ids)
            blocks = list(range(run.first, run.first + run.count))
            stream.on_the_way.append(Event(run.layer, blocks, ids, contents))
            reader.sent(run.count, stream.source.engine.now)
            stream.sent += run.count
        elif reader.lease.result is not None and reader.exhausted():
            stream.source.table.close_load(reader, sent=True)

    def receive(self, stream: Stream, what: str = "deliver") -> None:
        """D's end: the oldest event that is on its way is delivered, or twice, or lost; the end, when nothing is."""
        load, reader = stream.load, stream.reader
        if load.state in TERMINAL or reader is None:
            return
        if stream.on_the_way:
            event = stream.on_the_way.pop(0)
            for _ in range({"lost": 0, "deliver": 1, "twice": 2}[what]):
                self._take(stream, event)
        elif reader.state is ReaderState.SENT:
            waits = stream.copying or (stream.asked and not stream.proof)
            if not waits:
                self._guarded(stream, lambda: self._finish(stream))
        elif reader.state is ReaderState.FAILED:
            self._fail(stream, reader.stop or BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))

    def copy(self, stream: Stream, which: int = 0) -> None:
        """One of the copies out of P's memory ends, of a load that has failed too: with what lies there now."""
        if not stream.copying:
            return
        copy = stream.copying.pop(which % len(stream.copying))
        self._write(stream, copy.piece.layer, copy.targets, read(stream.source, copy.piece.sources))
        stream.load.on_delivered(copy.piece)
        if not stream.load.missing:
            stream.asked = True

    def prove(self, stream: Stream) -> None:
        """P is asked, after the last copy, whether the lease stood all the time."""
        if not stream.asked or stream.proof:
            return
        source, generation = stream.source, stream.generation

        def ask() -> None:
            if source is not self.source:
                raise BatonError(ErrorCode.PEER_RESTARTED)
            source.table.renew(stream.key, generation, "open_load")

        error = refusal_of(ask)
        if error is not None and error.code not in landing._NOT_THEIRS and not blames_request(error):
            error = BatonError(ErrorCode.READ_TRANSFER_NOT_DONE)
        stream.proof = error or True

    def break_off(self, stream: Stream) -> None:
        """The connection is lost, at both ends."""
        self._hang_up(stream)
        self._fail(stream, BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))

    def settle(self, key: str) -> None:
        """The puller: one rank's failure or a cancel ends the other streams; the end follows when all are quiet."""
        pull = self.pulls.get(key)
        if pull is None:
            return
        if pull.error is None:
            pull.error = next((s.load.error for s in pull.streams if s.load.state is LoadState.FAILED), None)
        if pull.error is not None:
            for stream in pull.streams:
                self._hang_up(stream)
                self._fail(stream, pull.error)
        if any(stream.load.state not in TERMINAL or stream.copying for stream in pull.streams):
            return
        del self.pulls[key]
        source = pull.streams[0].source
        generations = [stream.generation for stream in pull.streams]
        self.engine.time.refresh()
        if pull.error is None:
            self._check(pull)
            self._release(source, key, generations, None)
            result = pull.streams[0].load.result
            assert result is not None
            answer = Answer(
                len(pull.request.outputs), result.first_token.token_id, info=PrefillInfo(0, "not_requested")
            )
            self.engine.scheduler.load_done(key, answer, [])
        else:
            retriable = (
                not pull.reload
                and not pull.cancelled
                and pull.error.code in puller._RETRIABLE
                and None not in generations
            )
            if retriable:
                self.kept[key] = (source, generations)
            else:
                self._release(source, key, generations, pull.error)
            self.engine.scheduler.load_failed(key, pull.error, retriable, [])
        self.engine.collect()

    def tick(self) -> None:
        for key, pull in list(self.pulls.items()):
            for stream in pull.streams:
                if stream.load.state not in TERMINAL and stream.load.wait_until() <= self.engine.now:
                    stream.load.on_timeout()
            self.settle(key)

    # -- inside

    def _take(self, stream: Stream, event: Event) -> None:
        layers = range(event.layer, event.layer + 1)
        sources = event.sources if self.direct else []
        piece = Piece("full", layers, event.blocks, LAYOUT.block_bytes, sources=sources)
        size = 0 if self.direct else len(event.blocks) * LAYOUT.block_bytes

        def take() -> None:
            wanted = stream.load.expect(piece, size)
            stream.load.on_taken(piece)
            targets = [wanted.block_ids[block - wanted.first_block] for block in event.blocks]
            if self.direct:
                stream.copying.append(Copy(piece, targets))
            else:
                self._write(stream, event.layer, targets, event.contents)
                stream.load.on_delivered(piece)

        self._guarded(stream, take)

    def _write(self, stream: Stream, layer: int, targets: list[int], contents: list[list[int]]) -> None:
        for target, content in zip(targets, contents, strict=True):
            for slot, token in enumerate(content):
                self.copies[stream.rank, layer, target, slot] = token

    def _finish(self, stream: Stream) -> None:
        reader = stream.reader
        assert reader is not None and reader.lease.result is not None
        if isinstance(stream.proof, BatonError):
            stream.load.fail_with(stream.proof)
        stream.load.on_state(pb.COMPUTE_STATE_COMPUTED)
        stream.load.on_done(pb.Done(result=reader.lease.result, pieces=stream.sent))
        stream.load.on_end()

    def _guarded(self, stream: Stream, act: Callable[[], object]) -> None:
        if refusal_of(act) is not None:
            self._hang_up(stream)
        assert stream.load.state is LoadState.FAILED or stream.load.error is None

    @staticmethod
    def _hang_up(stream: Stream) -> None:
        """P learns that its reader, or its caller who waits, has gone."""
        if stream.reader is not None:
            stream.source.table.close_load(stream.reader, sent=False)
        if stream.parked is not None:
            stream.source.parking.leave(stream.parked)

    @staticmethod
    def _fail(stream: Stream, error: BatonError) -> None:
        if stream.load.state not in TERMINAL:
            stream.load.fail(error)

    def _check(self, pull: Pull) -> None:
        """Every rank has every layer of every block that it wanted, of this prompt."""
        request = pull.request
        for stream in pull.streams:
            (wanted,) = stream.load.wanted
            for index, block in enumerate(wanted.block_ids, wanted.first_block):
                expected = request.tokens[index * BLOCK : (index + 1) * BLOCK]
                for layer in range(LAYERS):
                    found = [self.copies.get((stream.rank, layer, block, slot)) for slot in range(len(expected))]
                    assert found == expected, f"{request.key}: rank {stream.rank} got wrong KV of block {index}"
                for slot, token in enumerate(expected):
                    self.engine.pool[(block, slot)] = token

    def _release(self, source: Prefill, key: str, generations: list[int | None], error: BatonError | None) -> None:
        if source is not self.source:
            return  # it is gone, and so is what it held
        for rank, generation in enumerate(generations):
            refusal = refusal_of(
                partial(source.table.release, key, generation, error is None, error, self.caller(rank))
            )
            assert refusal is None or refusal.code is ErrorCode.KV_STALE_REFERENCE or error is not None, refusal
        source.deliver()


def read(source: Prefill, blocks: Iterable[int]) -> list[list[int]]:
    """What lies in blocks of P's pool now."""
    return [[source.engine.pool.get((block, slot), -1) for slot in range(BLOCK)] for block in blocks]


def refusal_of(call: Callable[[], object]) -> BatonError | None:
    """The error of a call; None when it has none."""
    try:
        call()
    except BatonError as error:
        return error
    return None
