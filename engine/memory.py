"""How many KV blocks an engine gets: arithmetic over its settings and the host's free memory."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.kv_cache.cache import blocks_for
from rpc.errors import BatonError, ErrorCode

DEFAULT_BYTES = 2 << 30
DEFAULT_SHARE = 0.1  # of the free memory
LARGEST_SHARE = 0.8  # of the free memory, for a pool that holds one request of the model's length


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that the host can give without swapping; a cgroup's own limit is not known here."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"{meminfo} has no MemAvailable")


def kv_blocks(config: EngineConfig, *, bytes_per_block: int, max_model_len: int, free_bytes: int) -> int:
    """Usable blocks, block 0 not counted.

    --num-kv-blocks is taken as it is: requests that do not fit are then refused one by one. Otherwise the pool must
    hold one request of the model's length. Raises INVALID_PARAMS, naming the flag, where that cannot be.
    """
    if config.num_kv_blocks:
        return config.num_kv_blocks
    needed = blocks_for(max_model_len, config.block_size)
    if config.kv_cache_memory_bytes:
        blocks = config.kv_cache_memory_bytes // bytes_per_block - 1
        if blocks < needed:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} is too little for one request of "
                f"{max_model_len} tokens; give at least {(needed + 1) * bytes_per_block} or lower --max-model-len",
            )
        return blocks
    if (needed + 1) * bytes_per_block > free_bytes * LARGEST_SHARE:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"one request of {max_model_len} tokens needs {(needed + 1) * bytes_per_block} bytes of KV cache, free are "
            f"{free_bytes}; lower --max-model-len or set --num-kv-blocks",
        )
    return max(needed, int(min(DEFAULT_BYTES, free_bytes * DEFAULT_SHARE)) // bytes_per_block - 1)
