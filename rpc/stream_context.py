"""The context of a call that answers with a stream, made safe against a cancellation at its beginning.

gRPC sends a call's headers with the first answer and takes them as sent once that has been. When the write is cancelled
in between, they are on their way, and gRPC refuses the status that ends the call, because it would come with headers a
second time: the client would hear nothing until its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]

# Of a message that no client's flow control holds up at the beginning of a stream.
UNHINDERED_BYTES = 16 << 10


class StreamContext:
    """The context, but that a cancellation of the first `write`, or of `send_initial_metadata`, takes effect when gRPC
    has taken the headers. That is soon, or with the end of the connection: headers wait for no client to read, and
    they go before a first message that may have to."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.write: Callable[[Any], Awaitable[None]] = self._write
        self.send_initial_metadata: Callable[[Any], Awaitable[None]] = self._send_initial_metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def _write(self, message: Any) -> None:
        if (len(message) if isinstance(message, bytes) else message.ByteSize()) <= UNHINDERED_BYTES:
            await self._begin(self._context.write(message))
        else:
            await self._send_initial_metadata(())
            await self._context.write(message)

    async def _send_initial_metadata(self, metadata: Any) -> None:
        await self._begin(self._context.send_initial_metadata(metadata))

    async def _begin(self, sends: Awaitable[None]) -> None:
        sending = asyncio.ensure_future(sends)
        cancelled: asyncio.CancelledError | None = None
        while not sending.done():
            try:
                await asyncio.wait((sending,))
            except asyncio.CancelledError as error:
                cancelled = error
        if not sending.cancelled() and sending.exception() is None:
            self.write = self._context.write
            self.send_initial_metadata = self._context.send_initial_metadata
        if cancelled is not None:
            raise cancelled
        sending.result()
