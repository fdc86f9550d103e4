"""Requests with known right answers, and how chaos tests look at a cluster between two blows."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpc.errors import BatonError
from tests.conformance.reference import clear_prompt, prompt_of, reference
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import GenerationClient
from tests.integration.wire_client import EventReader, typed
from tests.unit.engine.tiny_models import tiny_model

MODEL = "llama"
CHUNK = 32
FLAGS = ("--block-size", "16", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16", "--num-kv-blocks", "256")
# A router that finds out soon about a server that is back. One that is slow to answer, on a busy machine, is not
# taken for dead.
ROUTER_FLAGS = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5",
                "--health-failure-threshold", "2")  # fmt: skip
# And one that finds out soon about a server that is silent.
IMPATIENT_ROUTER_FLAGS = (*ROUTER_FLAGS, "--health-check-timeout-secs", "1")
# Long prompts are computed for a second or so: there is a middle of it.
SLOW_PREFILL = {"BATON_FAULTS": "engine.layer:delay=0.05"}
TOKENS = 80


def slow_decode(file: Path) -> dict[str, str]:
    """Answers take a second or so; while there is the file, so long that whoever looks for their middle finds it."""
    return {"BATON_FAULTS": f"engine.step:delay=0.02,kind=decode;engine.step:delay=0.2,kind=decode,while={file}"}


@contextmanager
def lingering(file: Path) -> Iterator[None]:
    """Answers are in their middle for many seconds within, of servers with `slow_decode` of this file."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    expected: list[int]


@functools.cache
def cases() -> tuple[Case, ...]:
    """Prompts of several chunks with the greedy answers of `transformers`."""
    model = reference(tiny_model(MODEL))
    prompts = [clear_prompt(model, length, TOKENS) for length in (150, 131, 117, 140)]
    return tuple(Case(prompt, model.greedy(prompt, TOKENS)) for prompt in prompts)


def assert_serves(cluster: Cluster, salt: str) -> None:
    """The cluster answers an ordinary request right, through both servers, and nothing is left behind.

    A router may take a prefill server for silent for a moment, when the machine stands still: a decode server's right
    answer alone is one then, and the next request is what is asked for.
    """
    case = cases()[0]

    def through_both() -> bool:
        answer = client.generate(case.prompt[:40], 4, salt=salt)
        assert answer.token_ids == _short_answer()
        return answer.path == "pd"

    with GenerationClient(cluster.router.grpc) as client:
        wait_for("an answer through both servers", through_both, 30.0)
    cluster.assert_clean_ledgers()


@functools.cache
def _short_answer() -> list[int]:
    return reference(tiny_model(MODEL)).greedy(cases()[0].prompt[:40], 4)


def wait_workers_ready(cluster: Cluster, limit_s: float = 30.0) -> None:
    """Until the router finds every living server ready."""
    cluster.wait_workers_ready(limit_s)


def wait_busy(servers: Sequence[ServerProcess], limit_s: float = 30.0) -> None:
    """Until each of the servers has an open request."""
    for server in servers:
        wait_for(f"an open request on {server.name}", lambda server=server: server.requests()["open"] != [], limit_s)


def kill(server: ServerProcess, part: str) -> None:
    """SIGKILL of a server's front or of its engine; returns when the front has ended."""
    if part == "front":
        server.kill()
    else:
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait(10.0) != 0, "a server whose engine died ended as if all were well"


def descriptors(cluster: Cluster) -> dict[str, int]:
    """Open files of every process, by its name."""
    found = {"router": len(list(Path(f"/proc/{cluster.router.pid}/fd").iterdir()))}
    for server in cluster.servers:
        for part, pid in (("front", server.pid), ("engine", server.engine_pid)):
            found[f"{server.name} {part}"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


def burst(cluster: Cluster, name: str, count: int, at_once: int, length: int = 40, tokens: int = 4) -> Counter[str]:
    """How many of `count` requests ended how: "length", or the name of the code."""

    def one(number: int) -> str:
        try:
            return client.generate(prompt_of(length, number % 7), tokens, request_id=f"{name}-{number}").finish_reason
        except BatonError as error:
            return error.code.name

    with GenerationClient(cluster.router.grpc) as client, ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(one, range(count)))


def events_of(record: dict[str, Any]) -> dict[str, int]:
    """Time in nanoseconds, on a clock that all processes share, of each event of a request."""
    return {event["name"]: event["at_ns"] for event in record["events"]}


def failed(reader: EventReader) -> BatonError:
    """The error of a decode stream that brought no token."""
    result = reader.wait_end()
    assert result.tokens == []
    assert reader.error is not None
    return typed(reader.error)
