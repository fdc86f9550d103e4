"""Server-sent events: their exact bytes, and the response that carries them.

A chunk is put together from parts that are constant over a stream and the few that are not; only text and numbers are
encoded for each one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from starlette.types import Send

from router.answer import Usage
from rpc.errors import BatonError, http_error_body

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

UsageMode = Literal["none", "final", "continuous"]
Kind = Literal["chat", "completions"]

encode = msgspec.json.encode


def usage_object(usage: Usage) -> dict[str, Any]:
    """`usage` of a response. `prompt_tokens_details` is null until a server said what it had cached."""
    cached = usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


class Chunks:
    """The events of one stream. `usage_mode`: no `usage` key; null until the last chunk; running in every chunk."""

    def __init__(self, kind: Kind, *, id: str, created: int, model: str, usage_mode: UsageMode) -> None:
        self._kind: Kind = kind
        self._usage_mode: UsageMode = usage_mode
        name = "chat.completion.chunk" if kind == "chat" else "text_completion"
        envelope = encode({"id": id, "object": name, "created": created, "model": model})
        self._head = b"data: " + envelope[:-1] + b',"choices":['
        self._body = b',"delta":{"content":' if kind == "chat" else b',"text":'
        self._logprobs = b'},"logprobs":' if kind == "chat" else b',"logprobs":'

    def role(self, index: int, usage: Usage) -> bytes:
        """A chat's first chunk of a choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return b"%b%b]%b}\n\n" % (self._head, choice, self._usage(usage))

    def text(
        self,
        index: int,
        text: str,
        usage: Usage,
        *,
        logprobs: bytes = b"null",
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        baton: bytes = b"",
        tool_calls: bytes = b"",
    ) -> bytes:
        """A content chunk; with `finish_reason` the last one of its choice. `logprobs`, `baton` and `tool_calls` are
        JSON."""
        content = encode(text if text or not tool_calls else None)
        if tool_calls:
            content += b',"tool_calls":' + tool_calls
        if finish_reason is None:
            end = b',"finish_reason":null}'
        else:
            end = b',"finish_reason":%b,"stop_reason":%b}' % (encode(finish_reason), encode(stop_reason))
        return b'%b{"index":%d%b%b%b%b%b]%b%b}\n\n' % (
            self._head,
            index,
            self._body,
            content,
            self._logprobs,
            logprobs,
            end,
            self._usage(usage),
            b',"baton":' + baton if baton else b"",
        )

    def usage(self, usage: Usage, baton: bytes) -> bytes:
        """The extra chunk before the end of a stream that includes usage."""
        return b'%b],"usage":%b,"baton":%b}\n\n' % (self._head, encode(usage_object(usage)), baton)

    def _usage(self, usage: Usage) -> bytes:
        if self._usage_mode == "none":
            return b""
        if self._usage_mode == "final":
            return b',"usage":null'
        return b',"usage":' + encode(usage_object(usage))


def error_event(error: BatonError, timeline: Mapping[str, float] | None = None) -> bytes:
    """The error JSON as an event; with the timeline beside it for a client that asked for one."""
    content = http_error_body(error)
    if timeline is not None:
        content["baton"] = {"timeline": {stage: round(seconds, 6) for stage, seconds in timeline.items()}}
    return b"data: %b\n\n" % encode(content)


class EventStream:
    """The response of a stream: nothing is sent, not even the status, before its first event.

    `write` waits while the client reads too slowly (the server's flow control). Each call hands over whole events, so a
    ping never lands inside one.
    """

    def __init__(self, send: Send, ping_interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._ping_interval_s = ping_interval_s
        self._clock = clock
        self._last_write = 0.0
        self.started = False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self._last_write = self._clock()
        await self._send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})

    async def write(self, events: bytes) -> None:
        self._last_write = self._clock()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self, events: bytes) -> None:
        """Writes the last events and ends the response."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def silence_left(self) -> float:
        """Seconds after which to ask again whether a ping is due."""
        if not self.started:
            return self._ping_interval_s
        return max(0.0, self._last_write + self._ping_interval_s - self._clock())

    async def ping_if_due(self) -> None:
        """Writes a comment after too long a silence; never before the first event, which commits the status."""
        if self.started and self.silence_left() <= 0:
            await self.write(PING)
