"""Which ranks of the prefill server a rank of the decode server reads, and which share of the heads from each.

Derived from the heads that each rank really holds. With as many ranks as heads or fewer, rank r of t holds heads
[r * h/t, (r + 1) * h/t); with more ranks than heads each head is held by t/h neighbouring ranks. Used for loading and
for diagnostics alike, and by both sides: the reader plans with it, and the one that is read knows by it whom to expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rpc.errors import BatonError, ErrorCode

UNMAPPED = "<unmapped>"


@dataclass(frozen=True)
class PeerShare:
    """One read: part `source_id` of `source_count` of the peer's heads is part `dest_id` of `dest_count` here."""

    peer_rank: int
    source_count: int = 1
    source_id: int = 0
    dest_count: int = 1
    dest_id: int = 0


@dataclass(frozen=True)
class PeerReads:
    """All that a rank has to do with one rank of its peer: the share of each cache group that is read from there.

    Without shares nothing is read: the peer's rank holds copies of heads that are read elsewhere, and is only told when
    its own KV is no longer needed.
    """

    peer_rank: int
    shares: Mapping[str, PeerShare] = field(default_factory=dict)


def _uneven(what: str) -> BatonError:
    return BatonError(
        ErrorCode.ASYMMETRIC_TP_FAILED,
        "the tensor-parallel sizes of the two servers do not divide; choose sizes of which one divides the other",
        metadata={"mapping": what},
    )


def head_range(total_heads: int, tp_size: int, rank: int) -> tuple[int, int]:
    """Heads [start, stop) that `rank` of `tp_size` holds.

    Raises IndexError for a rank outside [0, tp_size), ASYMMETRIC_TP_FAILED when the heads cannot be shared evenly.
    """
    if total_heads < 1 or tp_size < 1:
        raise ValueError(f"total_heads {total_heads} and tp_size {tp_size} must be at least 1")
    if not 0 <= rank < tp_size:
        raise IndexError(f"rank {rank} is outside [0, {tp_size})")
    if tp_size <= total_heads:
        if total_heads % tp_size:
            raise _uneven(f"{total_heads} heads on {tp_size} ranks")
        share = total_heads // tp_size
        return rank * share, (rank + 1) * share
    if tp_size % total_heads:
        raise _uneven(f"{total_heads} heads on {tp_size} ranks")
    head = rank // (tp_size // total_heads)
    return head, head + 1


def peers_of(tp_size: int, rank: int, peer_tp_size: int) -> range:
    """Ranks of the peer that `rank` of `tp_size` has to do with. The relation is the same from both sides: q is among
    the peers of r if and only if r is among the peers of q, and each rank has at least one.

    Raises IndexError for a rank outside [0, tp_size), ASYMMETRIC_TP_FAILED when neither size divides the other.
    """
    large, small = max(tp_size, peer_tp_size), min(tp_size, peer_tp_size)
    if small < 1 or large % small:
        raise _uneven(f"{tp_size} ranks and {peer_tp_size}")
    if not 0 <= rank < tp_size:
        raise IndexError(f"rank {rank} is outside [0, {tp_size})")
    ratio = large // small
    if tp_size >= peer_tp_size:
        return range(rank // ratio, rank // ratio + 1)
    return range(rank * ratio, (rank + 1) * ratio)


def read_plan(total_heads: int, tp_size: int, rank: int, peer_tp_size: int) -> tuple[PeerShare, ...]:
    """What `rank` of `tp_size` reads from the ranks of a peer with `peer_tp_size`.

    Equal sizes read the same rank; more ranks here read a share of one peer; fewer ranks here gather from a group of
    peers. Each of one's own is read exactly once. Raises as `head_range` does, also for sizes that do not divide.
    """
    peers = peers_of(tp_size, rank, peer_tp_size)
    own = head_range(total_heads, tp_size, rank)
    if tp_size >= peer_tp_size:
        peer = peers[0]
        held = head_range(total_heads, peer_tp_size, peer)
        count = (held[1] - held[0]) // (own[1] - own[0])
        return (PeerShare(peer, source_count=count, source_id=(own[0] - held[0]) // (own[1] - own[0])),)
    plan: list[PeerShare] = []
    done = own[0]
    for peer in peers:
        held = head_range(total_heads, peer_tp_size, peer)
        if held[0] < done:
            continue  # a replica of heads that are read already
        size = held[1] - held[0]
        plan.append(PeerShare(peer, dest_count=(own[1] - own[0]) // size, dest_id=(held[0] - own[0]) // size))
        done = held[1]
    if done != own[1]:
        raise _uneven(f"heads [{done}, {own[1]}) of rank {rank} are on no peer")
    return tuple(plan)


def peer_map(heads: Mapping[str, int], tp_size: int, rank: int, peer_tp_size: int) -> tuple[PeerReads, ...]:
    """What `rank` of `tp_size` reads from each of the peer's ranks that it has to do with, in rank order.

    heads: of the whole model, by cache group. Raises as `read_plan` does.
    """
    plans = {tag: read_plan(total, tp_size, rank, peer_tp_size) for tag, total in heads.items()}
    return tuple(
        PeerReads(peer, {tag: share for tag, plan in plans.items() for share in plan if share.peer_rank == peer})
        for peer in peers_of(tp_size, rank, peer_tp_size)
    )


def peer_address(addresses: Sequence[str], rank: int) -> str:
    """Address of a peer rank; UNMAPPED beyond the list, never another rank's address."""
    return addresses[rank] if 0 <= rank < len(addresses) else UNMAPPED
