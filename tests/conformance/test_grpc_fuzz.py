"""Messages of every kind that nobody would send on purpose, to every method of every process.

`BATON_FUZZ_CASES=10000 pytest tests/conformance/test_grpc_fuzz.py` sends that many in all (`BATON_FUZZ_SEED` chooses
which); without the variable it is a short run. Whatever comes, the answer is right or a typed refusal, and nothing
stays behind.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.message import Message

from protos import cache_store_pb2, common_pb2, decode_pb2, generation_pb2, prefill_pb2, worker_pb2
from rpc.errors import ErrorCode
from rpc.version import PROTOCOL_VERSION
from tests.conformance import refusals
from tests.conformance.bad_input import channel_of
from tests.conformance.live_cluster import KEY_METADATA, MODEL, Live
from tests.conformance.random_messages import Maker
from tests.integration.cluster import wait_for
from tests.integration.wire_client import generate_input, key_of

CASES = int(os.environ.get("BATON_FUZZ_CASES", "300"))
SEED = int(os.environ.get("BATON_FUZZ_SEED", "1"))
AT_A_TIME = 8
LIMIT_S = 10.0
# A load of a key that does not exist is parked, also a decode server's own; a status is watched for ever.
PATIENCE_S = 0.15


@dataclass(frozen=True)
class Method:
    """`where`: an attribute of Live. `good`: a message that would be served. `ends`: False for a stream without end."""

    where: str
    name: str
    good: Callable[[], Message]
    streams: bool = False
    ends: bool = True


def methods(live: Live) -> list[Method]:
    """Every method of the cluster but `Worker.Drain`, which asks for nothing: each message of it drains the server."""
    source = common_pb2.KvSource(engine_id=live.p.engine_id, cache_store_addresses=live.p.cache_store, tp_size=1)

    def reference() -> cache_store_pb2.KvReference:
        return cache_store_pb2.KvReference(engine_id=live.p.engine_id, request_key=key_of("fuzz"), generation=1)

    def reader() -> cache_store_pb2.ReaderRank:
        return cache_store_pb2.ReaderRank(rank=0, tp_size=1)

    def wanted() -> cache_store_pb2.WantedBlocks:
        return cache_store_pb2.WantedBlocks(
            group="full", block_size=16, first_block=0, num_blocks=1, block_bytes=4096, num_layers=2,
            partition_count=1, partition_id=0,
        )  # fmt: skip

    def sampled() -> common_pb2.GenerateInput:
        return generate_input("fuzz", [1, 2, 3, 4], model=MODEL, max_tokens=3)

    generation = generation_pb2.GenerateRequest(
        model=MODEL, token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=common_pb2.SamplingParams(max_tokens=3, temperature=0.0), stream=True,
    )  # fmt: skip
    handshake = cache_store_pb2.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION, engine_id="f" * 32, expected_engine_id=live.p.engine_id,
        model_fingerprint="f", kv_dtype="float32", groups=[common_pb2.KvGroup(tag="full", num_layers=2)],
        tp_size=1, rank=0, transports=["grpc"], checksum="all",
    )  # fmt: skip

    def copy(message: Message) -> Callable[[], Message]:
        def make() -> Message:
            fresh = type(message)()
            fresh.CopyFrom(message)
            return fresh

        return make

    found = [
        Method("router", "Generation/Generate", copy(generation), streams=True),
        Method("router", "Generation/Abort", lambda: generation_pb2.AbortRequest(request_id="fuzz")),
        Method("router", "Generation/ListModels", generation_pb2.ListModelsRequest),
        Method("prefill", "Prefill/Prefill", lambda: prefill_pb2.PrefillRequest(input=sampled(), hold_kv=True)),
        Method("prefill", "Prefill/Abort", lambda: prefill_pb2.PrefillAbortRequest(request_key=key_of("fuzz"))),
        Method(
            "decode", "Decode/Decode", lambda: decode_pb2.DecodeRequest(input=sampled(), kv_source=source),
            streams=True, ends=False,  # whose prompt nobody computes
        ),
        Method(
            "decode", "Decode/Decode",
            lambda: decode_pb2.DecodeRequest(input=sampled(), local_prefill=decode_pb2.LocalPrefill()), streams=True,
        ),
        Method("decode", "Decode/Abort", lambda: decode_pb2.DecodeAbortRequest(request_key=key_of("fuzz"))),
    ]  # fmt: skip
    for where in ("prefill", "decode"):
        found += [
            Method(where, "Worker/GetInfo", worker_pb2.GetInfoRequest),
            Method(where, "Worker/GetStatus", worker_pb2.GetStatusRequest),
            Method(where, "Worker/WatchStatus", worker_pb2.WatchStatusRequest, streams=True, ends=False),
            Method(where, "Worker/SubscribeKvEvents", worker_pb2.SubscribeKvEventsRequest, streams=True, ends=False),
            Method(where, "Worker/FlushCache", worker_pb2.FlushCacheRequest),
        ]
    for where in ("cache_store", "decode_cache_store"):
        found += [
            Method(where, "CacheStore/Handshake", copy(handshake)),
            Method(
                where, "CacheStore/Load",
                lambda: cache_store_pb2.LoadRequest(
                    reference=reference(), wanted=[wanted()], prompt_tokens=4, checksum="all", chunk_bytes=1 << 16,
                    reader=reader(),
                ),
                streams=True, ends=False,
            ),
            Method(
                where, "CacheStore/RenewLease", lambda: cache_store_pb2.RenewLeaseRequest(reference=reference())
            ),
            Method(
                where, "CacheStore/Release",
                lambda: cache_store_pb2.ReleaseRequest(reference=reference(), complete=False, reader=reader()),
            ),
        ]  # fmt: skip
    return found


def send(live: Live, method: Method, data: bytes) -> str:
    """Outcome of one case: `ok`, `waiting`, or the name of the code; raises for an answer that must not be."""
    channel = channel_of(live, method.where)
    metadata = KEY_METADATA if method.where == "router" else ()
    timeout = LIMIT_S if method.ends else PATIENCE_S
    path = f"/baton.v1.{method.name}"
    try:
        if method.streams:
            list(channel.unary_stream(path)(data, timeout=timeout, metadata=metadata))
        else:
            answer = channel.unary_unary(path)(data, timeout=timeout, metadata=metadata)
            if method.name == "Prefill/Prefill":
                _give_back(live, data, prefill_pb2.PrefillResponse.FromString(answer))
    except grpc.RpcError as error:
        return judge(error, method)
    return "ok"


def judge(error: grpc.RpcError, method: Method) -> str:
    """Name of the code of a refusal, once it is one that may be; `waiting` for a call that its caller gave up."""
    refusal = refusals.of_call(error)
    if refusal.code == 0:
        # No details: only the caller's own patience may end a call like that.
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not method.ends, (error.code(), error.details())
        return "waiting"
    code = ErrorCode(refusal.code)
    if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        # A decode server that is pointed at the wrong place says what it found there.
        cause = refusal.metadata.get("cause_code", "")
        assert code is ErrorCode.LOAD_KV_CACHE_FAILED and cause, refusal
        assert ErrorCode(int(cause)) not in (ErrorCode.UNKNOWN_ERROR, ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR), refusal
    return code.name


def _give_back(live: Live, data: bytes, response: prefill_pb2.PrefillResponse) -> None:
    """Nobody loads what was computed."""
    key = prefill_pb2.PrefillRequest.FromString(data).input.request_key
    if response.HasField("kv_generation"):
        message = prefill_pb2.PrefillAbortRequest(request_key=key)
        live.prefill.unary_unary("/baton.v1.Prefill/Abort")(message.SerializeToString(), timeout=LIMIT_S)


@pytest.mark.timeout(max(120, CASES // 10))
def test_message_when_it_is_random_changed_or_damaged_then_it_is_answered_or_refused_and_nothing_stays(
    live: Live,
) -> None:
    maker = Maker(random.Random(SEED), (MODEL, live.p.engine_id, live.p.cache_store[0], live.d.grpc, key_of("fuzz")))
    known = methods(live)
    cases = [(method, maker.bytes_of(method.good)) for method in (known[n % len(known)] for n in range(CASES))]
    outcomes: dict[str, Counter[str]] = {}
    wrong: list[str] = []

    def run(case: tuple[Method, bytes]) -> tuple[str, str]:
        method, data = case
        try:
            return method.name, send(live, method, data)
        except Exception as error:
            wrong.append(f"{method.where} {method.name} {data.hex()[:400]}: {type(error).__name__}: {error}")
            return method.name, "wrong"

    with ThreadPoolExecutor(AT_A_TIME) as senders:
        for name, outcome in senders.map(run, cases):
            outcomes.setdefault(name, Counter())[outcome] += 1
    assert wrong == []
    # It tried what it is for: good and bad messages of every method.
    assert outcomes.keys() == {method.name for method in known}
    if CASES >= 300:
        assert sum(counts["ok"] for counts in outcomes.values()) > CASES / 20, outcomes
        assert len(set().union(*outcomes.values())) >= 8, outcomes
    live.cluster.assert_clean_ledgers()
    live.check_serving()
    assert live.defects() == []
    for server in live.cluster.servers:
        wait_for(f"no open request on {server.name}", lambda server=server: not server.requests()["open"], 20.0)
    wait_for("no lease", lambda: live.p.metric("baton_kv_leases_active") == 0, 20.0)
