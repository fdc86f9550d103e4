"""The transport nixl: real NIXL agents in their processes, peers that end or stand still, and machines without it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from cache_store import offering
from cache_store.events import LoadFailed
from cache_store.geometry.rows import Rows
from cache_store.loading import peers
from cache_store.memory.lease_words import LeaseWords
from cache_store.memory.pool import StagedKvPool
from cache_store.memory.regions import CUDA, Regions, file_regions
from cache_store.memory.shared_memory import MemoryFile
from cache_store.memory.staging import MemoryUnavailable
from cache_store.nixl import fetching as nixl_fetching
from cache_store.nixl import link as nixl_link
from cache_store.nixl.fetching import NixlFetcher
from cache_store.nixl.link import NixlLink, ReadFailed
from cache_store.observations import ignore
from cache_store.offering import make_offer
from protos import cache_store_pb2 as pb
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.extent import extended
from tests.integration.cluster import ROOT, process_exists
from tests.standstill import stand_still, standing_still
from tests.unit.cache_store.agents import LAYOUT, Node, assert_clean, key_of, nodes, settings, until
from tests.unit.cache_store.shared import SharedNode, needs_nixl
from tests.unit.cache_store.staged import GatedCopies, HeldMark

KEY = key_of(1)
WAIT_S = 20.0
Pair = tuple[Node, Node]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads by messages that the owner's process has to answer, as between machines without RDMA."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def link_of(node: Node) -> NixlLink:
    assert node.agent._equipment.nixl is not None
    return node.agent._equipment.nixl


def pid_of(node: Node) -> int:
    session = link_of(node).session
    assert session is not None and session.body is not None
    return session.body.pid  # type: ignore[attr-defined]


def reads_of(node: Node) -> int:
    session = link_of(node).session
    return 0 if session is None else len(session.reads)


@contextmanager
def pair(transport: str = "nixl", **more: float | str) -> Iterator[Pair]:
    """At the end nothing is held."""
    chosen = settings(transport=transport, **more)
    with nodes(SharedNode("prefill", chosen, seed=1), SharedNode("decode", chosen, seed=2)) as (prefill, decode):
        yield prefill, decode
        assert_clean(prefill, decode)


def begin_hanging_load(prefill: Node, decode: Node, theirs: list[int], own: list[int], key: str = KEY) -> None:
    """A load whose reads have begun, and wait for a process of the peer that stands still."""
    prefill.stage(key, theirs)
    decode.load(prefill.source, key, own)
    until(lambda: reads_of(decode) == 1, "the reads have begun")


# A load that comes while a NIXL process is being started anew.
NIXL_LOST = {ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED, ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED}


def warm_up(prefill: Node, decode: Node) -> None:
    prefill.stage(key_of(99), [60])
    decode.load(prefill.source, key_of(99), [60])
    assert decode.load_done().transport == "nixl"
    prefill.lease_ended()


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
def test_read_when_the_peers_process_is_killed_in_its_middle_then_a_typed_error_and_the_reload_is_served() -> None:
    with pair() as (prefill, decode):
        warm_up(prefill, decode)
        pid = pid_of(prefill)
        with standing_still(pid):
            begin_hanging_load(prefill, decode, [5, 6], [1, 2])
            os.kill(pid, signal.SIGKILL)
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED
        assert failed.retriable_here and failed.foreign and failed.transport == "nixl"
        assert reads_of(decode) == 0
        decode.load(prefill.source, KEY, [3, 4], reload=True)  # its process has been started anew
        decode.load_done()
        assert np.array_equal(decode.blocks([3, 4]), prefill.blocks([5, 6]))
        prefill.lease_ended()
        with nodes(SharedNode("prefill-2", settings(transport="nixl"), seed=3)) as (another,):
            another.stage(key_of(2), [9])
            decode.load(another.source, key_of(2), [8])
            decode.load_done()
            assert np.array_equal(decode.blocks([8]), another.blocks([9]))
            another.lease_ended()


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
def test_read_when_the_peer_stands_still_then_blocks_come_back_once_the_own_process_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_fetching, "HANG_S", 0.5)
    with pair() as (prefill, decode):
        warm_up(prefill, decode)
        own = pid_of(decode)
        with standing_still(pid_of(prefill)):
            begin_hanging_load(prefill, decode, [5, 6], [1, 2])
            decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED, "left"))
            assert decode.load_failed().error.code is ErrorCode.CANCELLED
            assert not Path(f"/proc/{own}").exists(), "what wrote the blocks is gone before they come back"
            marker = np.full(LAYOUT.block_bytes, 77, np.uint8)
            for layer in decode.memory["full"]:
                layer[[1, 2]] = marker
        prefill.lease_ended()
        prefill.stage(key_of(2), [7])
        decode.load(prefill.source, key_of(2), [3])
        event = decode.next_event()
        if isinstance(event, LoadFailed):
            # The library may end the peer's process as well, whose reader has gone while it stood still.
            assert event.error.code in NIXL_LOST and event.retriable_here
            until(lambda: link_of(prefill).session is not None, "the peer's process has been started anew")
            decode.load(prefill.source, key_of(2), [3], reload=True)
            decode.load_done()
        assert np.array_equal(decode.blocks([3]), prefill.blocks([7]))
        assert all((layer[[1, 2]] == marker).all() for layer in decode.memory["full"])
        prefill.lease_ended()


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
@pytest.mark.extended
def test_read_when_the_lease_ends_before_it_is_done_then_the_load_fails() -> None:
    faults.arm("cache_store.renew:drop,side=decode")  # which keep the lease while reads go on
    with pair(lease_seconds=2.0) as (prefill, decode):
        warm_up(prefill, decode)
        with standing_still(pid_of(prefill)):
            begin_hanging_load(prefill, decode, [5, 6], [1, 2])
            ended = prefill.lease_ended()
            assert (ended.outcome, ended.cause) == ("expired", "never_released")
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.KV_LEASE_EXPIRED and failed.foreign


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
@pytest.mark.extended
def test_agent_when_it_closes_while_a_read_hangs_then_both_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_fetching, "HANG_S", 600.0)
    chosen = settings(transport="nixl")
    with nodes(SharedNode("prefill", chosen, seed=1)) as (prefill,):
        with nodes(SharedNode("decode", chosen, seed=2)) as (decode,):
            warm_up(prefill, decode)
            with standing_still(pid_of(prefill)):
                begin_hanging_load(prefill, decode, [5, 6], [1, 2])
                decode.agent.close(10)
                assert decode.load_failed().error.code is ErrorCode.SERVER_DRAINING


OWNER = """
import sys
from tests.unit.cache_store.agents import settings
from tests.unit.cache_store.shared import SharedNode
from tests.unit.cache_store.test_nixl import pair, pid_of, warm_up

