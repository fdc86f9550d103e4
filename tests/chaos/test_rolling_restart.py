"""Each server in turn is ended in order and started again, while clients stream without a pause: nobody notices."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import pytest

from tests.chaos.cases import FLAGS, MODEL, ROUTER_FLAGS, TOKENS, cases, wait_busy, wait_workers_ready
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import GenerationClient
from tests.unit.engine.tiny_models import tiny_model

CLIENTS = 4
# An answer takes a second or so, so that every server has some in their middle when it is told to go.
SLOW_DECODE = {"BATON_FAULTS": "engine.step:delay=0.01,kind=decode"}


@dataclass
class Load:
    """Clients that send one request after the other until they are told to stop."""

    address: str
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(i,), name=f"client-{i}") for i in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _ask(self, client: int) -> None:
        with GenerationClient(self.address) as generation:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                case = cases()[(client + number) % len(cases())]
                name = f"rolling-{client}-{number}"
                try:
                    answer = generation.generate(case.prompt, TOKENS, request_id=name, salt=name)
                    problem = "" if answer.token_ids == case.expected else f"tokens {answer.token_ids}"
                except Exception as error:  # whatever it is, the client has noticed something
                    problem = repr(error)
                with self._lock:
                    self.answered += 1
                    if problem:
                        self.wrong.append(f"{name}: {problem}")
                    else:
                        self.paths.add(answer.path)

    def wait_answers(self, more: int) -> None:
        wanted = self.answered + more
        wait_for(f"{more} more answers", lambda: self.answered >= wanted or self.wrong, 60)
        assert not self.wrong


@pytest.mark.timeout(400)
@pytest.mark.extended
def test_rolling_restart_when_clients_stream_all_the_time_then_every_answer_is_complete_and_right() -> None:
    cases()
    flags = (*FLAGS, "--drain-timeout-secs", "60")
    with Cluster(
        2, 2, model=tiny_model(MODEL), prefill_flags=flags, decode_flags=flags, router_flags=ROUTER_FLAGS,
        decode_env=SLOW_DECODE,
    ) as cluster:  # fmt: skip
        with Load(cluster.router.grpc) as load:
            load.wait_answers(CLIENTS)
            for server in list(cluster.servers):
                wait_busy([server])
                assert server.terminate(60) == 0
                fresh = cluster.restart(server)
                wait_workers_ready(cluster)
                load.wait_answers(CLIENTS)
                assert fresh.alive
        assert load.wrong == []
        assert load.answered >= 5 * CLIENTS
        assert "pd" in load.paths
        assert cluster.router.metric("baton_request_errors_total") is None
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == []
