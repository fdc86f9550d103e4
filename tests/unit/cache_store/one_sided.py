"""A prefill server and a decode server that reads its blocks by itself, as plain state: what a stateful test drives.

Leases, readers and loads are those of the product. The rest (streams, copies, allocators) is modelled, so that each
step of each party can come at any moment: a notice long after it was written, the two halves of a block's copy with
anything in between, the question after the copies late, twice, or to a server that has started again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_store.events import LeaseEnded
from cache_store.geometry.pieces import Piece
from cache_store.loading.load import TERMINAL, Load, LoadState, WantedHere
from cache_store.serving import sending
from cache_store.serving.lease import LeaseState, LeaseTable
from cache_store.serving.reader import Caller, Reader, ReaderState, Run
from cache_store.transports import IPC
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.lease_fixtures import LAYOUT, Clock, make_table, prefill_result, wanted

BLOCKS = 2  # of a prompt
TOKENS = BLOCKS * LAYOUT.block_size
HALVES = 2  # a copy of a block takes so many moments
CHUNK_BYTES = LAYOUT.block_bytes  # a run is one block


class Bytes(NamedTuple):
    """What a part of a block holds: whose KV, and which part of it."""

    server: int  # which life of the prefill server
    key: str
    generation: int
    layer: int
    index: int  # of the block in the prompt
    half: int


class Cell(NamedTuple):
    """A place in a pool."""

    layer: int
    block: int
    half: int


Memory = dict[Cell, Bytes | None]
Prove = Callable[[LeaseTable, str, int | None], object]  # asks a table about a key and a generation


class LeaseWords:
    """The product's (memory.lease_words), with few words and no file."""

    def __init__(self, count: int = 2) -> None:
        self.values = [0] * count
        self.free = list(range(count))
        self.last = 0

    def take(self) -> tuple[int, int] | None:
        if not self.free:
            return None
        self.last += 1
        index = self.free.pop()
        self.values[index] = self.last
        return index, self.last

    def clear(self, index: int) -> None:
        self.values[index] = 0
        self.free.append(index)


class Prefill:
    """One life of a prefill server: its leases, its memory, and the blocks that belong to nobody. Without `words`
    readers have to ask."""

    def __init__(self, clock: Clock, life: int, pool: int, words: LeaseWords | None = None) -> None:
        self.life = life
        self.words = words
        self.table: LeaseTable = make_table(clock, words=words)
        self.memory: Memory = {}
        self.pool = pool
        self.free = set(range(pool))
        self.held: dict[tuple[str, int], list[int]] = {}  # by key and generation, until the LeaseEnded is taken
        self.ended: dict[tuple[str, int], LeaseEnded] = {}
        self.first_cause: dict[tuple[str, int], ErrorCode] = {}
        self.generations = 0

    def admit(self, key: str, ready: int) -> None:
        """Takes free blocks. They keep what they held before until they are written, but for the leading `ready`."""
        self.generations += 1
        generation = self.generations
        blocks = [self.free.pop() for _ in range(BLOCKS)]
        self.held[key, generation] = blocks
        for index in range(ready):
            for layer in range(LAYOUT.num_layers):
                self.write(key, generation, blocks, layer, index)
        self.table.admit(key, generation, TOKENS, {"full": blocks}, min(TOKENS, ready * LAYOUT.block_size))

    def write(self, key: str, generation: int, blocks: list[int], layer: int, index: int) -> None:
        for half in range(HALVES):
            cell = Cell(layer, blocks[index], half)
            self.memory[cell] = Bytes(self.life, key, generation, layer, index, half)

    def compute(self, key: str, layer: int, upto: int) -> None:
        """Writes what is missing of the leading `upto` blocks of a layer, and publishes them. As the engine does, also
        for a request that has been aborted and whose blocks it has not got back yet."""
        for (owner, generation), blocks in self.held.items():
            lease = self.table.get(key)
            if owner == key and lease is not None and lease.generation == generation:
                for index in range(lease.ready["full"][layer], upto):
                    self.write(key, generation, blocks, layer, index)
        self.table.publish(key, "full", layer, upto)

    def finish(self, key: str, hold: bool) -> None:
        for layer in range(LAYOUT.num_layers):
            self.compute(key, layer, BLOCKS)
        self.table.computed(key, prefill_result(), hold)

    def note_cause(self, key: str, code: ErrorCode) -> None:
        lease = self.table.get(key)
        if lease is not None and lease.error is None:
            self.first_cause[key, lease.generation] = code

    def take_ended(self) -> list[LeaseEnded]:
        """The engine's turn: blocks whose lease has ended are free, and the next request may have them."""
        taken = self.table.take_ended()
        for ended in taken:
            identity = (ended.request_key, ended.generation)
            assert identity not in self.ended, f"the lease of {identity} ended twice"
            self.ended[identity] = ended
            blocks = set(self.held.pop(identity))
            assert not blocks & self.free, "blocks were freed twice"
            self.free |= blocks
            cause = self.first_cause.get(identity)
            if cause is not None:
                assert ended.outcome == "aborted" and ended.error is not None and ended.error.code is cause
        return taken

    def scribble(self, block: int) -> None:
        """A free block goes to some other request, which writes it and has ended before anybody looks."""
        for layer in range(LAYOUT.num_layers):
            for half in range(HALVES):
                self.memory[Cell(layer, block, half)] = Bytes(self.life, "another", 0, layer, 0, half)


