"""Floods of loads for keys that nobody has: their number and their time are bounded, and so is the memory."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from pathlib import Path

import grpc.aio
import pytest

from cache_store.wire import SERVICE
from protos import cache_store_pb2
from rpc.errors import ErrorCode
from rpc.status import from_rpc_error
from tests.chaos.cases import ROUTER_FLAGS, assert_serves
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.unit.engine.tiny_models import tiny_model

BLOCK = 16
SIZES = ("--block-size", str(BLOCK), "--num-kv-blocks", "64", "--max-num-seqs", "16")
CALLS = 100_000
OPEN = 400  # calls at a time, over one connection: more than one peer may have parked
LIMIT_S = 60.0
MOST_MIB = 20.0
LATER_MIB = 5.0  # what the second half may add to the first
WARM_UP = 5


def resident_mib(server: ServerProcess) -> float:
    """Of the front and the engine together."""
    found = 0
    for pid in (server.pid, server.engine_pid):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        found += next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return found / 1024


class Flood:
    """`calls` loads with random keys, each awaited; `codes` counts how they ended."""

    def __init__(self, server: ServerProcess, calls: int) -> None:
        self.codes: Counter[ErrorCode] = Counter()
        self._address = server.cache_store[0]
        self._engine_id = server.engine_id
        self._left = calls

    def _request(self) -> bytes:
        key = f"{secrets.token_hex(8)}#0.{secrets.token_hex(4)}"
        wanted = cache_store_pb2.WantedBlocks(
            group="full", block_size=BLOCK, first_block=0, num_blocks=1, block_bytes=2 * 2 * BLOCK * 16 * 4,
            num_layers=3, partition_count=1, partition_id=0,
        )  # fmt: skip
        return cache_store_pb2.LoadRequest(
            reference=cache_store_pb2.KvReference(engine_id=self._engine_id, request_key=key), wanted=[wanted],
            prompt_tokens=BLOCK, checksum="all", chunk_bytes=1 << 20,
            reader=cache_store_pb2.ReaderRank(rank=0, tp_size=1),
        ).SerializeToString()  # fmt: skip

    async def _one_after_the_other(self, channel: grpc.aio.Channel) -> None:
        load = channel.unary_stream(f"/{SERVICE}/Load")
        while self._left:
            self._left -= 1
            try:
                async for _ in load(self._request(), timeout=LIMIT_S):
                    raise AssertionError("an event of a load that is of nothing")
            except grpc.aio.AioRpcError as error:
                found = from_rpc_error(error, leg="cache_store", deadline_passed=False, was_ready=True)
                self.codes[found.code] += 1

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel, asyncio.TaskGroup() as tasks:
            for _ in range(OPEN):
                tasks.create_task(self._one_after_the_other(channel))


@pytest.mark.extended
@pytest.mark.timeout(1800)
async def test_k7_flood_of_100_000_invented_keys_then_memory_is_bounded_and_requests_complete_meanwhile() -> None:
    """The short form, with 300 of them, is of the service alone."""
    with Cluster(
        1, 1, model=tiny_model("llama"),
        prefill_flags=(*SIZES, "--cache-store-publish-timeout-ms", "2000"), decode_flags=SIZES,
        router_flags=ROUTER_FLAGS,
    ) as cluster:  # fmt: skip
        (prefill,) = cluster.prefill
        for number in range(WARM_UP):
            await asyncio.to_thread(assert_serves, cluster, f"before {number}")
        before = resident_mib(prefill)
        flood = Flood(prefill, CALLS)
        most, early, served = before, before, 0
        async with asyncio.TaskGroup() as tasks:
            flooding = tasks.create_task(flood.run())
            while not flooding.done():
                await asyncio.to_thread(assert_serves, cluster, f"salt-{served}")
                served += 1
                most = max(most, resident_mib(prefill))
                if flood.codes.total() < CALLS // 2:
                    early = most
                await asyncio.wait([flooding], timeout=1.0)
        assert flood.codes.total() == CALLS
        assert flood.codes.keys() == {
            ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT,
            ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED,
        }
        assert served > 3
        sizes = f"{before:.1f} MiB before, {early:.1f} MiB in the first half, {most:.1f} MiB at the most; {flood.codes}"
        assert most - before < MOST_MIB, sizes
        assert most - early < LATER_MIB, sizes
        wait_for("nothing to wait any more", lambda: prefill.total("baton_kv_transfer_queue_depth") == 0, 10.0)
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == []
