"""Device time of short launches: captured in a CUDA graph, replayed, median of several replays.

A graph takes the host's launch overhead out, as the engine's own graphs do. What is launched should rotate through more
memory than the L2 cache holds (`copies_beyond_cache`), or the cache is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_REPLAYS = 5


def seconds_per_call(run: Callable[[int], object], calls: int, replays: int = _REPLAYS) -> float:
    """Seconds of one call of run(i), i = 0 to calls - 1, launched one after the other: median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(calls, 3)):
            run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for i in range(calls):
                run(i)
        finally:
            graph.capture_end()
        times = []
        for _ in range(replays + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000 / calls)
    return statistics.median(times[1:])


def copies_beyond_cache(bytes_each: int, most: int = 64, cache_bytes: int = 200 << 20) -> int:
    """How many copies of something have to be used in turn so that none is found in the L2 cache."""
    return max(2, min(most, -(-cache_bytes // bytes_each)))


def read_bandwidth() -> float:
    """Bytes per second of reading, measured: a sum over 4 GB of float32."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    seconds = seconds_per_call(lambda i: data.sum(), 2)
    return data.numel() * 4 / seconds


def copy_bandwidth() -> float:
    """Bytes per second of a copy on the device, read and written bytes counted."""
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    seconds = seconds_per_call(lambda i: target.copy_(source), 2)
    return 2 * source.numel() * 4 / seconds


def matrix_rate() -> float:
    """FLOP/s of a bfloat16 product of 8192 x 8192 matrices, random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_per_call(lambda i: a @ b, 10)
