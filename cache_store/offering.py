"""What an agent says in handshakes that it can do: its settings, its pool and this machine decide."""

from __future__ import annotations

import logging

from cache_store.nixl_agent import PACKAGES, installed
from cache_store.observations import Observe
from cache_store.pool import HostKvPool, KvPool, StagedKvPool
from cache_store.settings import AgentSettings
from cache_store.staging import MemoryUnavailable
from cache_store.transports import GRPC, IPC, NIXL, TCP, TRANSPORTS, Offer, this_host
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode

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
    if NIXL in allowed and pool.regions() is not None:
        if installed():
            possible.add(NIXL)
            on_demand = frozenset({NIXL})
        elif settings.transport == NIXL:
            raise nixl_impossible(f"none of the packages {', '.join(PACKAGES)} is installed")
        else:
            observe("kv_transport_fallbacks_total", transport=NIXL, reason="absent")
            _log.info("the package nixl is not installed, so transport nixl is left out")
    transports = tuple(each for each in TRANSPORTS if each in possible)
    return Offer(transports or (GRPC,), this_host(), memories, on_demand)


def nixl_impossible(why: str) -> BatonError:
    return BatonError(
        ErrorCode.INVALID_PARAMS,
        f"--kv-transport nixl is not possible here: {why}; install the extra nixl (pip install 'baton[nixl]'), "
        "or use --kv-transport auto",
        param="kv_transport",
    )
