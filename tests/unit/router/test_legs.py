"""Single legs against scripted servers: what their end means, and that they are given back whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import grpc
import grpc.aio
import pytest

from protos import decode_pb2, prefill_pb2
from router.legs import END, Aborts, DecodeLeg, LegTasks, PrefillLeg, abort_source
from router.mailbox import Mailbox
from router.wire import generate_input, kv_source, sampling_params
from rpc.channels import ChannelPool
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from tests.unit.router.scripted_cluster import make_request, running_cluster
from tests.unit.router.scripted_server import WAIT_S, Hold, fails

KEY = "id#0.0123abcd"


def start_leg(cluster, server, *, deadline=None, prefill=None, mailbox=None, pool=None):
    request = make_request(request_id="id")
    worker = cluster.worker(server)
    message = generate_input(request, KEY, sampling_params(request.sampling, 1), (), worker)
    common = {
        "pool": cluster.pool if pool is None else pool,
        "tasks": cluster.orchestrator._tasks,
        "mailbox": mailbox if mailbox is not None else Mailbox(),
        "deadline": deadline or Deadline.after(10),
        "max_rpc_s": None,
        "metadata": (("x-request-id", "id"),),
    }
    if server.role == "prefill":
        leg = PrefillLeg(prefill_pb2.PrefillRequest(input=message, hold_kv=False), worker, KEY, **common)
    else:
        decode = decode_pb2.DecodeRequest(input=message)
        if prefill is None:
            decode.local_prefill.SetInParent()
        else:
            decode.kv_source.CopyFrom(kv_source(cluster.worker(prefill)))
        leg = DecodeLeg(decode, worker, KEY, **common)
    return leg, common["mailbox"]


@contextlib.asynccontextmanager
async def own_pool():
    pool = ChannelPool()
    try:
        yield pool
    finally:
        await pool.close()


async def read(mailbox):
    async with asyncio.timeout(20):
        return await mailbox.get()


async def test_prefill_leg_when_it_is_answered_then_the_server_ended_it():
    async with running_cluster(1, 0) as cluster:
        leg, mailbox = start_leg(cluster, cluster.servers[0])
        assert cluster.worker(cluster.servers[0]).inflight == 1
        sender, payload = await read(mailbox)
        assert sender is leg
        assert payload.HasField("result")
        assert leg.ended_by_server
        assert leg.answered
        leg.end(None)
        leg.end(None)
        leg.leave()
        leg.cut()
        assert cluster.worker(cluster.servers[0]).inflight == 0
        await cluster.settled()


async def test_decode_leg_when_it_runs_then_its_events_come_in_order_and_end_last():
    async with running_cluster(0, 1, local=True) as cluster:
        leg, mailbox = start_leg(cluster, cluster.servers[0])
        kinds = []
        while (payload := (await read(mailbox))[1]) is not END:
            kinds.append(payload.WhichOneof("event"))
        assert kinds == ["tokens"] * 6 + ["finished"]
        leg.end(None)
        await cluster.settled()


async def test_decode_leg_when_it_is_not_read_then_the_sender_is_held_back():
    async with running_cluster(0, 1, local=True) as cluster:
        mailbox = Mailbox(limit=2)
        leg, _ = start_leg(cluster, cluster.servers[0], mailbox=mailbox)
        await cluster.until(lambda: len(mailbox) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(mailbox) == 2
        leg.leave()
        leg.cut()
        await cluster.until(lambda: not cluster.servers[0].open)


@pytest.mark.parametrize(
    ("at", "code", "typed"),
    [
        (fails(ErrorCode.MALLOC_FAILED), ErrorCode.DECODE_MALLOC_FAILED, True),
        (fails(ErrorCode.WAIT_TO_RUN_TIMEOUT), ErrorCode.WAIT_TO_RUN_TIMEOUT, True),
        ("kill", ErrorCode.CONNECTION_RESET_BY_PEER, False),
    ],
)
async def test_decode_leg_when_it_fails_then_the_error_is_typed_and_says_who(at, code, typed):
    async with running_cluster(0, 1, local=True) as cluster:
        server = cluster.servers[0]
        server.at["start"] = server.stop if at == "kill" else at
        leg, mailbox = start_leg(cluster, server)
        error = (await read(mailbox))[1]
        assert error.code is code
        assert error.metadata["peer"] == server.address
        assert error.metadata["leg"] == "decode"
        assert server.address not in error.message
        assert leg.ended_by_server is typed
        leg.end(error)
        assert cluster.worker(server).inflight == 0


async def test_leg_when_nobody_listens_there_then_it_could_not_connect():
    async with running_cluster(0, 1, local=True) as cluster:
        server = cluster.servers[0]
        await server.stop()
        await cluster.until(lambda: cluster.worker(server).state == "unhealthy")
        # Its calls end a moment before its connection does.
        await cluster.until(lambda: not cluster.pool.is_ready(server.address))
        leg, mailbox = start_leg(cluster, server)
        error = (await read(mailbox))[1]
        assert error.code is ErrorCode.CONNECT_FAILED
        leg.end(error)


async def test_leg_when_the_requests_deadline_passes_then_603():
    async with running_cluster(1, 0) as cluster:
        server = cluster.servers[0]
        server.at["start"] = Hold()
        leg, mailbox = start_leg(cluster, server, deadline=Deadline.after(0.1))
        error = (await read(mailbox))[1]
        assert error.code is ErrorCode.GENERATE_TIMEOUT
        leg.end(error)
        await cluster.until(lambda: not server.open)


async def test_leave_when_the_leg_is_open_then_it_is_cancelled_given_back_and_silent():
    async with running_cluster(1, 0) as cluster:
        server = cluster.servers[0]
        hold = Hold()
        server.at["start"] = hold
        leg, mailbox = start_leg(cluster, server)
        await hold.wait_reached()
        for _ in range(2):
            leg.leave()
            leg.cut()
        assert cluster.worker(server).inflight == 0
        await cluster.settled()
        assert not len(mailbox)


async def test_aborts_when_a_server_is_gone_then_they_end_by_themselves():
    async with running_cluster(1, 0) as cluster:
        server = cluster.servers[0]
        await server.stop()
        tasks = LegTasks()
        aborts = Aborts(cluster.pool, cluster.metrics, tasks, pause_s=0.01)
        leg, _ = start_leg(cluster, server)
        leg.leave()
        aborts.give_up([leg], ErrorCode.CANCELLED, "client")
        assert len(tasks) == 1
        await tasks.close(5)
        assert not len(tasks)
        assert cluster.metrics.value("baton_aborts_total", leg="prefill", source="client") == 1


async def test_aborts_when_the_pool_is_closed_then_nothing_is_raised():
    async with running_cluster(1, 0) as cluster:
        pool, tasks = ChannelPool(), LegTasks()
        leg, _ = start_leg(cluster, cluster.servers[0])
        leg.leave()
        await pool.close()
        Aborts(pool, cluster.metrics, tasks).give_up([leg], ErrorCode.CANCELLED, "client")
        await tasks.close(5)


@pytest.mark.parametrize("muted", [False, True])
async def test_aborts_when_two_legs_are_given_up_then_each_server_is_told_before_calls_are_cancelled_in_order(muted):
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.servers
        told = []

        async def hear(server, hear_before, *what):
            told.append((server.role, KEY in prefill.open, KEY in decode.open))
            return await hear_before(*what)

        holds = {server.role: Hold() for server in cluster.servers}
        for server in cluster.servers:
            server.at["start"] = holds[server.role]
            server.abort = functools.partial(hear, server, server.abort)
        legs = [start_leg(cluster, decode, prefill=prefill)[0], start_leg(cluster, prefill)[0]]
        for hold in holds.values():
            await hold.wait_reached()
        decode.muted = muted  # it hears, and does not answer
        for leg in legs:
            leg.leave()
        tasks = LegTasks()
        times = {"timeout_s": 1.5, "tell_s": 1.0} if muted else {"timeout_s": WAIT_S, "tell_s": WAIT_S}
        aborts = Aborts(cluster.pool, cluster.metrics, tasks, attempts=1, **times)
        aborts.give_up(legs, ErrorCode.GENERATE_TIMEOUT, "deadline")
        await cluster.until(lambda: not (prefill.open or decode.open))
        assert told[0] == ("decode", True, True)
        assert told[1][:2] == ("prefill", True)
        assert muted or prefill.aborted == decode.aborted == [(KEY, ErrorCode.GENERATE_TIMEOUT, "deadline")]
        await tasks.close(5)
        assert not len(tasks)


@pytest.mark.parametrize(
    ("code", "source"),
    [
        (ErrorCode.CANCELLED, "client"),
        (ErrorCode.GENERATE_TIMEOUT, "deadline"),
        (ErrorCode.SERVER_DRAINING, "drain"),
        (ErrorCode.EXECUTION_EXCEPTION, "peer"),
    ],
)
def test_abort_source_when_a_request_ends_then_it_names_who_asked(code, source):
    assert abort_source(BatonError(code)) == source


@pytest.mark.invariant("RPC-9")
async def test_channel_when_a_call_with_details_meets_a_broken_connection_then_it_is_replaced_and_the_code_kept():
    # A pool of its own: nobody else looks at its channels, or asks for one and finds it broken.
    async with running_cluster(0, 1, local=True) as cluster, own_pool() as pool:
        server = cluster.servers[0]
        server.at["start"] = fails(ErrorCode.OUTPUT_QUEUE_FULL)
        leg, mailbox = start_leg(cluster, server, pool=pool)
        # Details alone say nothing against the connection.
        error = (await read(mailbox))[1]
        assert error.code is ErrorCode.OUTPUT_QUEUE_FULL
        assert pool.statistics()["evictions"] == 0
        leg.end(error)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await leg._call.read()
        channel = pool.get(server.address)
        await server.stop()
        async with asyncio.timeout(10):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await channel.wait_for_state_change(state)
        # The same failure once more, now that the connection is gone.
        typed = leg._typed(caught.value)
        assert typed.code is ErrorCode.OUTPUT_QUEUE_FULL
        assert pool.statistics()["evictions"] == 1
        assert pool.get(server.address) is not channel
