"""Servers on GPUs: the tokens of `transformers`, by every transport and number of ranks; a rank that dies ends its
engine alone, with its code, and nothing is left. Ranks take a device each where there are enough of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

for package in ("httpx", "jinja2", "starlette", "tokenizers", "transformers", "uvicorn"):
    pytest.importorskip(package, reason=f"servers need the package {package}")

from rpc.errors import ErrorCode  # noqa: E402
from tests.conformance.reference import clear_prompt, reference  # noqa: E402
from tests.integration.cluster import Cluster, ServerProcess, process_exists, wait_for  # noqa: E402
from tests.integration.generation_client import GenerationClient  # noqa: E402
from tests.integration.test_rank_failures import local_request  # noqa: E402
from tests.integration.test_servers_handoff import MODEL  # noqa: E402
from tests.integration.wire_client import Client, typed  # noqa: E402
from tests.unit.cache_store.shared import needs_nixl  # noqa: E402
from tests.unit.engine.tiny_models import tiny_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]

TOKENS, BLOCK, CHUNK = 40, 16, 64
LENGTHS = (BLOCK - 1, 3 * BLOCK, 3 * CHUNK + 5)
START_S = 180.0
DEADLINE_S = 5.0  # between ranks
FLAGS = ["--device=cuda", "--attention-backend=triton", f"--block-size={BLOCK}", f"--max-num-batched-tokens={CHUNK}"]
FLAGS += ["--max-num-seqs=8", "--served-model-name", MODEL, "--tp-broadcast-timeout-seconds", str(DEADLINE_S)]
PAIRS = [(1, 1, "ipc"), (1, 1, "tcp"), (1, 1, "grpc"), (2, 2, "ipc"), (2, 1, "tcp"), (1, 2, "grpc"), (1, 2, "ipc")]
PAIRS += [(2, 2, "tcp")]
NIXL = [pytest.param(1, 1, "nixl", marks=needs_nixl), pytest.param(2, 2, "nixl", marks=needs_nixl)]


@dataclass
class Ranked:
    """Servers by their number of ranks, each started when it is first needed."""

    cluster: Cluster
    prefill: dict[tuple[int, bool], ServerProcess] = field(default_factory=dict)  # also by whether it offers NIXL
    decode: dict[tuple[int, str], ServerProcess] = field(default_factory=dict)

    def pair(self, p: int, d: int, transport: str) -> tuple[ServerProcess, ServerProcess]:
        nixl = transport == "nixl"  # on a device only who asks for it has it
        if (p, nixl) not in self.prefill:
            flags = ["--tensor-parallel-size", str(p), *(["--kv-transport", transport] if nixl else [])]
            self.prefill[p, nixl] = self.cluster.start_prefill(flags)
        if (d, transport) not in self.decode:
            flags = ["--tensor-parallel-size", str(d), "--kv-transport", transport, "--kv-load-failure-policy", "fail"]
            self.decode[d, transport] = self.cluster.start_decode(flags)
        return self.prefill[p, nixl].wait_ready(START_S), self.decode[d, transport].wait_ready(START_S)


@pytest.fixture(scope="module")
def ranked() -> Iterator[Ranked]:
    with Cluster(0, 0, model=tiny_model("llama"), router=False, prefill_flags=FLAGS, decode_flags=FLAGS) as cluster:
        yield Ranked(cluster)
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == []


@pytest.mark.parametrize(("p", "d", "transport"), [*PAIRS, *NIXL])
def test_tokens_when_kv_goes_between_servers_on_devices_then_those_of_the_reference_also_with_a_prefix(
    ranked: Ranked, p: int, d: int, transport: str
) -> None:
    model = reference(tiny_model("llama"))
    pair = ranked.pair(p, d, transport)
    router = ranked.cluster.start_router(among=pair)
    ranked.cluster.wait_router_ready()
    with GenerationClient(router.grpc) as client:
        for length in LENGTHS:
            prompt = clear_prompt(model, length, TOKENS)
            expected = model.greedy(prompt, TOKENS)
            for again in (False, True):
                answer = client.generate(prompt, TOKENS, salt=f"{p} {d} {transport}", temperature=0.0)
                assert answer.token_ids == expected, (length, again)
                assert (answer.path, answer.attempts) == ("pd", 1)

    def loads() -> float:
        return pair[1].counted("baton_kv_transfer_seconds_count", transport=transport, outcome="ok")

    wait_for(f"each load by {transport}", lambda: loads() >= 2 * len(LENGTHS), 10.0)  # told after the tokens
    for server, ranks in zip(pair, (p, d), strict=True):
        assert {counts["rank"] for counts in server.ledger()} == set(range(ranks))
    ranked.cluster.assert_clean_ledgers()


# One that is stopped leaves the other alone in a sum on its device, which only the deadline ends.
CAUSES = {signal.SIGKILL: ("signal_9", "closed"), signal.SIGSTOP: ("silent", "not_reading")}
LOSSES = [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1)]


@pytest.mark.parametrize(("number", "rank"), LOSSES)
def test_rank_when_it_is_killed_or_stopped_while_tokens_flow_then_8609_and_no_process_is_left(
    number: signal.Signals, rank: int
) -> None:
    flags = [*FLAGS, "--tensor-parallel-size=2"]
    env = {"BATON_FAULTS": "engine.step:delay=0.02,kind=decode"}
    with Cluster(
        0, 1, model=tiny_model("llama"), router=False, decode_flags=flags, decode_env=env, start_limit_s=START_S
    ) as cluster:
        [process] = cluster.decode
        pids = [int(pid) for pid in process.page("/server_info")["engine_pids"]]
        with Client(process, MODEL) as client:
            reader = local_request(client, 20, 400)
            reader.wait_for("tokens")
            os.kill(pids[rank], number)
            reader.wait_end(DEADLINE_S + 15.0)
            error = typed(reader.error)
            assert error.code is ErrorCode.ENGINE_DEAD
            assert error.metadata["rank"] == str(rank), error.metadata
            assert error.metadata["cause"] in CAUSES[number], error.metadata
        assert process.wait(DEADLINE_S + 15.0) == 1
        for pid in pids:
            wait_for(f"end of rank {pid}", lambda pid=pid: not process_exists(pid), 15.0)
        assert list(cluster.temporary.iterdir()) == []