with pair() as made:
    warm_up(*made)
    print(*(pid_of(node) for node in made), flush=True)
    sys.stdin.read()
"""


@needs_nixl
@pytest.mark.extended
def test_process_when_its_engine_is_killed_while_it_hangs_then_it_ends_too() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as owner:
        try:
            assert owner.stdout is not None
            pids = [int(pid) for pid in owner.stdout.readline().split()]
            assert len(pids) == 2
            for pid in pids:
                stand_still(pid)
        finally:
            owner.kill()
    until(lambda: not any(process_exists(pid) for pid in pids), "its processes have ended")


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are made take themselves to be on machines of their own."""
    hosts = (f"host-{number}" for number in itertools.count())
    monkeypatch.setattr(offering, "this_host", lambda: next(hosts))
    monkeypatch.setattr(peers, "BETTER_SOON_S", 0.0)


numbers = itertools.count(1000)


def load_one(prefill: Node, decode: Node) -> str:
    """What a load goes by."""
    key = key_of(next(numbers))
    prefill.stage(key, [5])
    decode.load(prefill.source, key, [1])
    transport = decode.load_done().transport
    assert np.array_equal(decode.blocks([1]), prefill.blocks([5]))
    prefill.lease_ended()
    return transport


def load_until_both_have_nixl(prefill: Node, decode: Node) -> None:
    """Loads that do not wait for it: the first one has the peer make it, the second one this side."""
    for node in (prefill, decode):
        assert link_of(node).session is None
        assert load_one(prefill, decode) == "tcp"
        until(lambda node=node: link_of(node).session is not None, "nixl is ready")  # type: ignore[misc]


@needs_nixl
@pytest.mark.usefixtures("two_machines")
def test_auto_between_two_machines_then_nixl_is_made_when_it_is_asked_for_and_nobody_waits_for_it() -> None:
    with pair("auto") as (prefill, decode):
        assert prefill.agent.transports == ("ipc", "nixl", "tcp", "grpc")
        load_until_both_have_nixl(prefill, decode)
        assert load_one(prefill, decode) == "nixl"
        assert decode.count("kv_transport_fallbacks_total") == 0


@needs_nixl
@pytest.mark.usefixtures("two_machines")
@pytest.mark.parametrize("damage", ["random", extended("cut"), extended("another address")])
def test_metadata_of_a_peer_when_it_is_damaged_then_another_transport_is_used_with_one_warning(
    damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    describe = NixlLink.describe

    def damaged(link: NixlLink) -> pb.SharedPool:
        shared = describe(link)
        if damage == "random":
            shared.agent = np.random.default_rng(1).bytes(len(shared.agent))
        elif damage == "cut":
            shared.agent = shared.agent[: len(shared.agent) // 2]
        else:
            shared.layers[0].offset += 1 << 40
        return shared

    monkeypatch.setattr(NixlLink, "describe", damaged)
    with pair("auto") as (prefill, decode), caplog.at_level(logging.WARNING, "cache_store"):
        load_until_both_have_nixl(prefill, decode)
        assert load_one(prefill, decode) == load_one(prefill, decode) == "tcp"
        assert decode.count("kv_transport_fallbacks_total", transport="nixl", reason="failed") == 1
        said = [record.getMessage() for record in caplog.records if "nixl" in record.getMessage()]
        assert len(said) == 1 and said[0].startswith(f"peer={prefill.address}: transport nixl is left out: ")


@needs_nixl
def test_memory_of_a_peer_when_it_cannot_be_read_and_nixl_is_demanded_then_the_load_says_so_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe = NixlLink.describe

    def cut(link: NixlLink) -> pb.SharedPool:
        shared = describe(link)
        shared.agent = shared.agent[: len(shared.agent) // 3]
        return shared

    with pair() as (prefill, decode):
        with monkeypatch.context() as patch:
            patch.setattr(NixlLink, "describe", cut)
            prefill.stage(KEY, [5])
            decode.load(prefill.source, KEY, [1])
            failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED
        assert failed.retriable_here and not failed.foreign
        decode.load(prefill.source, KEY, [2], reload=True)
        decode.load_done()
        assert np.array_equal(decode.blocks([2]), prefill.blocks([5]))
        prefill.lease_ended()
        pids = [pid_of(node) for node in (prefill, decode)]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended with their agents"


def test_package_when_it_is_absent_then_auto_goes_without_it_and_a_demand_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offering, "installed", lambda: False)
    with pair("auto") as (prefill, decode), caplog.at_level(logging.WARNING, "cache_store"):
        assert prefill.agent.transports == ("ipc", "tcp", "grpc")
        assert load_one(prefill, decode) == "ipc"
        assert prefill.count("kv_transport_fallbacks_total", transport="nixl", reason="absent") == 1
    assert not caplog.records, "nothing is missed between two servers of one machine"
    with pytest.raises(BatonError) as refused:
        SharedNode("prefill", settings(transport="nixl"))
    assert refused.value.code is ErrorCode.INVALID_PARAMS
    assert "--kv-transport nixl" in refused.value.message and "baton[nixl]" in refused.value.message


@pytest.mark.usefixtures("two_machines")
@pytest.mark.parametrize("lacking", [["prefill"], ["decode"], ["prefill", "decode"]], ids="+".join)
def test_package_when_it_is_absent_between_two_machines_then_it_is_said_once_where_it_is_absent(
    lacking: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    having = iter(side not in lacking for side in ("prefill", "decode"))
    monkeypatch.setattr(offering, "installed", lambda: next(having))
    with caplog.at_level(logging.WARNING, "cache_store"), pair("auto") as (prefill, decode):
        for _ in range(2):
            assert load_one(prefill, decode) == "tcp"
            decode.agent._puller.peers.get(prefill.address).state = peers.PeerState.NEW  # it shakes hands again
        assert decode.count("handshakes_total", result="ok") == 2
        counts = [
            node.count("kv_transport_fallbacks_total", transport="nixl", reason="absent") for node in (prefill, decode)
        ]
        assert counts == [int(side in lacking) for side in ("prefill", "decode")]
    said = [record.getMessage() for record in caplog.records]
    # A prefill server misses nothing when its peer could not use it either.
    assert len(said) == 1, said
    assert "KV goes over tcp; transport nixl is left out: none of the packages" in said[0]
    assert said[0].startswith(f"peer={prefill.address}: ") == ("decode" in lacking)


def test_auto_when_the_memory_is_on_a_device_then_nixl_needs_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offering, "installed", lambda: True)
    monkeypatch.setattr(offering, "RDMA_DEVICES", tmp_path)
    copies = GatedCopies([], {}, None)
    pool = StagedKvPool({}, copies, Regions(CUDA, {("full", 0): 4096}, addresses={("full", 0): 1 << 40}))
    try:
        assert "nixl" not in make_offer(pool, settings(), ignore).transports
        assert make_offer(pool, settings(transport="nixl"), ignore).transports == ("nixl",)
        (tmp_path / "mlx5_0").touch()
        assert make_offer(pool, settings(), ignore).transports == ("nixl", "tcp", "grpc")
    finally:
        copies.close()


@pytest.mark.usefixtures("two_machines")
def test_process_when_it_cannot_start_then_auto_goes_without_it_with_one_warning_and_a_demand_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offering, "installed", lambda: True)
    monkeypatch.setattr(nixl_link, "MODULE", "cache_store.there_is_no_such_module")
    with pair("auto") as (prefill, decode):
        with caplog.at_level(logging.WARNING, "cache_store"):
            assert load_one(prefill, decode) == "tcp"
            until(
                lambda: prefill.count("kv_transport_fallbacks_total", transport="nixl", reason="failed") == 1, "tried"
            )
            assert load_one(prefill, decode) == "tcp"
        said = [record for record in caplog.records if "transport nixl is not possible" in record.getMessage()]
        assert len(said) == 1
    with pytest.raises(BatonError) as refused:
        SharedNode("prefill", settings(transport="nixl"))
    assert refused.value.code is ErrorCode.INVALID_PARAMS
    assert "--kv-transport nixl" in refused.value.message


# ---- the link by itself


class Memory:
    """Two layers of 64 rows of 4096 bytes in files."""

    def __init__(self, seed: int) -> None:
        self.files = {("full", layer): MemoryFile(64 * 4096) for layer in range(2)}
        self.rows = {place: np.frombuffer(file.view, np.uint8).reshape(64, 4096) for place, file in self.files.items()}
        for place, rows in self.rows.items():
            rows[:] = np.random.default_rng((seed, place[1])).integers(0, 256, rows.shape, np.uint8)
        self.words = LeaseWords(4)
        self.link = NixlLink(f"memory-{seed}", file_regions(self.files), words=self.words)


def with_links(body: Callable[[Memory, Memory], Awaitable[None]]) -> None:
    async def run() -> None:
        theirs, own = Memory(1), Memory(2)
        try:
            await asyncio.gather(theirs.link.running(), own.link.running())
            async with asyncio.timeout(WAIT_S):
                await body(theirs, own)
        finally:
            await asyncio.gather(theirs.link.close(), own.link.close())

    asyncio.run(run())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def memories() -> AsyncIterator[tuple[Memory, Memory]]:
    """For the tests that leave both processes as they are."""
    theirs, own = Memory(1), Memory(2)
    try:
        await asyncio.gather(theirs.link.running(), own.link.running())
        yield theirs, own
    finally:
        await asyncio.gather(theirs.link.close(), own.link.close())


def rows(layer: int, *numbers: int) -> Rows:
    return Rows("full", layer, 4096, numbers)


@needs_nixl
@pytest.mark.asyncio(loop_scope="module")
async def test_read_when_a_point_of_the_computation_is_not_reached_then_it_has_not_begun(
    memories: tuple[Memory, Memory],
) -> None:
    theirs, own = memories
    async with asyncio.timeout(WAIT_S):
        loop, mark = asyncio.get_running_loop(), HeldMark()
        fetcher = NixlFetcher(own.link, True, None)  # type: ignore[arg-type]  # the loop's own workers
        peer = await fetcher.open(theirs.link.describe())
        before = own.rows["full", 0].copy()
        (held,) = [part async for part in fetcher.begin(peer, range(2), rows(0, 1, 2), rows(0, 5, 9), mark)]
        (free,) = [part async for part in fetcher.begin(peer, range(1), rows(0, 3), rows(0, 30), None)]
        await free[1]
        assert np.array_equal(own.rows["full", 0][[5, 9]], before[[5, 9]]) and not held[1].done()
        loop.call_soon(mark.reached.set)
        await held[1]
        assert held[0] == range(2)
        for layer in range(2):
            assert np.array_equal(own.rows["full", layer][[5, 9]], theirs.rows["full", layer][[1, 2]])
        with pytest.raises(IndexError):
            await anext(fetcher.begin(peer, range(1), rows(0, 64), rows(0, 1), None))
        fetcher.close()


@needs_nixl
@pytest.mark.extended
def test_process_when_it_is_killed_then_its_reads_fail_at_once_and_the_next_one_serves() -> None:
    async def body(theirs: Memory, own: Memory) -> None:
        shared = theirs.link.describe()
        peer = await own.link.open(shared)
        session = own.link.session
        assert session is not None and session.body is not None
        session.kill()
        with pytest.raises(ReadFailed, match="signal 9"):
            await own.link.read(peer, range(1), rows(0, 1), rows(0, 2))
        await session.over
        again = await own.link.open(shared)
        await own.link.read(again, range(1), rows(0, 1), rows(0, 2))
        assert np.array_equal(own.rows["full", 0][2], theirs.rows["full", 0][1])
        with pytest.raises(ReadFailed):
            await own.link.read(peer, range(1), rows(0, 1), rows(0, 2))

    with_links(body)


@needs_nixl
@pytest.mark.asyncio(loop_scope="module")
async def test_word_of_a_peers_lease_then_it_stands_until_it_is_cleared_and_one_that_is_none_says_nothing(
    memories: tuple[Memory, Memory],
) -> None:
    theirs, own = memories
    async with asyncio.timeout(WAIT_S):
        fetcher = NixlFetcher(own.link, True, None)  # type: ignore[arg-type]  # the loop's own workers
        shared = theirs.link.describe()
        words = fetcher.words(await fetcher.open(shared), shared)
        index, value = theirs.words.take() or (0, 0)
        assert value
        said = [pb.LeaseWord(index=index, value=value) for _ in range(20)]
        assert all(await asyncio.gather(*map(words.stands, said)))
        for number, other in ((index, value + 1), (index, 0), (index + 1, value), (4, value), (2**32 - 1, value)):
            assert not await words.stands(pb.LeaseWord(index=number, value=other))
        theirs.words.clear(index)
        assert not await words.stands(said[0])
        again = theirs.words.take()
        assert again is not None and again[0] == index
        assert not await words.stands(said[0]), "of another lease"
        assert await words.stands(pb.LeaseWord(index=again[0], value=again[1]))
        fetcher.close()


@needs_nixl
@pytest.mark.parametrize("connected", [False, True])
def test_link_when_it_is_closed_while_its_process_starts_then_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)

    async def run() -> None:
        link, started = Memory(3).link, asyncio.Event()
        monkeypatch.setattr(nixl_link._Session, "send", lambda session, request: started.set())
        link.begin()
        async with asyncio.timeout(WAIT_S):
            await (started.wait() if connected else asyncio.sleep(0))
            await link.close()

    asyncio.run(run())
    assert [process.returncode for process in made] == [-signal.SIGKILL]


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
def test_word_when_its_owner_stands_still_then_it_says_nothing_and_the_look_ends_with_the_process_that_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_fetching, "LOOK_S", 0.1)
    monkeypatch.setattr(nixl_fetching, "HANG_S", 0.3)

    async def body(theirs: Memory, own: Memory) -> None:
        fetcher = NixlFetcher(own.link, True, None)  # type: ignore[arg-type]  # the loop's own workers
        shared = theirs.link.describe()
        words = fetcher.words(await fetcher.open(shared), shared)
        index, value = theirs.words.take() or (0, 0)
        session, owner = own.link.session, theirs.link.session
        assert session is not None and owner is not None and owner.body is not None
        with standing_still(owner.body.pid):  # type: ignore[attr-defined]
            assert not await words.stands(pb.LeaseWord(index=index, value=value))
            assert len(session.reads) == 1
            await session.over
        assert not session.reads
        assert not await words.stands(pb.LeaseWord(index=index, value=value)), "it is another process by now"
        fetcher.close()

    with_links(body)


