"""The index against servers that tell what their prefix caches hold, and the choices that follow from it."""

from __future__ import annotations

import pytest

from router.prefix.blocks import PromptBlocks
from router.requests import Sampling
from tests.unit.router.scripted_cluster import Cluster, make_request, running_cluster
from tests.unit.router.scripted_server import Hold

PROMPT = tuple(range(100, 180))  # five blocks
BLOCKS = PromptBlocks(PROMPT, 16).first(5)
OTHER = PromptBlocks(tuple(range(500, 532)), 16).first(2)


def entries(cluster: Cluster, server) -> int:
    return cluster.chooser.index.entries_of(cluster.worker(server))


async def known(cluster: Cluster, server, count: int) -> None:
    await cluster.until(lambda: entries(cluster, server) == count)


async def test_feed_when_servers_tell_what_they_cache_then_the_index_has_it():
    async with running_cluster(2, 1, policy="cache_aware") as cluster:
        first, second, decode = cluster.servers
        await first.cache(stored=BLOCKS)
        await second.cache(stored=BLOCKS[:2])
        await decode.cache(stored=OTHER)
        await known(cluster, first, 5)
        await known(cluster, second, 2)
        await known(cluster, decode, 2)
        await first.cache(removed=BLOCKS[3:], stored=OTHER)
        await second.cache(cleared=True)
        await known(cluster, first, 5)
        await known(cluster, second, 0)
        workers = [cluster.worker(first), cluster.worker(second)]
        await cluster.until(lambda: cluster.chooser.index.matches(workers, BLOCKS) == [3, 0])
        cluster.feed.show()
        assert cluster.metrics.value("baton_router_index_entries") == 7
        assert cluster.metrics.value("baton_router_index_bytes") == cluster.chooser.index.size_bytes() > 7 * 16


async def test_feed_when_a_server_is_added_later_then_its_stream_begins_with_what_it_has():
    async with running_cluster(1, 1, policy="cache_aware") as cluster:
        late = await cluster.add("prefill")
        await late.cache(stored=BLOCKS)
        await cluster.ready(3)
        await known(cluster, late, 5)


async def test_feed_when_batches_are_missing_then_it_starts_over_and_has_what_is_there():
    async with running_cluster(1, 1, policy="cache_aware") as cluster:
        server = cluster.servers[0]
        await server.cache(stored=OTHER)
        await known(cluster, server, 2)
        server.kv_lost = 1
        await server.cache(stored=BLOCKS)
        await known(cluster, server, 7)


async def test_feed_when_a_server_says_that_it_was_emptied_then_what_it_was_given_is_still_expected():
    """Each stream begins with that word, also one that begins after a request was sent."""
    async with running_cluster(1, 1, policy="cache_aware") as cluster:
        server = cluster.servers[0]
        await server.cache(stored=OTHER)
        await known(cluster, server, 2)
        assert cluster.chooser.choose(make_request(PROMPT), 0).predicted_tokens == 0
        await known(cluster, server, 7)
        await server.cache(cleared=True)
        await known(cluster, server, 5)
        assert cluster.chooser.choose(make_request(PROMPT), 0).predicted_tokens == 64


@pytest.mark.parametrize("wrong", [b"", b"\0" * 15, b"\0" * 100_000], ids=["empty", "short", "long"])
async def test_feed_when_a_hash_has_not_its_length_then_nothing_is_kept_and_the_breach_is_counted(wrong):
    async with running_cluster(1, 1, policy="cache_aware") as cluster:
        server = cluster.servers[0]
        await server.cache(stored=OTHER)
        await known(cluster, server, 2)
        await server.cache(stored=[*BLOCKS, wrong])
        await cluster.until(lambda: cluster.metrics.value("baton_contract_breaches_total", kind="absent_field"))
        await known(cluster, server, 0)
        assert wrong not in cluster.chooser.index._servers[cluster.worker(server)].held


async def test_feed_when_a_server_restarts_then_nothing_of_its_old_cache_is_left():
    async with running_cluster(1, 1, policy="cache_aware") as cluster:
        server = cluster.servers[0]
        await server.cache(stored=BLOCKS)
        await known(cluster, server, 5)
        await server.restart()
        await known(cluster, server, 0)
        await cluster.ready(2)
        await server.cache(stored=OTHER)
        await known(cluster, server, 2)


async def test_r6_index_when_a_server_is_removed_then_no_entry_and_no_stream_of_it_is_left():
    async with running_cluster(2, 1, policy="cache_aware") as cluster:
        first, second, _ = cluster.servers
        await first.cache(stored=BLOCKS)
        await second.cache(stored=OTHER)
        await known(cluster, first, 5)
        await known(cluster, second, 2)
        worker = cluster.worker(first)
        cluster.registry.remove("prefill", first.address)
        assert worker not in cluster.chooser.index.servers()
        assert len(cluster.chooser.index) == 2
        await cluster.until(lambda: first.kv_readers == 0)
        await first.cache(stored=OTHER)
        await second.cache(stored=BLOCKS)
        await known(cluster, second, 7)
        assert len(cluster.chooser.index) == 7


