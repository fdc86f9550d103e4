"""How fast the cache store moves KV from one process to another over loopback, beside a bare socket in the same run.

    python -m bench.kv_transfer --tokens 2000 --layers 30 --block-bytes 12288 --repeat 15

One process stages a prompt, this one loads it through two real agents (handshake, lease, checksums, completion by
identity). A figure is payload bytes / (call of `load` to LoadDone), so it has every fixed cost in it. The bare socket
moves the same bytes between the same two processes with `sendall` and `recv_into`, out of and into the same pools,
without looking at them. The variants take turns; the first round of each is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np

from cache_store.agent import (
    AgentIdentity,
    AgentSettings,
    CacheStoreAgent,
    GroupLayout,
    KvSourceRef,
    LoadDone,
    LoadFailed,
)
from cache_store.pool import HostKvPool
from protos import common_pb2

TAG = "full"
VARIANTS = ("socket", "off", "sample", "all", "all, scattered blocks")
WAIT_S = 60.0


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def layout_of(args: argparse.Namespace) -> GroupLayout:
    """A layout with the wanted bytes per block: two heads of bfloat16, whatever head_dim that takes."""
    head_dim, rest = divmod(args.block_bytes, 2 * args.block_size * 2)
    if rest:
        raise SystemExit(f"--block-bytes {args.block_bytes} must be a multiple of {4 * args.block_size}")
    return GroupLayout.of(
        TAG,
        num_layers=args.layers,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=args.block_size,
        dtype="bfloat16",
    )


def make_buffers(layout: GroupLayout, blocks: int, seed: int) -> list[np.ndarray]:
    size = blocks * layout.block_bytes
    return [np.random.default_rng(seed + i).integers(0, 256, size, dtype=np.uint8) for i in range(layout.num_layers)]


def block_ids(blocks: int, scattered: bool, seed: int) -> list[int]:
    return list(np.random.default_rng(seed).permutation(blocks)) if scattered else list(range(blocks))


class Agent:
    """An agent with its pool, and the wait for its next event."""

    def __init__(
        self, engine_id: str, layout: GroupLayout, blocks: int, mode: str, chunk_bytes: int, seed: int
    ) -> None:
        self.buffers = make_buffers(layout, blocks, seed)
        self._woken = threading.Event()
        self.agent = CacheStoreAgent(
            AgentIdentity(engine_id, "bench", layout.dtype, (layout,)),
            HostKvPool([layout], {TAG: self.buffers}),
            AgentSettings(checksum=mode, chunk_bytes=chunk_bytes, lease_seconds=600),
            wake=self._woken.set,
        )
        self.address = self.agent.start("127.0.0.1", 0)

    def events(self) -> Iterator[object]:
        deadline = time.monotonic() + WAIT_S
        while True:
            self._woken.clear()
            yield from self.agent.poll_events()
            if not self._woken.wait(max(0.0, deadline - time.monotonic())):
                raise SystemExit("no event in time")


def serve(args: argparse.Namespace, pipe: Connection) -> None:
    """The prefill side, driven over `pipe`."""
    layout = layout_of(args)
    blocks = layout.num_blocks(args.tokens)
    # Of two peers the stricter mode decides, so "off" here leaves the choice to the loading side.
    prefill = Agent("prefill", layout, blocks, "off", args.chunk_bytes, seed=1)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((prefill.address, listener.getsockname()[1]))
    result = common_pb2.PrefillResult(first_token=common_pb2.TokenOutput(index=0, token_id=1), cached_tokens=0)
    while (command := pipe.recv()) is not None:
        what, key, scattered = command
        pipe.send(cpu_seconds())
        if what == "socket":
            with listener.accept()[0] as connection:
                connection.send(b".")
                for buffer in prefill.buffers:
                    connection.sendall(buffer)
        elif what == "stage":
            agent = prefill.agent
            agent.admit(key, 1, args.tokens, {TAG: block_ids(blocks, scattered, 7)}, ready_tokens=args.tokens)
            agent.computed(key, result, hold=True)
    prefill.agent.close(5)


def receive_bare(connection: socket.socket, buffers: list[np.ndarray]) -> None:
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            view = view[connection.recv_into(view) :]


def load_with(mode: str, args: argparse.Namespace, pipe: Connection) -> None:
    """A decode side with one checksum mode, driven over `pipe`. One process holds one agent, as an engine does."""
    layout = layout_of(args)
    blocks = layout.num_blocks(args.tokens)
    decode = Agent(f"decode-{mode}", layout, blocks, mode, args.chunk_bytes, seed=1000)
    while (command := pipe.recv()) is not None:
        what, key, scattered, address = command
        mine, faults = cpu_seconds(), page_faults()
        if what == "socket":
            with socket.create_connection(address) as connection:
                connection.recv(1)
                began = time.perf_counter()
                receive_bare(connection, decode.buffers)
                seconds = time.perf_counter() - began
            first = 0.0
        else:
            ids = block_ids(blocks, scattered, 8)
            decode.agent.load(key, KvSourceRef("prefill", (address,), 1), args.tokens, {TAG: (0, ids)}, WAIT_S)
            done = next(decode.events())
            if isinstance(done, LoadFailed):
                raise SystemExit(f"load failed: {done.error} {done.error.metadata}")
            if not isinstance(done, LoadDone) or done.bytes != blocks * layout.num_layers * layout.block_bytes:
                raise SystemExit(f"unexpected event {done}")
            times = dict(done.events)
            first = (times["layer_received:0"] - times["load_started"]) / 1e9
            seconds = done.seconds
            decode.agent.take_observations()
        pipe.send((seconds, first, cpu_seconds() - mine, page_faults() - faults))
    decode.agent.close(5)


class Run:
    """One sending process, and one receiving process per checksum mode."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        layout = layout_of(args)
        self.gigabytes = layout.num_blocks(args.tokens) * layout.num_layers * layout.block_bytes / 1e9
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        self.prefill = self._start(serve, args)
        self.decodes = {mode: self._start(load_with, mode, args) for mode in ("off", "sample", "all")}
        self.address, self.port = self.prefill.recv()

    def _start(self, target: Callable[..., None], *arguments: object) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        self._processes.append((process, ours))
        return ours

    def once(self, variant: str, number: int) -> dict[str, float]:
        """One transfer: seconds, GB/s, CPU seconds of each process per GB."""
        mode, _, scattered = variant.partition(", ")
        key = f"bench-{number}#0.00000000"
        what = "socket" if mode == "socket" else "stage"
        decode = self.decodes["off" if mode == "socket" else mode]
        self.prefill.send((what, key, bool(scattered)))
        theirs = self.prefill.recv()
        address = ("127.0.0.1", self.port) if mode == "socket" else self.address
        decode.send((what, key, bool(scattered), address))
        seconds, first, mine, faults = decode.recv()
        self.prefill.send(("cpu", "", False))
        return {
            "seconds": seconds,
            "gb_per_s": self.gigabytes / seconds,
            "cpu_receive_s_per_gb": mine / self.gigabytes,
            "cpu_send_s_per_gb": (self.prefill.recv() - theirs) / self.gigabytes,
            "receive_page_faults_per_gb": faults / self.gigabytes,
            "first_layer_ms": 1000 * first,
        }

    def close(self) -> None:
        for process, pipe in self._processes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.terminate()


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    run = Run(args)
    rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    try:
        for number in range(args.repeat + 1):
            for position, variant in enumerate(VARIANTS):
                row = run.once(variant, number * len(VARIANTS) + position)
                if number:
                    rows[variant].append(row)
    finally:
        run.close()
    return rows


