"""The tiers below an engine's KV pool, as its configuration wants them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from cache_store.agent import AgentIdentity
from cache_store.memory.pool import KvPool
from cache_store.tiers.copies import block_copies
from cache_store.tiers.disk import DiskTier
from cache_store.tiers.host import HostTier
from cache_store.tiers.keys import TierKeys
from cache_store.tiers.record import record_bytes
from cache_store.tiers.shared import check_address, open_shared
from cache_store.tiers.store import TierStore
from cache_store.tiers.tier import Tier
from engine.config import EngineConfig
from engine.kv_cache.cache import KvCache
from engine.memory import free_memory_bytes
from rpc.errors import BatonError, ErrorCode

_log = logging.getLogger(__name__)


def open_tiers(
    config: EngineConfig, identity: AgentIdentity, pool: KvPool, kv: KvCache, numerics: str, wake: Callable[[], None]
) -> TierStore | None:
    """The tiers of one rank, nearest first; None where there are none. numerics: what computes, see `TierKeys`.

    Raises INVALID_PARAMS that names the flag to change.
    """
    if not config.has_tiers:
        return None
    if len(identity.groups) != 1:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            "--kv-host-bytes, --kv-disk-path and --kv-tier serve models with one kind of KV cache; this one has "
            f"{len(identity.groups)}; leave them out",
        )
    layout = identity.groups[0]
    size = record_bytes(layout.num_layers * layout.block_bytes)
    ranks = identity.tp_size
    for flag, limit in (("--kv-host-bytes", config.kv_host_bytes), ("--kv-disk-bytes", config.kv_disk_bytes)):
        if 0 < limit < 2 * size * ranks:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"{flag} {limit} has no room for two blocks of this model, {size * ranks} bytes each",
            )
    free = free_memory_bytes()
    if config.kv_host_bytes > free:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"--kv-host-bytes {config.kv_host_bytes} is more than the free memory, {free} bytes",
        )
    tiers: list[Tier] = []
    try:
        if config.kv_host_bytes:
            tiers.append(HostTier(config.kv_host_bytes // ranks))
        if config.kv_disk_path:
            # Each rank has a directory of its own, and its share of the room.
            own = f"rank-{identity.rank}-of-{ranks}" if ranks > 1 else ""
            tiers.append(DiskTier(Path(config.kv_disk_path, own), config.kv_disk_bytes // ranks))
        if config.kv_tier:
            try:
                check_address(config.kv_tier)
            except ValueError as error:
                raise BatonError(ErrorCode.INVALID_PARAMS, str(error)) from error
            tiers.append(open_shared(config.kv_tier, size, config.kv_tier_timeout_ms / 1000))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    _log.info("prefix blocks have tiers below the pool", extra={"tiers": ", ".join(tier.name for tier in tiers)})
    return TierStore(
        tiers,
        block_copies(pool, layout),
        TierKeys(
            identity.model_fingerprint, layout, tp_rank=identity.rank, tp_size=identity.tp_size, numerics=numerics
        ),
        kv.versions(layout.tag),
        timeout_s=config.kv_tier_timeout_ms / 1000,
        wake=wake,
    )
