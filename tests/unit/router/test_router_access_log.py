"""A router whose access log goes to a pipe that nobody reads: requests, counts and the exit must not depend on it."""

from __future__ import annotations

import os
import re
import signal
import time

import httpx

from tests.unit.router.test_router_process import running_router

REQUESTS = 300


async def test_access_log_when_nobody_reads_it_then_requests_go_on_drops_are_counted_and_the_exit_is_in_time(tmp_path):
    pipe = tmp_path / "access.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # open, so that the router can open it too
    flags = (
        *("--access-log-path", str(pipe), "--access-log-queue-size", "5", "--access-log-batch-size", "1"),
        *("--access-log-close-timeout-seconds", "0.5", "--drain-grace-secs", "0"),
    )
    try:
        async with (
            running_router(tmp_path, *flags) as router,
            httpx.AsyncClient(base_url=router.url, timeout=30) as client,
        ):
            slowest = 0.0
            for number in range(REQUESTS):
                began = time.monotonic()
                answer = await client.post(
                    "/v1/completions",
                    json={"prompt": "x", "temperature": 9},
                    headers={"X-Request-Id": f"{number}-{'x' * 100}"},
                )
                slowest = max(slowest, time.monotonic() - began)
                assert answer.status_code == 400
            assert slowest < 5
            stats = (await client.get("/server_info")).json()["access_log"]
            assert stats["written"] > 0 and stats["dropped"] > 0, stats
            assert stats["enqueued"] + stats["dropped"] == REQUESTS
            page = (await client.get("/metrics")).text
            found = re.search(r"^baton_log_dropped_total\S* (\S+)$", page, re.MULTILINE)
            assert found is not None and float(found[1]) == stats["dropped"]
            began = time.monotonic()
            router.process.send_signal(signal.SIGTERM)
            assert await router.exit_code() == 0
            assert time.monotonic() - began < 5
    finally:
        os.close(reader)