@dataclass
class Copy:
    """A half of a block on its way, read when its moment comes."""

    notice: Notice
    source: Cell
    target: Cell


@dataclass
class Notice:
    """What P said about a run, as D has understood it. `left`: halves not yet copied."""

    piece: Piece
    left: int = 0


@dataclass
class Transfer:
    """One load by one rank of the decode server, with both ends of its stream."""

    key: str
    caller: Caller
    server: Prefill
    reader: Reader
    load: Load
    targets: list[int]
    events: deque[tuple[str, object]] = field(default_factory=deque)  # written by P, not yet read by D
    copies: list[Copy] = field(default_factory=list)
    said: set[str] = field(default_factory=set)
    proof: BatonError | bool = False
    word: pb.LeaseWord | None = None
    announced: bool = False  # P has written everything, and let go of its blocks
    hung_up: bool = False  # D has ended the call, or its process has ended
    given_back: bool = False
    end: LoadState | None = None

    @property
    def identity(self) -> tuple[int, str, int, int]:
        """Which lease it reads, and which rank does."""
        return self.server.life, self.key, self.reader.lease.generation, self.caller.rank

    @property
    def quiet(self) -> bool:
        """Nothing writes its blocks any more."""
        return self.load.state in TERMINAL and not self.copies

    # ---- P's end of the stream

    def serve(self) -> bool:
        """P's next step. False: there is none now."""
        reader, lease, table = self.reader, self.reader.lease, self.server.table
        if reader.state is not ReaderState.OPEN:
            return False
        if self.hung_up:
            table.close_load(reader, sent=False)
            return True
        if reader.stop is not None:
            self.events.append(("error", BatonError(reader.stop.code, reader.stop.message)))
            table.close_load(reader, sent=False)
            return True
        for kind in ("started", "running"):
            if kind not in self.said:
                return self._say(kind)
        if lease.state is LeaseState.COMPUTED and "computed" not in self.said:
            return self._say("computed")
        run = reader.next_run()
        if run is not None:
            self.events.append(("notice", announce(reader, run)))
            reader.sent(run.count, self.load.clock())
            return True
        if "computed" not in self.said:
            return False
        assert reader.exhausted(), "computed, with blocks that nobody was told of"
        table.close_load(reader, sent=True)
        self.announced = True
        self.events.append(("done", pb.Done(result=lease.result, pieces=reader.pieces_sent)))
        self.events.append(("end", None))
        return True

    def _say(self, kind: str) -> bool:
        lease = self.reader.lease
        self.said.add(kind)
        if kind == "started":
            started = pb.Started(generation=lease.generation, cached_blocks=lease.cached_blocks)
            if lease.word is not None:
                started.word.index, started.word.value = lease.word
            self.events.append((kind, started))
        else:
            state = pb.COMPUTE_STATE_RUNNING if kind == "running" else pb.COMPUTE_STATE_COMPUTED
            self.events.append(("state", state))
        return True

    # ---- D's end

    def read_event(self, effect: str = "") -> bool:
        """D takes the next event; with `effect` it is lost or taken twice. False: nothing can be taken now."""
        if self.load.state in TERMINAL or not self.events:
            return False
        kind, content = self.events[0]
        if kind == "done" and effect != "drop" and not self.settled():
            return False
        self.events.popleft()
        for _ in range({"drop": 0, "duplicate": 2}.get(effect, 1)):
            try:
                self._take(kind, content)
            except BatonError:
                assert self.load.state is LoadState.FAILED
                break
        return True

    def settled(self) -> bool:
        """Before the last event counts, copies have ended and the question about the lease has its answer."""
        return not self.copies and (self.proof is not False or self.load.missing > 0)

    def _take(self, kind: str, content: object) -> None:
        load = self.load
        if kind == "started":
            assert isinstance(content, pb.Started)
            load.on_started(content)
            self.word = content.word if content.HasField("word") else None
        elif kind == "state":
            assert isinstance(content, int)
            load.on_state(content)
        elif kind == "notice":
            assert isinstance(content, pb.Notice)
            self.copies += understand(load, content, self.targets)
        elif kind == "done":
            assert isinstance(content, pb.Done)
            if isinstance(self.proof, BatonError):
                load.fail_with(self.proof)
            load.on_done(content)
        elif kind == "error":
            assert isinstance(content, BatonError)
            load.fail_with(content)
        else:
            load.on_end()

    def copy(self, index: int, memory: Memory) -> bool:
        """Half a block is read out of P's memory as it is now. Copies end in any order, and also those of a load that
        has failed go on."""
        if not self.copies:
            return False
        copy = self.copies.pop(index % len(self.copies))
        assert not self.given_back, "a copy into blocks that belong to somebody else"
        memory[copy.target] = self.server.memory.get(copy.source)
        copy.notice.left -= 1
        if not copy.notice.left and self.load.state not in TERMINAL:
            self.load.on_delivered(copy.notice.piece)
        return True

    def _stands(self, present: Prefill) -> bool:
        """What the lease's word says; that of a process which has ended says nothing."""
        words, word = self.server.words, self.word
        return words is not None and word is not None and self.server is present and (
            words.values[word.index] == word.value
        )  # fmt: skip

    def ask(self, present: Prefill, prove: Prove, *, early: bool = False) -> bool:
        """Whether the lease stood: seen or asked once, when everything is here. `early`: before, proving nothing."""
        if self.load.state in TERMINAL or self.proof is not False:
            return False
        if (self.load.missing or self.copies) and (not early or self.load.generation is None):
            return False
        if self._stands(present):
            self.proof = True
            return True
        try:
            if self.server is not present:
                raise BatonError(ErrorCode.PEER_RESTARTED)
            prove(present.table, self.key, self.load.generation)
            self.proof = True
        except BatonError as error:
            self.proof = error
        return True

    def fail(self, error: BatonError) -> None:
        if self.load.state not in TERMINAL:
            self.load.fail(error)


