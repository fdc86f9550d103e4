"""The orchestrator when clients leave: every open leg is aborted, and no server keeps what it held for the request."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from tests.unit.router.scripted_cluster import make_request, running_cluster
from tests.unit.router.scripted_server import Hold

CANCEL_POINTS = [
    ("decode", "start"),
    ("decode", "reserved"),
    ("decode", "loaded"),
    ("decode", "token:0"),
    ("decode", "token:1"),
    ("decode", "token:3"),
    ("decode", "finished"),
    ("prefill", "start"),
    ("prefill", "answer"),
]


@pytest.mark.parametrize(("role", "point"), CANCEL_POINTS)
@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_generate_when_the_client_leaves_then_every_open_leg_is_aborted(role, point, how):
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.servers
        hold, loading = Hold(), Hold()
        if (role, point) == ("prefill", "answer"):
            decode.at["loaded"] = loading  # it would serve the request to its end
        (prefill if role == "prefill" else decode).at[point] = hold
        events = cluster.orchestrator.generate(make_request(max_tokens=5))

        async def reached() -> None:
            await hold.wait_reached()
            for server in cluster.servers:  # the legs begin together, and the other one may be later
                await server.until(lambda server=server: server.seen)

        if how == "cancelled":

            async def read() -> None:
                async with aclosing(events):
                    async for _ in events:
                        pass

            task = asyncio.create_task(read())
            await reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            first = asyncio.create_task(anext(events))
            await reached()
            if (role, point) in [("decode", "token:3"), ("decode", "finished"), ("decode", "token:1")]:
                await first
            else:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await events.aclose()
        key = decode.seen[0].request_key
        await decode.until(lambda: decode.aborted)
        assert [k for k, _, _ in decode.aborted] == [key]
        loaded = point in ("token:0", "token:1", "token:3", "finished")
        if not loaded:
            await prefill.until(lambda: prefill.aborted)
            assert [k for k, _, _ in prefill.aborted] == [key]
        await cluster.settled()
        assert (cluster.metrics.value("baton_request_errors_total", **_client_gone()) or 0) in (0, 1)


def _client_gone() -> dict[str, str]:
    return {"model_name": "tiny", "api": "completions", "code": "CANCELLED", "phase": "before_first_token"}


async def test_k10_client_leaves_between_the_prefill_answer_and_the_first_decode_token_then_nothing_stays_staged():
    rng = random.Random(7)
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.servers
        for _ in range(20):
            hold = Hold()
            decode.at = {rng.choice(["start", "reserved", "loaded", "token:0"]): hold}
            events = cluster.orchestrator.generate(make_request())
            await anext(events)  # the prefill server's token
            await hold.wait_reached()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            await events.aclose()
            await cluster.settled()
        assert not prefill.staged
