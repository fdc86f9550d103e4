"""Which ranks of the prefill server a rank of the decode server reads, and which share of the heads from each.

Derived from the heads that each rank really holds. With as many ranks as heads or fewer, rank r of t holds heads
[r * h/t, (r + 1) * h/t); with more ranks than heads each head is held by t/h neighbouring ranks. Used for loading and
for diagnostics alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def read_plan(total_heads: int, tp_size: int, rank: int, peer_tp_size: int) -> tuple[PeerShare, ...]:
    """What `rank` of `tp_size` reads from the ranks of a peer with `peer_tp_size`.

    Equal sizes read the same rank; more ranks here read a share of one peer; fewer ranks here gather from a group of
    peers. Each of one's own is read exactly once. Raises as `head_range` does, also for sizes that do not divide.
    """
    large, small = max(tp_size, peer_tp_size), min(tp_size, peer_tp_size)
    if small < 1 or large % small:
        raise _uneven(f"{tp_size} ranks read {peer_tp_size}")
    own = head_range(total_heads, tp_size, rank)
    if tp_size >= peer_tp_size:
        peer = rank // (tp_size // peer_tp_size)
        held = head_range(total_heads, peer_tp_size, peer)
        count = (held[1] - held[0]) // (own[1] - own[0])
        return (PeerShare(peer, source_count=count, source_id=(own[0] - held[0]) // (own[1] - own[0])),)
    group = peer_tp_size // tp_size
    plan: list[PeerShare] = []
    done = own[0]
    for peer in range(rank * group, (rank + 1) * group):
        held = head_range(total_heads, peer_tp_size, peer)
        if held[0] < done:
            continue  # a replica of heads that are read already
        size = held[1] - held[0]
        plan.append(PeerShare(peer, dest_count=(own[1] - own[0]) // size, dest_id=(held[0] - own[0]) // size))
        done = held[1]
    if done != own[1]:
        raise _uneven(f"heads [{done}, {own[1]}) of rank {rank} are on no peer")
    return tuple(plan)


def peer_address(addresses: Sequence[str], rank: int) -> str:
    """Address of a peer rank; UNMAPPED beyond the list, never another rank's address."""
    return addresses[rank] if 0 <= rank < len(addresses) else UNMAPPED
