"""OpenAI back ends of the load generator against scripted answers; the clock is the test's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from bench.backends import BACKENDS, OpenAiChat, OpenAiCompletions, Target
from bench.datasets import Prompt
from bench.results import RequestResult, Slos, summarize
from tests.unit.bench.sse_server import DONE, SseServer, completion, event, final_usage

PROMPT = Prompt([5, 6, 7, 8, 9], "five tokens", 4)


class PacedClock:
    """Each reading is the next of `times`; a piece of the answer is let go only after the one before was read.

    A back end reads the clock when it is made, when a request begins (twice: opened, sent), and at every socket read.
    """

    def __init__(self, times: Sequence[float]) -> None:
        self._times = iter([0.0, 0.0, *times])
        self._last = 0.0
        self._read = asyncio.Semaphore(0)
        self._readings = 0

    def __call__(self) -> float:
        self._last = next(self._times, self._last)
        self._readings += 1
        if self._readings >= 3:
            self._read.release()
        return self._last

    async def next_piece(self) -> None:
        async with asyncio.timeout(60):
            await self._read.acquire()


async def measured(
    pieces: Sequence[bytes], times: Sequence[float], prompt: Prompt = PROMPT, **target: object
) -> RequestResult:
    """One request whose pieces arrive at `times[1:]`, sent at `times[0]`."""
    clock = PacedClock(times)
    async with SseServer(pieces, release=clock.next_piece) as server:
        backend = OpenAiCompletions(Target(server.url, "/v1/completions", "m", **target), clock)  # type: ignore[arg-type]
        try:
            return await backend.send(prompt)
        finally:
            await backend.close()


async def answered(pieces: Sequence[bytes], status: str = "200 OK", prompt: Prompt = PROMPT) -> RequestResult:
    async with SseServer(pieces, status=status) as server:
        backend = OpenAiCompletions(Target(server.url, "/v1/completions", "m"))
        try:
            return await backend.send(prompt)
        finally:
            await backend.close()


async def test_send_when_chunks_come_one_by_one_then_times_are_those_of_the_socket_reads() -> None:
    pieces = [completion("a", 1), completion("b", 2), completion("c", 3), completion("d", 4, "length"), DONE]
    r = await measured(pieces, [1.0, 1.5, 2.0, 2.25, 3.0, 9.0])
    assert r.error == ""
    assert r.text == "abcd"
    assert r.ttft_s == 0.5
    assert r.itls_s == [0.5, 0.25, 0.75]
    assert r.e2el_s == 2.0
    assert r.ended_at == 3.0


async def test_send_when_chunks_bundle_tokens_then_the_usage_tells_how_many() -> None:
    pieces = [completion("a", 1), completion("bcd", 4, "length"), DONE]
    r = await measured(pieces, [0.0, 1.0, 2.5, 3.0])
    assert r.itls_s == [0.5, 0.5, 0.5]
    assert r.tpot_s == 0.5
    per_chunk = await measured(pieces, [0.0, 1.0, 2.5, 3.0], itl_per_token=False)
    assert per_chunk.itls_s == [1.5]


async def test_send_when_a_token_has_no_text_yet_then_it_counts_all_the_same() -> None:
    pieces = [completion("", 1), completion("é", 4, "length"), DONE]
    r = await measured(pieces, [0.0, 1.0, 2.5, 3.0])
    assert r.ttft_s == 1.0
    assert r.text == "é"


async def test_send_when_two_events_share_a_read_then_they_share_its_time() -> None:
    pieces = [completion("a", 1) + completion("b", 2), completion("cd", 4, "length") + DONE]
    r = await measured(pieces, [0.0, 1.0, 2.0])
    assert r.itls_s == [0.0, 0.5, 0.5]


async def test_send_when_an_event_is_cut_in_two_then_its_end_is_its_arrival() -> None:
    whole = completion("abcd", 4, "length")
    r = await measured([whole[:20], whole[20:] + DONE], [0.0, 1.0, 2.0])
    assert r.error == ""
    assert r.ttft_s == 2.0


async def test_send_when_comments_and_a_role_chunk_come_first_then_they_are_no_tokens() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], usage={"completion_tokens": 0})
    pieces = [b": ping\n\n", role, completion("abcd", 4, "length"), final_usage(4, cached=3), DONE]
    r = await measured(pieces, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert r.ttft_s == 3.0
    assert r.e2el_s == 3.0
    assert r.prompt_tokens == 5
    assert r.cached_tokens == 3


def chat(tokens: int | None, finish: str | None = None, **delta: str) -> bytes:
    """A chunk of a chat; `tokens` is the running count of generated tokens."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    usage = None if tokens is None else {"prompt_tokens": 5, "completion_tokens": tokens}
    return event(choices=[choice], usage=usage)


