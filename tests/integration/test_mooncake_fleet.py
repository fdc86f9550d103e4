"""Servers that share a Mooncake Store: what one prefill server has computed is a hit on another one, with the same
tokens; when the store's master goes, every answer is still right."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.extent import extent
from tests.integration.cluster import Cluster, ServerProcess
from tests.integration.generation_client import TIMEOUT_S
from tests.integration.mooncake_master import MooncakeMaster, alive, needs_mooncake, running_master
from tests.unit.engine.tiny_models import tiny_model

pytestmark = needs_mooncake()

BLOCK = 16
LIMIT_MS = 3000
PROMPT_TOKENS = 10 * BLOCK + 5
NEW_TOKENS = 8
POOL_BLOCKS = 30  # for two prompts: others push them out, so that the store is asked


@dataclass
class Fleet:
    master: MooncakeMaster
    cluster: Cluster
    http: httpx.Client

    def complete(self, prompt: list[int], server: ServerProcess | None = None, **options: str) -> dict[str, Any]:
        """Greedy; on the prefill server, if one is named."""
        headers = {"x-baton-prefill": server.grpc} if server is not None else {}
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= options
        response = self.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def counted(self, server: ServerProcess, family: str, **labels: str) -> float:
        return server.metric(f"baton_{family}", tier="mooncake", **labels) or 0.0

    def hits(self) -> float:
        return sum(self.counted(server, "kv_tier_hit_blocks_total") for server in self.cluster.prefill)

    def wait_until(self, what: str, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        until = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until:
                servers = "\n".join(server.describe() for server in self.cluster.prefill)
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{servers}\n{self.master.log}")
            time.sleep(0.05)

    def wait_stored(self, server: ServerProcess, before: float, blocks: int) -> None:
        self.wait_until(
            f"{blocks} blocks are written",
            lambda: self.counted(server, "kv_tier_writes_total", outcome="stored") >= before + blocks,
        )


def prompt_of(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(3, 200) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_master(client_ttl_s=10) as master:  # more than a machine stands still for
        flags = ["--served-model-name", "tiny", "--block-size", str(BLOCK), "--num-kv-blocks", str(POOL_BLOCKS)]
        tier = ["--kv-tier", f"{master.address}?segment_bytes={32 << 20}"]
        tier += ["--kv-tier-timeout-ms", str(LIMIT_MS), "--kv-tier-min-tokens", str(BLOCK)]
        with (
            Cluster(
                2, 1, model=tiny_model("llama"),
                prefill_flags=[*flags, *tier], decode_flags=flags,
                router_flags=["--served-model-name", "tiny", "--allow-pins"],
            ) as cluster,
            httpx.Client(base_url=f"http://{cluster.router.http}", timeout=TIMEOUT_S) as http,
        ):  # fmt: skip
            fleet = Fleet(master, cluster, http)
            yield fleet
            clients = [pid for server in cluster.prefill for pid in children_of(server.engine_pid)]
            assert len(clients) == 2
        # One whose engine was ended takes its leave of the store by itself.
        fleet.wait_until("the clients of the store end", lambda: not any(alive(pid) for pid in clients), 10.0)


def test_fleet_when_one_server_has_computed_a_prompt_then_it_is_a_hit_on_another_with_the_same_tokens(
    fleet: Fleet,
) -> None:
    first, second = fleet.cluster.prefill
    prompt, blocks = prompt_of(1), (PROMPT_TOKENS - 1) // BLOCK
    fleet.wait_until("the store is connected", lambda: stores_and_finds(fleet, first, second))
    stored = fleet.counted(first, "kv_tier_writes_total", outcome="stored")
    hits = fleet.counted(second, "kv_tier_hit_blocks_total")
    computed = fleet.complete(prompt, first)
    fleet.wait_stored(first, stored, blocks)
    shared = fleet.complete(prompt, second)
    assert shared["choices"][0]["text"] == computed["choices"][0]["text"]
    assert computed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert shared["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK
    fleet.wait_until("the hits", lambda: fleet.counted(second, "kv_tier_hit_blocks_total") == hits + blocks)
    of_tenant = fleet.complete(prompt, second, cache_salt="tenant")
    assert of_tenant["choices"][0]["text"] == computed["choices"][0]["text"]
    assert of_tenant["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # neither from the pool nor from the store
    assert fleet.counted(second, "kv_tier_hit_blocks_total") == hits + blocks


_probes = iter(range(1000, 2000))


def stores_and_finds(fleet: Fleet, writer: ServerProcess, reader: ServerProcess) -> bool:
    """A prompt that is new: computed by one, and asked of the other. Whether both reach the store, and have counted
    all of that by now."""
    prompt, blocks = prompt_of(next(_probes)), (PROMPT_TOKENS - 1) // BLOCK
    stored = fleet.counted(writer, "kv_tier_writes_total", outcome="stored")
    hits = fleet.counted(reader, "kv_tier_hit_blocks_total")
    computed = fleet.complete(prompt, writer)
    written, until = False, time.monotonic() + 3.0
    while not written and time.monotonic() < until:
        time.sleep(0.05)
        written = fleet.counted(writer, "kv_tier_writes_total", outcome="stored") >= stored + blocks
    asked = fleet.complete(prompt, reader)
    assert asked["choices"][0]["text"] == computed["choices"][0]["text"]
    found = asked["usage"]["prompt_tokens_details"]["cached_tokens"] // BLOCK
    fleet.wait_until("the hits", lambda: fleet.counted(reader, "kv_tier_hit_blocks_total") >= hits + found)
    return written and found == blocks


@pytest.mark.extended
def test_fleet_when_the_master_is_killed_and_stopped_under_load_then_every_answer_is_right_and_hits_return(
    fleet: Fleet,
) -> None:
    first, second = fleet.cluster.prefill
    prompts = [prompt_of(number) for number in range(10, 10 + extent(6, 20))]
    expected = [fleet.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    hits = fleet.hits()
    ends = threading.Event()
    answered = [0]

    def ask(thread: int) -> list[str]:
        wrong: list[str] = []
        turn = thread * len(prompts)
        while not ends.is_set():
            number, server = turn % len(prompts), (first, second)[turn // len(prompts) % 2]
            began = time.monotonic()
            text = fleet.complete(prompts[number], server)["choices"][0]["text"]
            if text != expected[number]:
                wrong.append(f"prompt {number}: {text!r} instead of {expected[number]!r}")
            if time.monotonic() - began > LIMIT_MS / 1000 + 10.0:
                wrong.append(f"prompt {number} took {time.monotonic() - began:.1f} s")
            answered[0] += 1
            turn += 1
            ends.wait(0.02)
        return wrong

    def more_answers(count: int) -> None:
        before = answered[0]
        fleet.wait_until("requests are answered", lambda: answered[0] >= before + count or threads_ended(futures))

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask, thread) for thread in range(2)]
        try:
            fleet.wait_until("hits under load", lambda: fleet.hits() >= hits + 20 or threads_ended(futures))
            fleet.master.kill()
            more_answers(extent(8, 40))
            fleet.master.start()
            hits = fleet.hits()
            fleet.wait_until("hits again", lambda: fleet.hits() >= hits + 20 or threads_ended(futures), 60.0)
            with fleet.master.stopped():
                more_answers(extent(8, 40))
        finally:
            ends.set()
        assert [future.result(60.0) for future in futures] == [[], []]
    fleet.wait_until("the store is a hit again", lambda: stores_and_finds(fleet, first, second), 90.0)
    assert all(server.alive for server in fleet.cluster.servers)
    fleet.cluster.assert_clean_ledgers()


def threads_ended(futures: list[Any]) -> bool:
    return any(future.done() for future in futures)


@pytest.mark.extended
def test_fleet_when_a_client_of_the_store_is_killed_then_its_server_goes_on_and_gets_another_one(fleet: Fleet) -> None:
    first, second = fleet.cluster.prefill
    clients = children_of(second.engine_pid)
    assert len(clients) == 1
    os.kill(clients[0], signal.SIGKILL)
    prompt = prompt_of(100)
    assert fleet.complete(prompt, second)["choices"][0]["text"] == fleet.complete(prompt, first)["choices"][0]["text"]
    fleet.wait_until("the store is a hit again", lambda: stores_and_finds(fleet, first, second), 90.0)
    replaced = children_of(second.engine_pid)
    assert len(replaced) == 1 and replaced != clients


def children_of(pid: int) -> list[int]:
    """Processes with the client of the store that an engine has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_client = b"cache_store.tiers.mooncake_client" in (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if parent == pid and is_client and alive(int(folder.name)):
            found.append(int(folder.name))
    return found
