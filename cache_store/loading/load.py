"""D's end of one load: what is still missing, how it may end, and until when to wait. Pure, with an injected clock.

States are those of docs/protocol.md, section "Load". Completion is by identity: a load is complete when every wanted
(group, layer, block) arrived once and the result of the prefill is there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from cache_store import checksum
from cache_store.events import Timeline
from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.pieces import Piece, expand_runs
from cache_store.geometry.positions import Positions
from cache_store.observations import Observe, ignore
from cache_store.transports import GRPC, ONE_SIDED, TCP
from protos import cache_store_pb2, common_pb2
from rpc.errors import BatonError, ErrorCode


class LoadState(StrEnum):
    REQUESTED = "requested"  # asked for; P may not have admitted the request yet
    RUNNING = "running"  # P computes the prompt: the progress limit runs
    COMPUTED = "computed"  # P has computed everything: what is missing is exposed transfer time
    COMPLETE = "complete"
    FAILED = "failed"


TERMINAL = frozenset({LoadState.COMPLETE, LoadState.FAILED})


@dataclass
class WantedHere:
    """Blocks of one group that this side wants, and where they go.

    `ranges` are the bytes inside a block that the payload of a piece fills: those of share `partition_id` of
    `partition_count` (see GroupLayout.partition_ranges). `positions`: how the blocks lie over those of the peer,
    where this side reads them there and the block sizes differ.
    """

    layout: GroupLayout
    first_block: int
    block_ids: list[int]
    piece_bytes: int
    ranges: tuple[tuple[int, int], ...]
    partition_count: int = 1
    partition_id: int = 0
    positions: Positions | None = None


@dataclass
class _Pending:
    wanted: WantedHere
    arrived: list[bytearray]  # per layer a mark per wanted block
    missing: list[int]  # per layer


def _ascending_by_one(blocks: Sequence[int]) -> bool:
    return isinstance(blocks, range) or blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def _mismatch(message: str, where: str) -> BatonError:
    return BatonError(ErrorCode.READ_BUFFER_MISMATCH, message, metadata={"piece": where})


@dataclass
class Load:
    """One load of one peer. Every event is checked here before its payload is touched; the first cause stays."""

    wanted: tuple[WantedHere, ...]
    checksum_mode: str
    progress_timeout_s: float
    publish_timeout_s: float
    deadline: float = math.inf
    clock: Callable[[], float] = time.monotonic
    clock_ns: Callable[[], int] = time.monotonic_ns
    observe: Observe = ignore
    transport: str = GRPC
    state: LoadState = LoadState.REQUESTED
    error: BatonError | None = None
    generation: int | None = None
    result: common_pb2.PrefillResult | None = None
    delivered: int = 0
    bytes_received: int = 0
    computed_at: float | None = None
    events: Timeline = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self._last_progress = self.began
        self._pending = {
            item.layout.tag: _Pending(
                item,
                [bytearray(len(item.block_ids)) for _ in range(item.layout.num_layers)],
                [len(item.block_ids)] * item.layout.num_layers,
            )
            for item in self.wanted
        }
        self.missing = sum(sum(pending.missing) for pending in self._pending.values())
        self._mark("load_started")

    # ---- events of the stream

    def on_started(self, started: cache_store_pb2.Started) -> None:
        if self.generation is not None or not started.HasField("generation"):
            self.fail_with(breach("Started came twice or without its generation"))
        self.generation = started.generation

    def on_state(self, state: int) -> None:
        """RUNNING, possibly again as a sign of progress in blocks that are not wanted here; then COMPUTED, which may
        come alone."""
        if self.generation is None or self.result is not None:
            self.fail_with(breach("a state outside of Started and Done"))
        running = state == cache_store_pb2.COMPUTE_STATE_RUNNING
        computed = state == cache_store_pb2.COMPUTE_STATE_COMPUTED
        if self.state is LoadState.COMPUTED or not (running or computed):
            self.fail_with(breach(f"compute state {state} in state {self.state}"))
        if self.state is LoadState.REQUESTED:
            self.state = LoadState.RUNNING
            self._mark("load_running")
        if computed:
            self.state = LoadState.COMPUTED
            self.computed_at = self.clock()
            self._mark("load_computed")
        self._last_progress = self.clock()

    def read_header(self, header: cache_store_pb2.PieceHeader) -> Piece:
        """What a piece event is about; `expect` checks it."""
        layers = range(header.layer, header.layer + 1) if header.HasField("layer") else range(0)
        sum_ = header.checksum if header.HasField("checksum") else None
        return Piece(header.group, layers, list(header.blocks), header.block_bytes, sum_)

    def read_notice(self, notice: cache_store_pb2.Notice) -> Piece:
        """What a notice is about; `expect` checks it. Raises the load's failure for one that names no blocks."""
        pending = self._pending.get(notice.group)
        most = 0 if pending is None else len(pending.wanted.block_ids)
        sources = most
        if pending is not None and pending.wanted.positions is not None:
            sources = most * pending.wanted.positions.target_units
        try:
            return Piece(
                notice.group,
                range(notice.layer, notice.layer + notice.num_layers) if notice.HasField("layer") else range(0),
                expand_runs(notice.block_runs, most),
                notice.block_bytes,
                sources=expand_runs(notice.source_runs, sources),
            )
        except ValueError as error:
            where = f"{notice.group[:32]!r}, layer {notice.layer}"
            if self.generation is None:
                self.fail_with(breach("a piece before Started"))
            self._count("unknown")
            self.fail_with(_mismatch(f"KV blocks were announced that were not asked for: {error}", where))

    def expect(self, piece: Piece, data_bytes: int) -> WantedHere:
        """Checks what an event is about against what is pending. Nothing counts yet; raises READ_BUFFER_MISMATCH.

        With any transport but grpc the event has no bytes; with a one-sided one it says where each block lies instead.
        """
        pending = self._pending.get(piece.group)
        where = f"{piece.group[:32]!r}, layer {piece.layer}"
        if self.generation is None:
            self.fail_with(breach("a piece before Started"))
        if pending is None or not piece.layers or piece.layers.stop > len(pending.missing):
            self._count("unknown", max(1, len(piece.blocks)))
            self.fail_with(_mismatch("a KV block arrived that was not asked for", where))
        wanted, blocks = pending.wanted, piece.blocks
        direct = self.transport in ONE_SIDED
        expected_bytes = wanted.piece_bytes * len(blocks) if self.transport == GRPC else 0
        if piece.block_bytes != wanted.piece_bytes or data_bytes != expected_bytes or not blocks:
            self.fail_with(
                _mismatch(
                    "a KV block arrived with another length than agreed",
                    f"{where}: {len(blocks)} blocks of {piece.block_bytes} bytes in {data_bytes} bytes, "
                    f"expected {wanted.piece_bytes} bytes each",
                )
            )
        if bool(piece.sources) != direct:
            self.fail_with(breach("a piece event of another transport than agreed"))
        self._expect_new(pending, piece)
        if direct:
            positions = wanted.positions
            sources = len(blocks) if positions is None else positions.count_touched(blocks)
            if len(piece.sources) != sources:
                self.fail_with(breach(f"{len(piece.sources)} blocks of the peer, {sources} hold the tokens"))
            return wanted  # never copied through a buffer that something else could have damaged
        # Over tcp one of all of them follows their bytes.
        if self.transport != TCP and self.covers(piece) and piece.checksum is None:
            self._count("checksum", len(blocks))
            self.fail_with(
                BatonError(
                    ErrorCode.KV_CHECKSUM_MISMATCH, "KV blocks arrived without a checksum", metadata={"piece": where}
                )
            )
        return wanted

    def _expect_new(self, pending: _Pending, piece: Piece) -> None:
        """None of the blocks has arrived, and they ascend."""
        wanted, blocks = pending.wanted, piece.blocks
        at, count = blocks[0] - wanted.first_block, len(blocks)
        together = at >= 0 and at + count <= len(wanted.block_ids) and _ascending_by_one(blocks)
        for layer in piece.layers:
            arrived = pending.arrived[layer]
            # Neighbours of which none has arrived, which is the rule, are looked at together.
            if together and arrived.find(1, at, at + count) < 0:
                continue
            where, before = f"{piece.group[:32]!r}, layer {layer}", -1
            for block in blocks:
                index = block - wanted.first_block
                if not 0 <= index < len(arrived):
                    self._count("unknown")
                    self.fail_with(_mismatch("a KV block arrived that was not asked for", f"{where}, block {block}"))
                if arrived[index] or block <= before:
                    self._count("duplicate")
                    self.fail_with(_mismatch("a KV block arrived twice", f"{where}, block {block}"))
                before = block

    def verify(self, piece: Piece, data: memoryview) -> None:
        """Compares the checksum of an expected event, if it has one. Raises KV_CHECKSUM_MISMATCH."""
        if self.checksum_mode != "off" and piece.checksum is not None:
            self.compare(piece, checksum.digest([data]), piece.checksum)

    def covers(self, piece: Piece) -> bool:
        """Whether an expected event, of one layer, has to have a checksum. May be asked by any thread."""
        return checksum.covered(self.checksum_mode, piece.layer, piece.blocks[0])

    def compare(self, piece: Piece, have: int, want: int) -> None:
        """Compares the checksum of what has come of an event, of one layer. Raises KV_CHECKSUM_MISMATCH."""
        where = f"{piece.group!r}, layer {piece.layer}, blocks {piece.blocks[0]}-{piece.blocks[-1]}"
        try:
            checksum.compare(have, want, where)
        except BatonError as error:
            self._count("checksum", len(piece.blocks))
            self.fail_with(error)

    def on_taken(self, piece: Piece) -> None:
        """What an expected event is about is being copied into the pool: from now on the same again is a duplicate."""
        pending = self._pending[piece.group]
        begin, blocks = pending.wanted.first_block, piece.blocks
        together = blocks[-1] - blocks[0] == len(blocks) - 1  # they ascend
        for layer in piece.layers:
            arrived = pending.arrived[layer]
            if together:
                arrived[blocks[0] - begin : blocks[-1] + 1 - begin] = b"\x01" * len(blocks)
                continue
            for block in blocks:
                arrived[block - begin] = 1

    def on_delivered(self, piece: Piece) -> None:
        """The bytes of what was taken, or of some of its layers, are in the pool."""
        pending = self._pending[piece.group]
        count = len(piece.blocks)
        tag = "" if len(self._pending) == 1 else f"{piece.group}:"
        for layer in piece.layers:
            pending.missing[layer] -= count
            if not pending.missing[layer]:
                self._mark(f"layer_received:{tag}{layer}")
        self.missing -= piece.count
        self.delivered += piece.count
        self.bytes_received += piece.nbytes
        self._last_progress = self.clock()
        self._count("ok", piece.count)
        self.observe("kv_transfer_bytes_total", piece.nbytes, transport=self.transport, direction="received")

    def on_done(self, done: cache_store_pb2.Done) -> None:
        """The last event. Complete only with nothing missing and the result present."""
        if self.state is not LoadState.COMPUTED or self.result is not None:
            self.fail_with(breach("Done before COMPUTED, or twice"))
        if self.missing:
            self._fail_short()
        if not done.HasField("pieces") or done.pieces != self.delivered:
            self.fail_with(
                _mismatch("the load ended with another number of pieces", f"{done.pieces} sent, {self.delivered} got")
            )
        result = done.result
        if not (
            done.HasField("result")
            and result.HasField("first_token")
            and result.first_token.HasField("token_id")
            and result.HasField("cached_tokens")
        ):
            self.fail_with(breach("the result of the prefill is missing"))
        self.result = result

    def on_end(self) -> None:
        """The stream ended with status OK."""
        if self.state in TERMINAL:
            return
        if self.result is not None and not self.missing:
            self.state = LoadState.COMPLETE
            self._mark("load_complete")
            return
        if self.missing:
            self._fail_short()
        self.fail_with(breach("the load ended without its result"))

    # ---- failure and time

    def _fail_short(self) -> NoReturn:
        self._count("missing", self.missing)
        message = "the load ended before every KV block had arrived"
        self.fail_with(BatonError(ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT, message, metadata=self._left()))

    def fail(self, error: BatonError) -> BatonError:
        """Ends the load; the first cause stays and is returned."""
        if self.state is LoadState.COMPLETE:
            raise AssertionError("a complete load cannot fail")
        self.state = LoadState.FAILED
        if self.error is None:
            self.error = error.with_context(**self._left())
        return self.error

    def fail_with(self, error: BatonError) -> NoReturn:
        """Ends the load and raises its cause."""
        raise self.fail(error)

    def moved(self) -> None:
        """Bytes of an expected event have come, and not all of them yet: a sign of progress."""
        self._last_progress = self.clock()

    def wait_until(self) -> float:
        """Reading of `clock` at which waiting for the next event has lasted too long."""
        if self.state is LoadState.REQUESTED:
            # P answers after the same time with its own cause, which says more: let it come first.
            return min(self.deadline, self.began + self.publish_timeout_s + 1.0)
        return min(self.deadline, self._last_progress + self.progress_timeout_s)

    def held_up(self) -> None:
        """This process itself stood still (suspended, or in a long collection of garbage), so it cannot blame the peer:
        waiting begins anew. The request's deadline is not moved."""
        self.began = self._last_progress = self.clock()

    def on_timeout(self) -> BatonError:
        """`wait_until` has passed without news: the cause."""
        if self.clock() >= self.deadline:
            error = BatonError(ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time")
        elif self.state is LoadState.REQUESTED:
            error = BatonError(ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT, "the prefill did not begin in time")
        else:
            error = BatonError(ErrorCode.LOAD_CACHE_TIMEOUT, "the prefill server sent no new KV block in time")
        return self.fail(error)

    def exposed_seconds(self, now: float) -> float:
        """Time from the prompt being computed to now: what the prefill did not hide."""
        return 0.0 if self.computed_at is None else max(0.0, now - self.computed_at)

    def _left(self) -> dict[str, str]:
        return {"delivered": str(self.delivered), "missing": str(self.missing)}

    def _count(self, result: str, count: int = 1) -> None:
        self.observe("kv_transfer_pieces_total", count, transport=self.transport, result=result)

    def _mark(self, name: str) -> None:
        self.events.append((name, self.clock_ns()))


def breach(what: str) -> BatonError:
    """The peer did not keep to the protocol."""
    return BatonError(
        ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
        "the prefill server's answer breaks the protocol",
        metadata={"contract_breach": "missing_result", "breach": what},
    )