def spread(rows: list[dict[str, float]], key: str) -> tuple[float, float, float]:
    values = sorted(row[key] for row in rows)
    return statistics.median(values), values[0], values[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--block-bytes", type=int, default=12288, help="bytes of one block of one layer")
    parser.add_argument("--chunk-bytes", type=int, default=AgentSettings.chunk_bytes, help="payload of one event")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every measurement here")
    args = parser.parse_args()
    rows = measure(args)
    layout = layout_of(args)
    payload = layout.num_blocks(args.tokens) * layout.num_layers * layout.block_bytes
    print(
        f"{args.tokens} tokens, {args.layers} layers, {args.block_bytes} B per block and layer: "
        f"{payload / 1e6:.1f} MB, {args.repeat} rounds; median (min - max)"
    )
    print(
        f"{'variant':<38}{'GB/s':>22}{'ms':>8}{'first layer ms':>16}{'CPU s/GB send':>15}{'receive':>9}"
        f"{'faults/GB':>11}"
    )
    for variant in VARIANTS:
        rate, low, high = spread(rows[variant], "gb_per_s")
        print(
            f"{variant if variant == 'socket' else 'grpc, checksum ' + variant:<38}"
            f"{f'{rate:.2f} ({low:.2f} - {high:.2f})':>22}"
            f"{1000 * spread(rows[variant], 'seconds')[0]:8.1f}"
            f"{spread(rows[variant], 'first_layer_ms')[0]:16.1f}"
            f"{spread(rows[variant], 'cpu_send_s_per_gb')[0]:15.2f}"
            f"{spread(rows[variant], 'cpu_receive_s_per_gb')[0]:9.2f}"
            f"{spread(rows[variant], 'receive_page_faults_per_gb')[0]:11.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "rows": rows}))


if __name__ == "__main__":
    main()
