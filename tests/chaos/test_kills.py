"""SIGKILL of a server or of its engine in the middle of requests: the right answer where a second server exists, a
typed error soon where none does, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from rpc.errors import ErrorCode
from tests.chaos.cases import (
    FLAGS,
    MODEL,
    ROUTER_FLAGS,
    SLOW_PREFILL,
    TOKENS,
    Case,
    assert_serves,
    cases,
    kill,
    lingering,
    slow_decode,
    wait_busy,
    wait_workers_ready,
)
from tests.conformance.live_cluster import frozen
from tests.extent import WHOLE, extended, extent
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import Generation, GenerationClient
from tests.integration.wire_client import Pair, generate_input
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

ERROR_LIMIT_S = 5.0
FEW = 20
CANNOT_SEND = "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,key=h1-sick*"
VICTIMS = [("prefill", "front"), extended("prefill", "engine"), extended("decode", "front"), ("decode", "engine")]
ONLY_VICTIMS = [
    extended("prefill", "front"), ("prefill", "engine"), extended("decode", "front"), extended("decode", "engine"),
]  # fmt: skip


ALONE = (*FLAGS, "--no-allow-local-prefill")
# Slow as others of these tests need it.
PREFILL_FAULTS = extent("engine.layer:delay=0.01", SLOW_PREFILL["BATON_FAULTS"])


@pytest.fixture(scope="module")
def two_pairs(slow: Path) -> Iterator[Cluster]:
    cases()
    with Cluster(
        2, 2, model=tiny_model(MODEL), prefill_flags=FLAGS, decode_flags=FLAGS if WHOLE else ALONE,
        router_flags=ROUTER_FLAGS, decode_env=slow_decode(slow),
        prefill_env={"BATON_FAULTS": f"{PREFILL_FAULTS};{CANNOT_SEND}"},
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.fixture(scope="module")
def one_pair(request: pytest.FixtureRequest, slow: Path) -> Iterator[Cluster]:
    """Servers of its own, or, where few tests follow, a router that knows the second pair of the two."""
    cases()
    count = 1 if WHOLE else 0
    with Cluster(
        count, count, model=tiny_model(MODEL), router=WHOLE, prefill_flags=FLAGS, decode_flags=ALONE,
        router_flags=ROUTER_FLAGS, prefill_env={"BATON_FAULTS": PREFILL_FAULTS}, decode_env=slow_decode(slow),
    ) as cluster:  # fmt: skip
        if WHOLE:
            yield cluster
            return
        lent: Cluster = request.getfixturevalue("two_pairs")
        cluster.prefill, cluster.decode = lent.prefill[1:], lent.decode[1:]
        try:
            cluster.start_router()
            cluster.wait_router_ready()
            yield cluster
        finally:
            cluster.prefill, cluster.decode = [], []  # each cluster ends the processes that it has started


def revive(cluster: Cluster) -> None:
    """Those of its servers that have ended come back on their ports, and the router finds them."""
    cluster.restart(*(server for server in cluster.servers if not server.alive))
    wait_workers_ready(cluster)


class Struck(NamedTuple):
    victim: ServerProcess
    opened: list[Generation]


def send(client: GenerationClient, asked: Sequence[Case], salt: str, tokens: int = TOKENS) -> list[Generation]:
    return [client.open(case.prompt, tokens, salt=salt) for case in asked]


def strike(cluster: Cluster, slow: Path, opening: Callable[[], list[Generation]], role: str, part: str) -> Struck:
    """Kills the first server of the role in the middle of what it does for the requests that `opening` sends.

    Its engine stands still from then on, so that a slow machine does not let it finish before the blow.
    """
    victim = (cluster.prefill if role == "prefill" else cluster.decode)[0]
    if role == "prefill":
        with frozen(victim):
            opened = opening()
            wait_busy([victim])
            kill(victim, part)
    else:
        with lingering(slow):
            opened = opening()
            for generation in opened:
                generation.wait_tokens(5)
            with frozen(victim):
                assert victim.requests()["open"] != []
                kill(victim, part)
    return Struck(victim, opened)


@pytest.mark.invariant("RPC-32")
@pytest.mark.parametrize(("role", "part"), VICTIMS)
def test_kill_when_a_second_server_exists_then_every_answer_is_complete_and_right(
    two_pairs: Cluster, slow: Path, role: str, part: str
) -> None:
    router = two_pairs.router
    before = router.metric("baton_migrations_total", result="ok") or 0.0
    tokens = TOKENS if role == "decode" else FEW  # the middle of an answer takes many
    with GenerationClient(router.grpc) as client:
        victim, opened = strike(two_pairs, slow, lambda: send(client, cases(), f"{role} {part}", tokens), role, part)
        answers = [generation.answer() for generation in opened]
    for answer, case in zip(answers, cases(), strict=True):
        assert answer.token_ids == case.expected[:tokens], f"{answer.attempts} attempts"
        assert answer.finish_reason == "length"
    assert max(answer.attempts for answer in answers) > 1
    if role == "decode":
        assert (router.metric("baton_migrations_total", result="ok") or 0.0) > before
    two_pairs.assert_clean_ledgers()
    assert not victim.alive
    if WHOLE:  # further tests kill others
        revive(two_pairs)
    assert_serves(two_pairs, f"after {role} {part}")


@pytest.mark.extended
def test_h1_kill_when_two_of_three_decode_servers_die_then_the_third_one_serves_everything_later(
    two_pairs: Cluster, slow: Path
) -> None:
    """The last one for these servers. The dead leave nothing with a prefill server that harms its service to others."""
    workers = f"http://{two_pairs.router.http}/workers"
    third = two_pairs.start_decode().wait_ready()
    body = {"role": "decode", "address": third.grpc}
    httpx.post(workers, json=body, timeout=30.0, verify=False).raise_for_status()
    wait_workers_ready(two_pairs)
    with GenerationClient(two_pairs.router.grpc) as client:
        # The transfers of one prefill server fail for a while; it says so, and is healed by one that is read.
        sick = two_pairs.prefill[0]
        with Pair(sick, third, Path(two_pairs.model).name) as pair:
            for number in range(5):
                request = generate_input(f"h1-sick-{number}", cases()[0].prompt[:40], model=pair.p.model, max_tokens=2)
                pair.generate(request)  # D computes the prompt itself
            wait_for("the server that cannot send to be unready", lambda: sick.get("/ready").status_code == 503, 30.0)
            others = [client.open(case.prompt, TOKENS, salt="beside the sick") for case in cases()]
            pair.generate(generate_input("h1-well", cases()[0].prompt[:40], model=pair.p.model, max_tokens=2))
            wait_for("it to be ready again", lambda: sick.get("/ready").status_code == 200, 30.0)
        wait_workers_ready(two_pairs)
        for victim in two_pairs.decode[:2]:
            with lingering(slow):
                others += send(client, cases(), f"h1 {victim.name}")
                wait_busy([victim])
                victim.kill()
        for number, generation in enumerate(others):
            generation.wait_end()
            assert generation.error is None or generation.error.spec.http >= 500
            right = cases()[number % len(cases())].expected
            assert generation.token_ids == right[: len(generation.token_ids)]
            assert generation.error is not None or len(generation.token_ids) == TOKENS, "an answer without its end"
        for number, case in enumerate(cases()):
            later = client.generate(case.prompt, TOKENS, salt=f"h1 later {number}")
            assert (later.token_ids, later.path, later.attempts) == (case.expected, "pd", 1)
    two_pairs.assert_clean_ledgers()
    assert two_pairs.errors_without_code() == []


@pytest.mark.invariant("RPC-32")
@pytest.mark.parametrize(("role", "part"), ONLY_VICTIMS)
def test_kill_when_there_is_no_second_server_then_a_typed_error_comes_within_five_seconds(
    one_pair: Cluster, slow: Path, role: str, part: str
) -> None:
    with GenerationClient(one_pair.router.grpc) as client:
        victim, opened = strike(one_pair, slow, lambda: send(client, cases()[:2], f"{role} {part}"), role, part)
        struck_at = time.monotonic()
        for generation in opened:
            generation.wait_end(ERROR_LIMIT_S)
            error = generation.error
            assert error is not None, "a request without its server was answered"
            assert error.spec.retryable
            assert error.code in (
                ErrorCode.NO_PREFILL_WORKER if role == "prefill" else ErrorCode.NO_DECODE_WORKER,
                ErrorCode.CONNECTION_RESET_BY_PEER,
                ErrorCode.ENGINE_DEAD,
            ), error
            assert generation.ended_at - struck_at < ERROR_LIMIT_S
        for case, generation in zip(cases(), opened, strict=False):
            # What was shown before the failure is the beginning of the right answer.
            assert generation.token_ids == case.expected[: len(generation.token_ids)]
    one_pair.assert_clean_ledgers()
    assert not victim.alive
    revive(one_pair)
    assert_serves(one_pair, f"after {role} {part}")


@pytest.mark.extended
def test_kill_when_the_prefill_server_dies_after_its_part_then_the_answer_goes_on(
    one_pair: Cluster, slow: Path
) -> None:
    case = cases()[0]
    with GenerationClient(one_pair.router.grpc) as client:
        with lingering(slow):
            generation = client.open(case.prompt, TOKENS, salt="late")
            generation.wait_tokens(5)
            one_pair.prefill[0].kill()
        answer = generation.answer()
    assert (answer.token_ids, answer.attempts) == (case.expected, 1)
    one_pair.assert_clean_ledgers()
    one_pair.restart(one_pair.prefill[0])
    wait_workers_ready(one_pair)


@pytest.mark.extended
def test_kill_when_the_decode_server_may_compute_prompts_then_it_answers_alone(one_pair: Cluster, slow: Path) -> None:
    assert one_pair.decode[0].terminate() == 0
    one_pair.restart(one_pair.decode[0], flags=["--allow-local-prefill"])
    wait_workers_ready(one_pair)
    with GenerationClient(one_pair.router.grpc) as client:
        victim, opened = strike(one_pair, slow, lambda: send(client, cases()[:2], "alone"), "prefill", "front")
        for generation, case in zip(opened, cases(), strict=False):
            answer = generation.answer()
            assert answer.token_ids == case.expected
        later = client.generate(cases()[2].prompt, TOKENS)
        assert (later.token_ids, later.path) == (cases()[2].expected, "colocated")
    one_pair.assert_clean_ledgers()
    one_pair.restart(victim)
    wait_workers_ready(one_pair)
    assert_serves(one_pair, "together again")
