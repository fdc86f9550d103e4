"""What an agent says in handshakes that it can do: its settings, its pool and this machine decide."""

from __future__ import annotations

import logging
from pathlib import Path

from cache_store.memory.pool import HostKvPool, KvPool, StagedKvPool
from cache_store.memory.regions import CUDA
from cache_store.memory.staging import MemoryUnavailable
from cache_store.nixl.agent import PACKAGES, installed
from cache_store.observations import Observe
from cache_store.settings import AgentSettings
from cache_store.transports import GRPC, IPC, NIXL, TCP, TRANSPORTS, Offer, this_host
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode

RDMA_DEVICES = Path("/sys/class/infiniband")

_log = logging.getLogger(__name__)


def make_offer(pool: KvPool, settings: AgentSettings, observe: Observe) -> Offer:
    """What the settings and the pool allow. A pool that no other process can open is one that reads from others only;
    on a device that could be otherwise, and there is a warning.

    Raises INVALID_PARAMS when nixl is demanded and not possible.
    """
    allowed = TRANSPORTS if settings.transport == "auto" else (settings.transport,)
    possible = {each for each in (TCP, GRPC) if each in allowed}
    memories: dict[str, pb.SharedPool] = {}
    if IPC in allowed:
        try:
            if isinstance(pool, StagedKvPool):
                if pool.copies.shareable:
                    memories[IPC] = pool.copies.share()
                    possible.add(IPC)
            else:
                possible.add(IPC)
                if isinstance(pool, HostKvPool) and pool.shareable:
                    memories[IPC] = pool.share()
        except MemoryUnavailable as error:
            _log.warning(
                "other servers of this machine cannot read the KV memory, so transport ipc is left out: %s", error
            )
    on_demand = frozenset[str]()
    missing = ""
    regions = pool.regions() if NIXL in allowed else None
    if regions is not None:
        if not installed():
            missing = f"none of the packages {', '.join(PACKAGES)} is installed"
        elif regions.memory == CUDA and settings.transport == "auto" and not has_rdma():
            # Over TCP the library may end its process, which here is the engine's, with that of a peer.
            missing = "this machine has no RDMA device"
        else:
            possible.add(NIXL)
            on_demand = frozenset({NIXL})
        if missing and settings.transport == NIXL:
            raise nixl_impossible(missing)
        if missing:
            observe("kv_transport_fallbacks_total", transport=NIXL, reason="absent")
    transports = tuple(each for each in TRANSPORTS if each in possible)
    return Offer(transports or (GRPC,), this_host(), memories, on_demand, absent=missing)


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def nixl_impossible(why: str) -> BatonError:
    return BatonError(
        ErrorCode.INVALID_PARAMS,
        f"--kv-transport nixl is not possible here: {why}; install the extra nixl (pip install 'baton[nixl]'), "
        "or use --kv-transport auto",
        param="kv_transport",
    )
