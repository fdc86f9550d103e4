"""What a row of the table of bad requests is, and how each kind of request is sent."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.message import Message

from tests.conformance import refusals
from tests.conformance.live_cluster import API_KEY, CHAT, COMPLETIONS, KEY_METADATA, MODEL, Live
from tests.conformance.refusals import Refusal

CALL_LIMIT_S = 15.0
USER = {"role": "user", "content": "hi"}
JSON = {"Content-Type": "application/json"}

Send = Callable[[Live], Refusal]


@dataclass(frozen=True)
class Row:
    """One bad request.

    `code` is the number of docs/error_codes.md, which gives the status. With 0 the transport itself refuses, without
    details, and `status` is what it says. `says`: parts of the message. `param`: the field at fault; "" for none.
    """

    what: str
    send: Send
    code: int
    says: tuple[str, ...] = ()
    param: str | None = None
    status: grpc.StatusCode | None = None

    def check(self, live: Live) -> Refusal:
        refusal = self.send(live)
        assert refusal.code == self.code, refusal
        if self.status is not None:
            assert refusal.status is self.status, refusal
        for part in self.says:
            assert part in refusal.message, refusal
        if self.param is not None:
            assert (refusal.param or "") == self.param, refusal
        assert API_KEY not in refusal.message
        return refusal


# -- HTTP ------------------------------------------------------------------------------------------------------


def request(
    method: str,
    path: str,
    content: Any = None,
    *,
    headers: dict[str, str | bytes] | None = None,
    key: str | None = API_KEY,
    of: str = "router",
) -> Send:
    """`content`: bytes as they are, a function that gives parts, or anything as JSON. `of`: the process asked."""

    def send(live: Live) -> Refusal:
        given: dict[str, str | bytes] = dict(headers or {})
        body = content() if callable(content) else content
        if body is not None and not isinstance(body, bytes) and not callable(content):
            body = json.dumps(body).encode()
        if body is not None and not any(name.lower() == "content-type" for name in given):
            given |= JSON
        if key is not None:
            given.setdefault("Authorization", f"Bearer {key}")
        server = {"router": live.cluster.router, "prefill": live.p, "decode": live.d}[of]
        with httpx.Client(timeout=CALL_LIMIT_S, verify=False) as client:
            return refusals.of_response(
                client.request(method, f"http://{server.http}{path}", content=body, headers=given)
            )

    return send


def _generation(path: str, body: dict[str, Any], streamed_too: bool) -> Send:
    def send(live: Live) -> Refusal:
        refusal = refusals.of_response(live.http.post(path, json=body))
        if streamed_too and "stream" not in body:
            # An early failure has the same status and body with and without streaming.
            streamed = refusals.of_response(live.http.post(path, json={**body, "stream": True}))
            assert (streamed.status, streamed.code, streamed.message, streamed.param) == (
                refusal.status, refusal.code, refusal.message, refusal.param,
            )  # fmt: skip
        return refusal

    return send


def text(_streamed_too: bool = True, **fields: Any) -> Send:
    """A completion, which is good but for `fields`; a field that is ... is left out."""
    body = {"model": MODEL, "prompt": "hi", **fields}
    return _generation(COMPLETIONS, {k: v for k, v in body.items() if v is not ...}, _streamed_too)


def chat(_streamed_too: bool = True, **fields: Any) -> Send:
    body = {"model": MODEL, "messages": [USER], **fields}
    return _generation(CHAT, {k: v for k, v in body.items() if v is not ...}, _streamed_too)


def raw_http(data: bytes, of: str) -> Send:
    """Bytes on a connection to the HTTP port of a process."""

    def send(live: Live) -> Refusal:
        server = {"router": live.cluster.router, "prefill": live.p, "decode": live.d}[of]
        host, _, port = server.http.rpartition(":")
        with socket.create_connection((host, int(port)), CALL_LIMIT_S) as connection:
            connection.settimeout(CALL_LIMIT_S)
            answer = b""
            with contextlib.suppress(ConnectionError):  # it may be refused before all is sent
                connection.sendall(data)
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(65536):
                    answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        return refusals.of_response(httpx.Response(int(lines[0].split()[1]), headers=headers, content=body))

    return send


# -- gRPC ------------------------------------------------------------------------------------------------------


def channel_of(live: Live, where: str) -> grpc.Channel:
    channel: grpc.Channel = getattr(live, where)
    return channel


def call(
    where: str,
    method: str,
    message: Message | bytes | Callable[[], Message | bytes],
    *,
    metadata: Iterable[tuple[str, str | bytes]] | None = None,
    timeout: float = CALL_LIMIT_S,
    stream: bool | None = None,
) -> Send:
    """A call of `baton.v1.{method}` at `where` (an attribute of Live) with a message, or with bytes as they are.

    The router gets the API key unless there is other `metadata`. A call that succeeds, or does not end, is a failure.
    """
    streams = method.partition("/")[2] in ("Generate", "Load", "Decode", "WatchStatus") if stream is None else stream
    path = method if method.startswith("/") else f"/baton.v1.{method}"
    default = KEY_METADATA if where == "router" else ()
    given = tuple(default if metadata is None else metadata)

    def send(live: Live) -> Refusal:
        built = message() if callable(message) else message
        data = built if isinstance(built, bytes) else built.SerializeToString()
        channel = channel_of(live, where)
        try:
            if streams:
                answers: object = list(channel.unary_stream(path)(data, timeout=timeout, metadata=given))
            else:
                answers = channel.unary_unary(path)(data, timeout=timeout, metadata=given)
        except grpc.RpcError as error:
            return refusals.of_call(error)
        raise AssertionError(f"{path} was answered: {answers!r}")

    return send