# ---- how events are written


def announce(reader: Reader, run: Run) -> pb.Notice:
    """What P says about blocks that are ready."""
    notices: list[pb.Notice] = []
    sending.announce(notices, run, range(run.first, run.first + run.count), reader.lease.blocks["full"])
    return notices[0]


def understand(load: Load, said: pb.Notice, targets: list[int]) -> list[Copy]:
    """The copies that a notice leads to. Raises the load's failure."""
    piece = load.read_notice(said)
    load.expect(piece, 0)
    load.on_taken(piece)
    notice = Notice(piece)
    copies = [
        Copy(notice, Cell(piece.layer, source, half), Cell(piece.layer, targets[block], half))
        for block, source in zip(piece.blocks, piece.sources, strict=True)
        for half in range(HALVES)
    ]
    notice.left = len(copies)
    return copies


def new_load(targets: list[int], clock: Clock, progress_s: float) -> Load:
    here = WantedHere(LAYOUT, 0, targets, LAYOUT.block_bytes, ((0, LAYOUT.block_bytes),))
    return Load((here,), "off", progress_s, progress_s, clock=clock, clock_ns=clock.ns, transport=IPC)


def open_reader(server: Prefill, key: str, generation: int | None, caller: Caller) -> Reader | None:
    return server.table.open_load(key, generation, TOKENS, wanted(0, BLOCKS), CHUNK_BYTES, True, caller)
