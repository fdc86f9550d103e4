"""P's end of one open load: which blocks of which layer can be sent next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from cache_store.geometry.layout import AgentIdentity, GroupLayout
from cache_store.geometry.positions import Positions
from cache_store.geometry.rows import Rows, block_rows
from cache_store.geometry.tp_mapping import PeerShare, peer_map, peers_of
from cache_store.wire import out_of_range
from rpc.errors import BatonError

if TYPE_CHECKING:
    from cache_store.serving.lease import Lease


class ReaderState(StrEnum):
    OPEN = "open"
    SENT = "sent"  # every wanted block and the result were handed over
    FAILED = "failed"


@dataclass(frozen=True)
class Caller:
    """The rank of a decode server that loads or releases, out of `tp_size`.

    `group`: all its ranks that have to do with this rank's KV, which is released when all of them have released it.
    `reads` is False for one that only releases: it reads the same heads elsewhere.
    """

    rank: int = 0
    tp_size: int = 1
    group: tuple[int, ...] = (0,)
    reads: bool = True


ONLY_RANK = Caller()


def make_caller(identity: AgentIdentity, rank: int, tp_size: int) -> tuple[Caller, Mapping[str, PeerShare]]:
    """Rank `rank` of `tp_size` of a decode server, as `identity` sees it, and the share of each cache group that it
    reads here.

    Raises ASYMMETRIC_TP_FAILED, INVALID_PARAMS for a rank that has nothing to do with the heads here.
    """
    group = peers_of(identity.tp_size, identity.rank, tp_size)
    if rank not in group:
        allowed = f"[{group.start}, {group.stop}) for rank {identity.rank} of {identity.tp_size}"
        raise out_of_range("reader.rank", rank, allowed)
    plan = peer_map(identity.heads, tp_size, rank, identity.tp_size)
    shares = next(reads.shares for reads in plan if reads.peer_rank == identity.rank)
    return Caller(rank, tp_size, tuple(group), bool(shares)), shares


@dataclass(frozen=True)
class WantedGroup:
    """Blocks [first_block, first_block + num_blocks) of all layers of a group; of each the given share of the heads.

    Blocks are the caller's; `positions` says how they lie over those of `layout` where the sizes differ.
    """

    layout: GroupLayout
    first_block: int
    num_blocks: int
    partition_count: int = 1
    partition_id: int = 0
    positions: Positions | None = None

    @property
    def piece_bytes(self) -> int:
        whole = self.layout.block_bytes // self.partition_count
        positions = self.positions
        return whole if positions is None else whole * positions.target // positions.source

    @property
    def end(self) -> int:
        return self.first_block + self.num_blocks

    def blocks_of(self, tokens: int) -> int:
        """How many of the caller's blocks hold so many tokens."""
        size = self.layout.block_size if self.positions is None else self.positions.target
        return -(-tokens // size)

    def sources(self, blocks: Sequence[int], ids: Sequence[int]) -> list[int]:
        """Where `blocks` lie: for each of them the physical blocks that it touches. ids: those of the request."""
        if self.positions is None:
            return [ids[block] for block in blocks]
        return [ids[block] for block in self.positions.touched(blocks)]

    def rows(self, layer: int, blocks: Sequence[int], ids: Sequence[int]) -> Rows:
        """The rows of a layer that are the payload of `blocks`, ascending. ids: the request's physical blocks."""
        tag, positions, sources = self.layout.tag, self.positions, self.sources(blocks, ids)
        if positions is None:
            return block_rows(tag, layer, sources, self.piece_bytes, self.partition_count, self.partition_id)
        heads = self.layout.num_kv_heads // self.partition_count
        return positions.source_rows(
            tag, layer, blocks, sources, self.piece_bytes, heads, self.partition_count, self.partition_id
        )


@dataclass(frozen=True)
class Run:
    """Blocks [first, first + count) of one layer, to be sent in one event."""

    wanted: WantedGroup
    layer: int
    first: int
    count: int


def _nothing() -> None:
    pass


class Reader:
    """A reader holds its lease's blocks until it is closed (`LeaseTable.close_load`).

    With `direct` the peer reads the blocks itself, after it was told of them: it may read on when the reader is closed,
    and asks then whether the lease still stands. So a lease outlives its direct reader even when nothing else holds it.

    `notify` is called whenever there may be something new: blocks, a state, or `stop`, the error with which the stream
    has to end. Each of `on_close` is called when the reader is closed.
    """

    def __init__(
        self,
        lease: Lease,
        wanted: tuple[WantedGroup, ...],
        chunk_bytes: int,
        now: float,
        direct: bool = False,
        rank: int = 0,
    ) -> None:
        """`rank`: of the decode server."""
        self.lease = lease
        self.rank = rank
        self.wanted = wanted
        self.direct = direct
        self.state = ReaderState.OPEN
        self.stop: BatonError | None = None
        self.notify: Callable[[], None] = _nothing
        self.on_close: list[Callable[[], None]] = []
        self.last_progress = now
        self.pieces_sent = 0
        # W3C trace context of the call, and when it came, for the trace of its caller.
        self.traceparent = ""
        self.called_ns = 0
        self._chunk_bytes = chunk_bytes
        self._cursors = [[group.first_block] * group.layout.num_layers for group in wanted]
        self.pieces_wanted = sum(group.num_blocks * group.layout.num_layers for group in wanted)

    def next_run(self) -> Run | None:
        """Takes the next blocks that are ready, lowest layer first; None when nothing is ready now."""
        best: Run | None = None
        for group, cursors in zip(self.wanted, self._cursors, strict=True):
            ready = self.lease.ready[group.layout.tag]
            if group.positions is not None:
                ready = [group.positions.ready(blocks) for blocks in ready]
            for layer, cursor in enumerate(cursors):
                if best is not None and layer >= best.layer:
                    break
                count = min(ready[layer], group.end) - cursor
                if count > 0:
                    best = Run(group, layer, cursor, min(count, max(1, self._chunk_bytes // group.piece_bytes)))
                    break
        if best is not None:
            self._cursors[self.wanted.index(best.wanted)][best.layer] = best.first + best.count
        return best

    def take_same(self, run: Run, layer: int) -> bool:
        """Takes the blocks of `run` in another layer of its group. False: they do not come next there, or are not
        ready."""
        wanted = run.wanted
        cursors = self._cursors[self.wanted.index(wanted)]
        if layer >= len(cursors) or cursors[layer] != run.first:
            return False
        ready = self.lease.ready[wanted.layout.tag][layer]
        if wanted.positions is not None:
            ready = wanted.positions.ready(ready)
        if min(ready, wanted.end) < run.first + run.count:
            return False
        cursors[layer] += run.count
        return True

    def sent(self, pieces: int, now: float) -> None:
        """An event with so many pieces was accepted by the transport."""
        self.pieces_sent += pieces
        self.last_progress = now

    def exhausted(self) -> bool:
        """Every wanted block was taken by `next_run`."""
        return all(
            cursor >= group.end for group, cursors in zip(self.wanted, self._cursors, strict=True) for cursor in cursors
        )