@pytest.mark.parametrize("policy", ["cache_aware", "cost"])
async def test_choose_when_a_server_has_the_prefix_then_it_gets_the_request_and_the_guess_is_counted(policy):
    async with running_cluster(3, 1, policy=policy) as cluster:
        _, having, _, _ = cluster.servers
        await having.cache(stored=BLOCKS)
        await known(cluster, having, 5)
        for _ in range(3):
            await cluster.collect(make_request(PROMPT))
        assert len(having.seen) == 3
        value = cluster.metrics.value
        # A prompt is never cached to its end; the scripted servers say that half of it was.
        assert value("baton_router_prefix_tokens_total", kind="predicted") == 3 * 64
        assert value("baton_router_prefix_tokens_total", kind="actual") == 3 * 40
        assert value("baton_router_decisions_total", role="prefill", policy=policy, result="chosen") == 3


async def test_choose_when_the_salt_differs_or_the_whole_prompt_is_computed_then_nothing_is_taken_as_cached():
    async with running_cluster(1, 1, policy="cache_aware") as cluster:
        having = cluster.servers[0]
        await having.cache(stored=BLOCKS)
        await known(cluster, having, 5)
        assert cluster.chooser.choose(make_request(PROMPT), 0).predicted_tokens == 64
        assert cluster.chooser.choose(make_request(PROMPT, cache_salt="tenant"), 0).predicted_tokens == 0
        sampling = Sampling(max_tokens=4, seed=1, prompt_logprobs=0)
        assert cluster.chooser.choose(make_request(PROMPT, sampling=sampling), 0).predicted_tokens == 0


async def test_choose_when_requests_with_one_prefix_come_at_once_then_one_server_gets_them_before_it_has_cached_it():
    async with running_cluster(3, 1, policy="cache_aware") as cluster:
        chosen = {cluster.chooser.choose(make_request((*PROMPT, n)), 0).prefill for n in range(6)}
        assert len(chosen) == 1
        others = {cluster.chooser.choose(make_request((n, *PROMPT)), 0).prefill for n in range(6)}
        assert len(others) == 3


async def test_choose_when_a_prompt_waits_to_be_computed_then_its_tokens_count_until_they_are():
    async with running_cluster(1, 1, policy="cost") as cluster:
        prefill, decode = cluster.servers
        hold = prefill.at["start"] = Hold()  # nothing to load before
        request = cluster.collect(make_request(PROMPT, max_tokens=3))
        task = cluster.registry._group.create_task(request)
        await hold.wait_reached()
        workers = cluster.worker(prefill), cluster.worker(decode)
        assert [(w.queued_tokens, w.context_tokens) for w in workers] == [(80, 0), (0, 80)]
        hold.let_go.set()
        await task
        assert [(w.queued_tokens, w.context_tokens) for w in workers] == [(0, 0), (0, 0)]


async def test_choose_when_one_server_does_it_all_then_its_prompt_counts_until_the_first_token():
    async with running_cluster(0, 1, local=True, policy="cost") as cluster:
        decode = cluster.servers[0]
        first, second = decode.at["token:0"], decode.at["token:1"] = Hold(), Hold()
        task = cluster.registry._group.create_task(cluster.collect(make_request(PROMPT, max_tokens=3)))
        worker = cluster.worker(decode)
        await first.wait_reached()
        assert (worker.queued_tokens, worker.context_tokens) == (80, 80)
        first.let_go.set()
        await second.wait_reached()
        await cluster.until(lambda: worker.queued_tokens == 0)
        assert worker.context_tokens == 80
        second.let_go.set()
        await task
        assert (worker.queued_tokens, worker.context_tokens) == (0, 0)


async def test_choose_when_the_policy_looks_at_no_cache_then_no_server_is_followed():
    async with running_cluster(1, 1) as cluster:
        await cluster.collect(make_request(PROMPT))
        assert cluster.chooser.index is None
        assert not any(server.kv_readers for server in cluster.servers)
        assert cluster.metrics.value("baton_router_prefix_tokens_total", kind="predicted") is None


async def test_choose_when_requests_have_a_session_then_both_servers_stay():
    async with running_cluster(3, 3, policy="session") as cluster:
        for number in range(4):
            session = f"session {number}"
            choices = [cluster.chooser.choose(make_request((n, 2), session_id=session), 0) for n in range(5)]
            assert len({(c.prefill, c.decode) for c in choices}) == 1
        labels = {"role": "decode", "policy": "session"}
        assert cluster.metrics.value("baton_router_decisions_total", result="chosen", **labels) == 20
        cluster.chooser.choose(make_request(), 0)
        assert cluster.metrics.value("baton_router_decisions_total", result="fallback", **labels) == 1