async def test_m2_figures_when_chunks_bundle_tokens_after_a_role_and_a_thought_then_they_are_exact() -> None:
    """Role and first tokens at 0.25 s, the first chunk with three tokens, which are thought; then one, four and two."""
    role, thought = chat(0, role="assistant", content=""), chat(3, reasoning_content="so, ")
    rest = [chat(4, content="a"), chat(8, content="bcde"), chat(10, "length", content="fg")]
    times = [0.0, 0.25, 0.375, 0.625, 0.75, 0.875, 1.0]
    prompt = Prompt([5, 6, 7, 8, 9], "five tokens", 10)
    good = await measured([role + thought, *rest, final_usage(10), DONE], times, prompt=prompt)
    assert good.error == ""
    assert (good.ttft_s, good.e2el_s, good.output_tokens) == (0.25, 0.75, 10)
    assert good.itls_s == [0.125, *[0.0625] * 4, *[0.0625] * 2]
    assert good.tpot_s == 0.5 / 9
    lost = event(error={"code": "ENGINE_DEAD", "message": "the engine is gone"})
    broken = await measured([role + thought, rest[0], lost, DONE], times, prompt=prompt)
    figures = summarize(
        [good, broken], 2.0, request_rate=math.inf, max_concurrency=None, slos=Slos(), percentiles=[50]
    )  # fmt: skip
    assert (figures["completed"], figures["failed"]) == (1, 1)
    assert (figures["output_throughput"], figures["request_throughput"]) == (5.0, 0.5)
    assert (figures["mean_ttft_ms"], figures["mean_e2el_ms"]) == (250.0, 750.0)
    assert figures["mean_tpot_ms"] == pytest.approx(500 / 9)
    assert figures["mean_itl_ms"] == pytest.approx(500 / 7)


async def test_m2_first_token_when_it_is_thought_and_no_usage_runs_along_then_it_counts() -> None:
    pieces = [
        chat(None, role="assistant", content=""), chat(None, reasoning_content="so"), chat(None, "length", content="a"),
        final_usage(4), DONE,
    ]  # fmt: skip
    r = await measured(pieces, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert (r.error, r.ttft_s, r.itls_s, r.output_tokens) == ("", 2.0, [1.0], 4)


async def test_send_when_the_server_gives_no_running_usage_then_a_chunk_is_a_token_until_the_end_says_more() -> None:
    pieces = [completion("a", None), completion("b", None, "length"), final_usage(4), DONE]
    r = await measured(pieces, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert r.error == ""
    assert r.ttft_s == 1.0
    assert r.itls_s == [1.0]
    assert r.output_tokens == 4
    assert r.tpot_s == pytest.approx(1 / 3)


async def test_send_when_an_error_event_comes_in_mid_stream_then_failed_with_its_code() -> None:
    pieces = [completion("a", 1), event(error={"code": "ENGINE_DEAD", "message": "the engine is gone"}), DONE]
    r = await measured(pieces, [0.0, 1.0, 2.0, 5.0])
    assert r.error == "ENGINE_DEAD: the engine is gone"
    assert r.ended_at == 5.0


async def test_send_when_the_end_mark_is_missing_then_failed() -> None:
    r = await answered([completion("abcd", 4, "length")])
    assert r.error == "the stream ended without [DONE]"


@pytest.mark.parametrize("tokens", [3, 5])
async def test_send_when_the_token_count_is_not_the_one_asked_for_then_failed(tokens: int) -> None:
    r = await answered([completion("x", tokens, "length"), DONE])
    assert r.error == f"{tokens} tokens instead of 4"


async def test_send_when_eos_may_end_it_then_fewer_tokens_are_no_failure_but_none_are() -> None:
    async with SseServer([completion("x", 2, "stop"), DONE]) as server:
        backend = OpenAiCompletions(Target(server.url, "/v1/completions", "m", ignore_eos=False))
        assert (await backend.send(PROMPT)).error == ""
        server.pieces = [final_usage(0), DONE]
        assert (await backend.send(PROMPT)).error == "no token"
        await backend.close()


async def test_send_when_refused_then_failed_with_status_and_body() -> None:
    r = await answered([b'{"error":{"code":"model_not_found"}}'], status="404 Not Found")
    assert r.error.startswith("HTTP 404: ")
    assert "model_not_found" in r.error
    assert math.isnan(r.ttft_s)


@pytest.mark.parametrize(
    "piece", [b"data: {nonsense}\n\n", b"data: {}\n\n", b"data: []\n\n", b'data: {"choices":null}\n\n']
)
async def test_send_when_an_event_is_malformed_then_failed_and_not_raised(piece: bytes) -> None:
    assert (await answered([piece, DONE])).error.startswith("malformed answer")


async def test_send_when_nothing_listens_then_failed_and_not_raised() -> None:
    async with SseServer([]) as server:
        url = server.url
    backend = OpenAiCompletions(Target(url, "/v1/completions", "m"))
    assert (await backend.send(PROMPT)).error
    await backend.close()


async def test_body_of_completions_then_token_ids_and_the_flags_of_the_run() -> None:
    async with SseServer([completion("abcd", 4, "length"), DONE]) as server:
        target = Target(
            server.url, "/v1/completions", "m", api_key="k", temperature=0.5, seed=3, extra_body={"top_p": 0.9},
            headers={"x-session-id": "s"},
        )  # fmt: skip
        backend = OpenAiCompletions(target)
        await backend.send(PROMPT)
        await backend.close()
    [request] = server.received
    assert request.path == "/v1/completions"
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["x-session-id"] == "s"
    assert request.body == {
        "model": "m",
        "prompt": [5, 6, 7, 8, 9],
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 3,
        "top_p": 0.9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def test_body_of_chat_then_the_text_as_a_message() -> None:
    chunk = event(
        choices=[{"index": 0, "delta": {"content": "hi"}}], usage={"completion_tokens": 4}, baton={"path": "pd"}
    )
    async with SseServer([chunk, DONE]) as server:
        backend = OpenAiChat(Target(server.url, BACKENDS["openai-chat"][1], "m"))
        r = await backend.send(PROMPT)
        await backend.close()
    assert r.error == ""
    assert r.text == "hi"
    assert r.path == "pd"
    [request] = server.received
    assert request.path == "/v1/chat/completions"
    assert request.body["messages"] == [{"role": "user", "content": "five tokens"}]
    assert request.body["max_completion_tokens"] == 4
