"""Reads through NIXL by itself, two processes on this machine: what the transport nixl is measured against.

    python -m bench.nixl_baseline --layers 30 --blocks 182 --block-bytes 12288 --repeat 5

The owner's process registers `layers` buffers of `blocks` blocks; the reader's reads all of them into as many of its
own, as one transfer, and asks for its state without a pause. A figure is from the making of the transfer to its end:
the library's part of a load, with nothing around it. UCX_TLS=tcp shows what it does between machines without RDMA.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from time import perf_counter
from typing import Any

import numpy as np

from cache_store.nixl_agent import PROGRESS_DELAY_US, load_bindings

WAIT_S = 60.0


class BareNixl:
    """The two processes, ready. `seconds` is one read of everything; `close` ends them."""

    def __init__(self, layers: int, blocks: int, block_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for main in (_own, _read):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(theirs, layers, blocks, block_bytes), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._pipes[1].send(self._answer(self._pipes[0]))
        self._answer(self._pipes[1])
        self.bytes = layers * blocks * block_bytes

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(WAIT_S):
            raise SystemExit("a process of the NIXL baseline does not answer")
        return pipe.recv()

    def seconds(self, scattered: bool) -> float:
        """Blocks in their order, or each at another place than before."""
        self._pipes[1].send(scattered)
        return float(self._answer(self._pipes[1]))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(WAIT_S)


def _agent(nixl: Any, name: str, size: int) -> tuple[Any, mmap.mmap, int]:
    """An agent, `size` bytes that it has registered, and their address."""
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_DELAY_US
    agent = nixl.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    memory = mmap.mmap(-1, size)
    view = np.frombuffer(memory, np.uint8)
    view[:] = 1  # every page is there
    address = int(view.ctypes.data)
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, size, 0, "")]), [])
    return agent, memory, address


def _own(pipe: Connection, layers: int, blocks: int, block_bytes: int) -> None:
    nixl = load_bindings()
    agent, _memory, address = _agent(nixl, "bare-owner", layers * blocks * block_bytes)
    pipe.send((agent.getLocalMD(), address))
    pipe.recv()
    os._exit(0)  # the library's parts do not bear to be taken apart


def _read(pipe: Connection, layers: int, blocks: int, block_bytes: int) -> None:
    nixl = load_bindings()
    agent, _memory, own = _agent(nixl, "bare-reader", layers * blocks * block_bytes)
    metadata, theirs = pipe.recv()
    name = agent.loadRemoteMD(metadata)
    rng = np.random.default_rng(1)

    def table(base: int, order: np.ndarray) -> Any:
        rows = np.zeros((len(order), 3), np.uint64)
        rows[:, 0], rows[:, 1] = order.astype(np.uint64) * np.uint64(block_bytes) + np.uint64(base), block_bytes
        return nixl.nixlXferDList(nixl.DRAM_SEG, rows)

    def order(scattered: bool) -> np.ndarray:
        each = [rng.permutation(blocks) if scattered else np.arange(blocks) for _ in range(layers)]
        return np.concatenate([layer * blocks + blocks_of for layer, blocks_of in enumerate(each)])

    def read(scattered: bool) -> float:
        source, target = order(scattered), order(scattered)
        began = perf_counter()
        transfer = agent.createXferReq(nixl.NIXL_READ, table(own, target), table(theirs, source), name, "", [])
        state = agent.postXferReq(transfer, "")
        while state == nixl.NIXL_IN_PROG:
            state = agent.getXferStatus(transfer)
        took = perf_counter() - began
        agent.releaseXferReq(transfer)
        return took

    read(False)  # connects
    pipe.send(True)
    while (scattered := pipe.recv()) is not None:
        pipe.send(read(scattered))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=182)
    parser.add_argument("--block-bytes", type=int, default=12288)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    bare = BareNixl(args.layers, args.blocks, args.block_bytes)
    try:
        for scattered in (False, True):
            took = [bare.seconds(scattered) for _ in range(1 + args.repeat)][1:]
            rate = bare.bytes / statistics.median(took) / 1e9
            print(json.dumps({"scattered": scattered, "bytes": bare.bytes, "median_gb_per_s": round(rate, 3)}))
    finally:
        bare.close()


if __name__ == "__main__":
    main()
