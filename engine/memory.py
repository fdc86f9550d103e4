"""How many KV blocks an engine gets: arithmetic over its settings and the memory of its host or device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.kv_cache.cache import blocks_for
from rpc.errors import BatonError, ErrorCode

DEFAULT_BYTES = 2 << 30
DEFAULT_SHARE = 0.1  # of the host's free memory
LARGEST_SHARE = 0.8  # of the host's free memory, for a pool that holds one request of the model's length
DEVICE_MARGIN_BYTES = 128 << 20  # left free on a device: allocations are rounded up, and libraries make some later
GRAPH_BYTES = 8 << 20  # of a device's memory, per captured graph: nodes, and the memory pool's rounding


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes, as found when the weights are loaded and the largest step has been run once."""

    total: int
    free: int  # with nothing but weights and buffers allocated
    held: int  # by this process: weights, buffers, libraries
    step_peak: int  # what the largest step takes beyond that, for its own time


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that the host can give without swapping; a cgroup's own limit is not known here."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"{meminfo} has no MemAvailable")


def kv_blocks(config: EngineConfig, *, bytes_per_block: int, max_model_len: int, free_bytes: int) -> int:
    """Usable blocks in host memory, block 0 not counted.

    --num-kv-blocks is taken as it is: requests that do not fit are then refused one by one. Otherwise the pool must
    hold one request of the model's length. Raises INVALID_PARAMS, naming the flag, where that cannot be.
    """
    given = _blocks_given(config, bytes_per_block, max_model_len)
    if given:
        return given
    needed = blocks_for(max_model_len, config.block_size)
    if (needed + 1) * bytes_per_block > free_bytes * LARGEST_SHARE:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"one request of {max_model_len} tokens needs {(needed + 1) * bytes_per_block} bytes of KV cache, free are "
            f"{free_bytes}; lower --max-model-len or set --num-kv-blocks",
        )
    return max(needed, int(min(DEFAULT_BYTES, free_bytes * DEFAULT_SHARE)) // bytes_per_block - 1)


def device_kv_blocks(
    config: EngineConfig,
    memory: DeviceMemory,
    *,
    bytes_per_block: int,
    max_model_len: int,
    spare_blocks: int = 0,
    graphs: int = 0,
) -> int:
    """Usable blocks on a device; block 0 and `spare_blocks` are not counted.

    Without a given size the pool takes what --gpu-memory-utilization leaves beside weights, buffers, the largest step
    and `graphs` captured graphs. Raises INVALID_PARAMS, naming the flag, where one request of the model's length would
    not fit.
    """
    given = _blocks_given(config, bytes_per_block, max_model_len)
    if given:
        return given
    beside = memory.step_peak + graphs * GRAPH_BYTES
    allowed = int(memory.total * config.gpu_memory_utilization) - memory.held - beside
    there = memory.free - beside - DEVICE_MARGIN_BYTES
    blocks = min(allowed, there) // bytes_per_block - 1 - spare_blocks
    needed = blocks_for(max_model_len, config.block_size)
    if blocks >= needed:
        return blocks
    wanted = (needed + 1 + spare_blocks) * bytes_per_block
    if allowed < there:
        advice = f"raise --gpu-memory-utilization ({config.gpu_memory_utilization:g}) or lower --max-model-len"
    else:
        advice = (
            f"other processes hold memory of the device (free are {memory.free}); "
            "lower their --gpu-memory-utilization, or --max-model-len here"
        )
    raise BatonError(
        ErrorCode.INVALID_PARAMS,
        f"one request of {max_model_len} tokens needs {wanted} bytes of KV cache; beside the model's {memory.held} and "
        f"a step's {beside} there are {max(0, min(allowed, there))} of the device's {memory.total}: {advice}",
    )


def _blocks_given(config: EngineConfig, bytes_per_block: int, max_model_len: int) -> int:
    """Usable blocks that the settings name; 0 when they leave it open."""
    if config.num_kv_blocks:
        return config.num_kv_blocks
    if not config.kv_cache_memory_bytes:
        return 0
    needed = blocks_for(max_model_len, config.block_size)
    blocks = config.kv_cache_memory_bytes // bytes_per_block - 1
    if blocks < needed:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} is too little for one request of "
            f"{max_model_len} tokens; give at least {(needed + 1) * bytes_per_block} or lower --max-model-len",
        )
    return blocks
