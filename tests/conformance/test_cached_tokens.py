"""Cached tokens are those of the server that computed the prompt, counted once, wherever they are told."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.prefix.blocks import PromptBlocks
from tests.conformance.live_cluster import BLOCK, COMPLETIONS, KEY_METADATA, MODEL, Live
from tests.integration.cluster import wait_for
from tests.integration.generation_client import TIMEOUT_S, request_of
from tests.unit.router.scripted_cluster import Cluster, Options, make_request

PROMPT_TOKENS = 100
PART = 3 * BLOCK
HITS = {"no": 0, "partial": PART, "full": PROMPT_TOKENS // BLOCK * BLOCK}
_numbers = itertools.count(1)


def new_prompt() -> list[int]:
    """A prompt that begins like no other."""
    number = next(_numbers)
    return [3 + number % 200, 3 + number // 200, *(10 + (7 * number + i) % 200 for i in range(PROMPT_TOKENS - 2))]


@dataclass
class Told:
    """What one request says about itself."""

    prompt: int
    cached: int
    path: str
    attempts: int


def ask_http(live: Live, prompt: Sequence[int], *, stream: bool) -> Told:
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = live.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        last = json.loads(events[-1])
    else:
        last = response.json()
    usage, baton = last["usage"], last["baton"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Told(usage["prompt_tokens"], cached, baton["path"], baton["attempts"])


def ask_grpc(live: Live, prompt: Sequence[int], *, stream: bool) -> Told:
    request = request_of(prompt, 2)
    request.stream = stream
    stub = generation_pb2_grpc.GenerationStub(live.router)
    *_, last = stub.Generate(request, timeout=TIMEOUT_S, metadata=KEY_METADATA)
    return Told(last.usage.prompt_tokens, last.usage.cached_tokens, last.baton.path, last.baton.attempts)


def settle(live: Live) -> None:
    """Until the servers have ended what was answered; the KV on the prefill server is let go a little later."""
    for server in live.cluster.servers:
        wait_for(f"the end of all requests on {server.name}", lambda server=server: not server.requests()["open"], 20.0)
    live.cluster.assert_clean_ledgers()


def flush(live: Live, role: str) -> None:
    """Empties the prefix cache of one server, whose requests have all ended."""
    channel = live.prefill if role == "prefill" else live.decode
    worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest(), timeout=5)


def make_hits(live: Live, prompt: list[int], on_prefill: str, on_decode: str) -> list[Told]:
    """Requests after which the two servers have that much of the prompt; what they told."""
    told = []
    hits = {"prefill": on_prefill, "decode": on_decode}
    for name, part in (("full", prompt), ("partial", prompt[:PART])):
        if name not in hits.values():
            continue
        told.append(ask_http(live, part, stream=False))
        settle(live)
        for role, hit in hits.items():
            if HITS[hit] < HITS[name]:
                flush(live, role)
    return told


class Counters:
    """What the processes have counted so far."""

    def __init__(self, live: Live) -> None:
        self.routers = live.cluster.router.metric("baton_cached_prompt_tokens_total", model_name=MODEL) or 0
        self.prompts = live.cluster.router.metric("baton_prompt_tokens_total", model_name=MODEL) or 0
        self.servers = live.p.metric("baton_prefix_cache_hit_tokens_total") or 0
        self.skipped = live.d.metric("baton_kv_blocks_skipped_total") or 0


@pytest.mark.parametrize("on_decode", HITS)
@pytest.mark.parametrize("on_prefill", HITS)
def test_r5_cached_tokens_when_servers_have_parts_of_the_prompt_then_all_tell_those_of_the_prefill_server(
    live: Live, on_prefill: str, on_decode: str
) -> None:
    settle(live)
    before = Counters(live)
    all_told, skipped = [], 0
    for ask, stream in itertools.product((ask_http, ask_grpc), (False, True)):
        prompt = new_prompt()
        all_told += make_hits(live, prompt, on_prefill, on_decode)
        # In the one case the part is asked for again while the decode server has all of it.
        again = PART if (on_prefill, on_decode) == ("partial", "full") else 0
        skipped += (HITS[on_decode] + again) // BLOCK
        told = ask(live, prompt, stream=stream)
        settle(live)
        assert told == Told(PROMPT_TOKENS, HITS[on_prefill], "pd", 1), (ask, stream)
        all_told.append(told)
    assert all(0 <= told.cached <= told.prompt for told in all_told)
    cached = sum(told.cached for told in all_told)

    expected = (cached, sum(told.prompt for told in all_told), cached, skipped)

    def counted() -> bool:
        now = Counters(live)
        return expected == (
            now.routers - before.routers,
            now.prompts - before.prompts,
            now.servers - before.servers,
            now.skipped - before.skipped,
        )

    wait_for("counters that agree with what was told", counted, 20.0, poll_s=0.05)


async def test_prediction_when_servers_tell_what_they_cache_then_it_is_what_they_find(live: Live) -> None:
    """The router's core in this process, with the servers' own events: both hash prompts alike."""
    cluster = Cluster(Options(policy="cache_aware"))
    for server in (live.p, live.d):
        cluster.registry.add(server.role, server.grpc)  # type: ignore[arg-type]
    prompt = new_prompt()
    try:
        async with cluster.registry, cluster.feed, cluster.orchestrator:
            await cluster.ready(2)
            index = cluster.chooser.index
            assert index is not None
            workers = cluster.registry.workers()

            async def asked(tokens: Sequence[int], salt: str = "") -> tuple[int, int]:
                """Predicted and actual cached tokens of one request, once the servers have told that they keep it."""
                blocks = PromptBlocks(tokens, BLOCK, salt)
                before = [guesses(kind) for kind in ("predicted", "actual")]
                await cluster.collect(make_request(tokens, 2, cache_salt=salt))
                await cluster.until(
                    lambda: (
                        index.matches(workers, blocks) == [blocks.count] * 2
                        and not any(map(index.unconfirmed, workers))
                    )
                )
                after = [guesses(kind) for kind in ("predicted", "actual")]
                return int(after[0] - before[0]), int(after[1] - before[1])

            def guesses(kind: str) -> float:
                return cluster.metrics.value("baton_router_prefix_tokens_total", kind=kind) or 0

            assert await asked(prompt) == (0, 0)
            assert await asked(prompt) == (HITS["full"], HITS["full"])
            assert await asked([*prompt[:PART], 9, *prompt[:PART]]) == (PART, PART)
            assert await asked(prompt, "tenant") == (0, 0)
            assert await asked(prompt, "tenant") == (HITS["full"], HITS["full"])
            await asyncio.to_thread(settle, live)
            for role in ("prefill", "decode"):
                flush(live, role)
            await cluster.until(lambda: len(index) == 0)
            assert await asked(prompt) == (0, 0)
    finally:
        await cluster.pool.close()
