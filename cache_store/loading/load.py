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
        """RUNNING, possibly again as a sign of progress in blocks that are not wanted here; then COMPUTED."""
        if self.generation is None or self.result is not None:
            self.fail_with(breach("a state outside of Started and Done"))
        if state == cache_store_pb2.COMPUTE_STATE_RUNNING and self.state is not LoadState.COMPUTED:
            if self.state is LoadState.REQUESTED:
                self.state = LoadState.RUNNING
                self._mark("load_running")
        elif state == cache_store_pb2.COMPUTE_STATE_COMPUTED and self.state is LoadState.RUNNING:
            self.state = LoadState.COMPUTED
            self.computed_at = self.clock()
            self._mark("load_computed")
        else:
            self.fail_with(breach(f"compute state {state} in state {self.state}"))
        self._last_progress = self.clock()

    def expect(self, header: cache_store_pb2.PieceHeader, data_bytes: int) -> WantedHere:
        """Checks a piece event against what is pending. Nothing counts yet; raises READ_BUFFER_MISMATCH.

        With any transport but grpc the event has no bytes; with a one-sided one it says where each block lies instead.
        """
        pending = self._pending.get(header.group)
        layer = header.layer
        where = f"{header.group[:32]!r}, layer {layer}"
        if self.generation is None:
            self.fail_with(breach("a piece before Started"))
        if pending is None or not header.HasField("layer") or layer >= len(pending.missing):
            self._count("unknown", max(1, len(header.blocks)))
            self.fail_with(_mismatch("a KV block arrived that was not asked for", where))
        wanted, blocks = pending.wanted, list(header.blocks)
        direct = self.transport in ONE_SIDED
        expected_bytes = wanted.piece_bytes * len(blocks) if self.transport == GRPC else 0
        if header.block_bytes != wanted.piece_bytes or data_bytes != expected_bytes or not blocks:
            self.fail_with(
                _mismatch(
                    "a KV block arrived with another length than agreed",
                    f"{where}: {len(blocks)} blocks of {header.block_bytes} bytes in {data_bytes} bytes, "
                    f"expected {wanted.piece_bytes} bytes each",
                )
            )
        if bool(header.source_blocks) != direct:
            self.fail_with(breach("a piece event of another transport than agreed"))
        if self.transport == TCP and header.checksums:
            # Of a peer that sends none behind the bytes: those of the next notice would be taken for one.
            self.fail_with(breach("checksums in a notice of the transport tcp"))
        arrived = pending.arrived[layer]
        at = blocks[0] - wanted.first_block
        # Neighbours of which none has arrived, which is the rule, are looked at together.
        together = 0 <= at <= len(arrived) - len(blocks) and blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        before = -1
        for block in () if together and 1 not in arrived[at : at + len(blocks)] else blocks:
            at = block - wanted.first_block
            if not 0 <= at < len(arrived):
                self._count("unknown")
                self.fail_with(_mismatch("a KV block arrived that was not asked for", f"{where}, block {block}"))
            if arrived[at] or block <= before:
                self._count("duplicate")
                self.fail_with(_mismatch("a KV block arrived twice", f"{where}, block {block}"))
            before = block
        if direct:
            positions = wanted.positions
            sources = len(blocks) if positions is None else positions.count_touched(blocks)
            if len(header.source_blocks) != sources:
                self.fail_with(breach(f"{len(header.source_blocks)} blocks of the peer, {sources} hold the tokens"))
            return wanted  # never copied through a buffer that something else could have damaged
        # Over tcp one of all of them follows their bytes.
        if self.transport != TCP and self.covers(header) and len(header.checksums) != len(blocks):
            self._count("checksum", len(blocks))
            self.fail_with(
                BatonError(
                    ErrorCode.KV_CHECKSUM_MISMATCH, "KV blocks arrived without checksums", metadata={"piece": where}
                )
            )
        return wanted

    def verify(self, header: cache_store_pb2.PieceHeader, data: memoryview) -> None:
        """Compares the checksums of an expected event, if it has any. Raises KV_CHECKSUM_MISMATCH."""
        if self.checksum_mode != "off" and len(header.checksums) > 0:
            self._compare(header, header.blocks, checksum.checksums(data, header.block_bytes), list(header.checksums))

    def covers(self, header: cache_store_pb2.PieceHeader) -> bool:
        """Whether an expected event has to have checksums. May be asked by any thread."""
        return checksum.covered(self.checksum_mode, header.layer, header.blocks[0])

    def verify_run(self, header: cache_store_pb2.PieceHeader, have: int, want: int) -> None:
        """Compares the checksum of all blocks of an event. Raises KV_CHECKSUM_MISMATCH."""
        self._compare(header, [f"{header.blocks[0]}-{header.blocks[-1]}"], [have], [want])

    def _compare(
        self,
        header: cache_store_pb2.PieceHeader,
        blocks: Sequence[int | str],
        sums: Sequence[int],
        expected: Sequence[int],
    ) -> None:
        try:
            checksum.compare(sums, blocks, expected, f"{header.group!r}, layer {header.layer}")
        except BatonError as error:
            self._count("checksum")
            self.fail_with(error)

    def on_taken(self, header: cache_store_pb2.PieceHeader) -> None:
        """An expected event is being copied into the pool: from now on a second one of its blocks is a duplicate."""
        pending = self._pending[header.group]
        arrived, begin, blocks = pending.arrived[header.layer], pending.wanted.first_block, header.blocks
        if blocks[-1] - blocks[0] == len(blocks) - 1:  # they ascend
            arrived[blocks[0] - begin : blocks[-1] + 1 - begin] = b"\x01" * len(blocks)
            return
        for block in blocks:
            arrived[block - begin] = 1

    def on_delivered(self, header: cache_store_pb2.PieceHeader, data_bytes: int) -> None:
        """The payload of an event that was taken is in the pool."""
        pending = self._pending[header.group]
        count = len(header.blocks)
        pending.missing[header.layer] -= count
        self.missing -= count
        self.delivered += count
        self.bytes_received += data_bytes
        self._last_progress = self.clock()
        self._count("ok", count)
        self.observe("kv_transfer_bytes_total", data_bytes, transport=self.transport, direction="received")
        if not pending.missing[header.layer]:
            tag = "" if len(self._pending) == 1 else f"{header.group}:"
            self._mark(f"layer_received:{tag}{header.layer}")

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