@needs_nixl
@pytest.mark.asyncio(loop_scope="module")
async def test_memory_when_the_load_that_opens_it_is_cancelled_then_it_is_shut(
    memories: tuple[Memory, Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, own = memories
    async with asyncio.timeout(WAIT_S):
        sent: list[object] = []
        session = own.link.session
        assert session is not None
        send = session.send
        monkeypatch.setattr(session, "send", lambda request: (sent.append(request), send(request)))
        opening = asyncio.create_task(own.link.open(theirs.link.describe()))
        await asyncio.sleep(0)
        ((number, _),) = session.opening.items()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not session.opening and sent[1:] == [nixl_link.frames.Shut(number)]
        peer = await own.link.open(theirs.link.describe())
        await own.link.read(peer, range(1), rows(0, 1), rows(0, 2))
        peer.close()


@needs_nixl
@pytest.mark.asyncio(loop_scope="module")
async def test_memory_of_another_kind_then_it_is_not_opened(
    memories: tuple[Memory, Memory],
) -> None:
    theirs, own = memories
    async with asyncio.timeout(WAIT_S):
        shared = theirs.link.describe()
        for kind in ("host", "cuda", ""):
            shared.kind = kind
            with pytest.raises(MemoryUnavailable):
                await own.link.open(shared)
        shared = theirs.link.describe()
        shared.words.offset = 2**64 - 8
        with pytest.raises(MemoryUnavailable, match="no address"):
            await own.link.open(shared)


@needs_nixl
def test_agent_when_it_is_in_a_thread_as_on_a_device_then_it_reads_restarts_and_leaves_its_process_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cache_store.nixl_thread"],
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.endswith("well\n"), (done.returncode, done.stdout, done.stderr)
    assert "NIXL" not in done.stdout
