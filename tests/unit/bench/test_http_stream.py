"""The load generator's HTTP client against raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from bench.http_stream import HttpFailed, HttpPool

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(answers: Sequence[bytes], *, close: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """Answers the requests of each connection in turn; the list has the number of requests of each connection."""
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(0)
        number = len(served) - 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                writer.write(answers[min(sum(served), len(answers) - 1)])
                served[number] += 1
                await writer.drain()
                if close:
                    break

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", served
    finally:
        server.close()


async def body_of(pool: HttpPool) -> bytes:
    async with asyncio.timeout(60), pool.post("/x", b"{}") as answer:
        assert await answer.wait_status() == 200
        return b"".join([piece async for _, piece in answer.pieces()])


async def test_post_when_answers_have_an_end_then_the_connection_is_used_again() -> None:
    chunked, sized = HEAD + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with serving([chunked, sized, chunked]) as (url, served):
        pool = HttpPool(url, {}, time.monotonic)
        assert [await body_of(pool) for _ in range(3)] == [b"abcde", b"ok", b"abcde"]
        pool.close()
    assert served == [3]


async def test_post_when_two_are_open_at_a_time_then_each_has_its_connection() -> None:
    async with serving([HEAD + b"1\r\na\r\n0\r\n\r\n"]) as (url, served):
        pool = HttpPool(url, {}, time.monotonic)
        await asyncio.gather(body_of(pool), body_of(pool))
        pool.close()
    assert sorted(served) == [1, 1]


async def test_post_when_the_server_closed_an_idle_connection_then_a_new_one_is_made() -> None:
    async with serving([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\na"], close=True) as (
        url,
        served,
    ):
        pool = HttpPool(url, {}, time.monotonic)
        assert [await body_of(pool), await body_of(pool)] == [b"a", b"a"]
        pool.close()
    assert served == [1, 1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HEAD + b"5\r\nab", "closed before the end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab", "closed before the end"),
        (b"", "closed before the end"),
        (b"hello\r\n\r\n", "no HTTP"),
    ],
)
async def test_post_when_the_answer_breaks_off_or_is_none_then_failed(answer: bytes, reason: str) -> None:
    async with serving([answer], close=True) as (url, _):
        pool = HttpPool(url, {}, time.monotonic)
        with pytest.raises(HttpFailed, match=reason):
            await body_of(pool)


async def test_post_when_left_early_then_the_connection_is_dropped() -> None:
    async with serving([HEAD + b"1\r\na\r\n"]) as (url, served):
        pool = HttpPool(url, {}, time.monotonic)
        for _ in range(2):
            async with asyncio.timeout(60), pool.post("/x", b"{}") as answer:
                assert await answer.wait_status() == 200
    assert served == [1, 1]


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:x"])
def test_pool_when_the_address_is_none_then_said(url: str) -> None:
    with pytest.raises(HttpFailed, match="write http://host:port"):
        HttpPool(url, {}, time.monotonic)
