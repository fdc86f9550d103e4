"""Working for a client only as long as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive

from router.http.errors import ClientGone
from router.http.sse import EventStream


async def while_connected(
    receive: Receive, body: Callable[[], Awaitable[None]], stream: EventStream | None = None
) -> None:
    """Runs `body`; cancels it and raises ClientGone as soon as the client closes its connection.

    The request's own body must have been read. Keeps `stream` alive with pings meanwhile. What `body` raises comes out
    as it is.
    """
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive, stream))
            try:
                await body()
            except Exception as error:
                failure = error
            finally:
                watcher.cancel()
    except* ClientGone:
        raise ClientGone from None
    if failure is not None:
        raise failure


async def _watch(receive: Receive, stream: EventStream | None) -> None:
    while True:
        try:
            async with asyncio.timeout(stream.silence_left() if stream is not None else None):
                message = await receive()
        except TimeoutError:
            assert stream is not None
            await stream.ping_if_due()
            continue
        if message["type"] == "http.disconnect":
            raise ClientGone
