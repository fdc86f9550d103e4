"""A router whose connections to its servers were forgotten on the way while nobody used them."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from router.registry import HealthSettings
from rpc.channels import CLIENT_OPTIONS
from tests.conformance.live_cluster import Live
from tests.integration.tcp_proxy import TcpProxy
from tests.unit.router.scripted_cluster import Cluster, Options, make_request

KEEPALIVE = {
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_timeout_ms": 1000,
    "grpc.http2.ping_timeout_ms": 1000,
}
FIRST_LIMIT_S = 3.0
GIVEN_UP_LIMIT_S = 10.0
QUIET_S = 0.3
PROMPT = (5, 6, 7, 8)


async def quiet(cluster: Cluster, proxies: list[TcpProxy]) -> None:
    """Nothing more is on its way, the transport's own pings included, so that nobody waits for an answer."""
    seen: list[tuple[float, int]] = []

    def still() -> bool:
        now, passed = time.monotonic(), sum(proxy.forwarded for proxy in proxies)
        if not seen or seen[-1][1] != passed:
            seen.append((now, passed))
        return now - seen[-1][0] > QUIET_S

    await cluster.until(still)


async def test_r3_requests_when_idle_connections_were_forgotten_then_they_pass_and_the_first_soon(
    live: Live,
):
    """The router's core in this process, with keep-alive of a second each way, and real servers behind proxies."""
    options = Options(
        channels=[(key, KEEPALIVE.get(key, value)) for key, value in CLIENT_OPTIONS],
        # Statuses are so rare that they neither keep a connection busy nor miss one.
        health=HealthSettings(interval_s=60.0, timeout_s=2.0),
    )
    cluster = Cluster(options)
    with ExitStack() as stack:
        proxies = []
        for role, server in (("prefill", live.p), ("decode", live.d)):
            host, _, port = server.grpc.rpartition(":")
            proxies.append(stack.enter_context(TcpProxy(("127.0.0.1", 0), (host, int(port)))))
            cluster.registry.add(role, proxies[-1].address)
        try:
            async with cluster.registry, cluster.orchestrator:
                await cluster.ready(2)
                expected = await cluster.collect(make_request(PROMPT))
                assert expected.finish.path == "pd"
                # Idle, each connection is found dead and given up: that is seen without a request.
                await quiet(cluster, proxies)
                assert [proxy.forget() > 0 for proxy in proxies] == [True, True]
                await cluster.until(lambda: not any(proxy.forgotten for proxy in proxies), GIVEN_UP_LIMIT_S)
                began = time.monotonic()
                first = await cluster.collect(make_request(PROMPT))
                assert time.monotonic() - began < FIRST_LIMIT_S
                answers = [first, *[await cluster.collect(make_request(PROMPT)) for _ in range(49)]]
                # Used the moment after, the request itself finds out; it is served all the same.
                assert [proxy.forget() > 0 for proxy in proxies] == [True, True]
                async with asyncio.timeout(2 * FIRST_LIMIT_S):
                    answers.append(await cluster.collect(make_request(PROMPT)))
                assert [a.tokens for a in answers] == [expected.tokens] * 51
        finally:
            await cluster.pool.close()
    live.cluster.assert_clean_ledgers()
