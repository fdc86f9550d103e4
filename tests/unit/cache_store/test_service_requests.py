"""The CacheStore service as any client sees it, through the generated stubs: what it serves and what it refuses."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cache_store.serving import service
from cache_store.wire import SERVICE
from protos import cache_store_pb2 as pb
from protos import cache_store_pb2_grpc as pb_grpc
from protos import common_pb2, errors_pb2
from rpc.errors import BatonError, ErrorCode
from rpc.status import from_rpc_error
from rpc.version import PROTOCOL_VERSION
from tests.unit.cache_store.agents import LAYOUT, Node, assert_clean, key_of, prefill_result, settings, until

KEY = key_of(1)
IDS = [9, 3, 4]
TOKENS = 3 * LAYOUT.block_size
STUB_TIMEOUT_S = 10
FLOOD_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Node("prefill", settings(lease_seconds=30), seed=1)
    yield made
    made.close()


READER = pb.ReaderRank(rank=0, tp_size=1)
REFERENCE = pb.KvReference(engine_id="prefill", request_key=key_of(900))


@pytest.fixture(scope="module")
def channel(node: Node) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(node.address) as made:
        yield made


@pytest.fixture
def stub(channel: grpc.Channel) -> pb_grpc.CacheStoreStub:
    return pb_grpc.CacheStoreStub(channel)


@pytest.fixture
def staged(node: Node) -> Iterator[str]:
    """Key of staged KV, generation 5; gone after the test."""
    key = f"staged#0.{secrets.token_hex(4)}"
    node.stage(key, IDS, generation=5)
    until(lambda: node.agent._table.get(key) is not None, "the lease")
    yield key
    node.agent.fail(key, BatonError(ErrorCode.CANCELLED))
    assert_clean(node)


def handshake_request(**change: object) -> pb.HandshakeRequest:
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "engine_id": "somebody",
        "expected_engine_id": "prefill",
        "model_fingerprint": "model-a",
        "kv_dtype": "bfloat16",
        "groups": [LAYOUT.to_proto()],
        "tp_size": 1,
        "rank": 0,
        "transports": ["ipc", "grpc"],
        "checksum": "all",
    }
    fields.update(change)
    return pb.HandshakeRequest(**{name: value for name, value in fields.items() if value is not None})


def wanted_blocks(**change: object) -> pb.WantedBlocks:
    fields: dict[str, object] = {
        "group": "full",
        "block_size": LAYOUT.block_size,
        "first_block": 0,
        "num_blocks": 3,
        "block_bytes": LAYOUT.block_bytes,
        "num_layers": LAYOUT.num_layers,
        "partition_count": 1,
        "partition_id": 0,
    }
    fields.update(change)
    return pb.WantedBlocks(**{name: value for name, value in fields.items() if value is not None})


def load_request(key: str, **change: object) -> pb.LoadRequest:
    fields: dict[str, object] = {
        "reference": pb.KvReference(engine_id="prefill", request_key=key),
        "wanted": [wanted_blocks()],
        "prompt_tokens": TOKENS,
        "checksum": "all",
        "chunk_bytes": 1 << 20,
        "reader": READER,
    }
    fields.update(change)
    return pb.LoadRequest(**{name: value for name, value in fields.items() if value is not None})


def refused(call: Callable[[], object]) -> BatonError:
    """The typed failure of a call."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = from_rpc_error(caught.value, leg="cache_store", deadline_passed=False, was_ready=True)
    assert caught.value.code() is error.spec.grpc, caught.value
    assert "grpc_code" not in error.metadata, "the failure came without details"
    return error


def load_refused(stub: pb_grpc.CacheStoreStub, request: pb.LoadRequest) -> BatonError:
    """The failure of a load that must not bring a single byte."""
    call = stub.Load(request, timeout=STUB_TIMEOUT_S)
    events: list[pb.LoadEvent] = []
    error = refused(lambda: events.extend(call))
    assert events == []
    return error


# ---- what it serves


def test_generated_client_handshakes_loads_renews_and_releases(
    node: Node, stub: pb_grpc.CacheStoreStub, staged: str
) -> None:
    hello = stub.Handshake(handshake_request(), timeout=STUB_TIMEOUT_S)
    assert (hello.engine_id, hello.transport, hello.checksum, hello.lease_seconds) == ("prefill", "grpc", "all", 30)
    assert (hello.tp_size, hello.rank) == (1, 0)
    events = list(stub.Load(load_request(staged), timeout=STUB_TIMEOUT_S))
    assert events[0].started == pb.Started(generation=5, cached_blocks=0)
    assert [e.state for e in events if e.state] == [
        pb.COMPUTE_STATE_RUNNING,
        pb.COMPUTE_STATE_COMPUTED,
    ]
    pieces = [event for event in events if event.HasField("pieces")]
    assert [(p.pieces.group, p.pieces.layer, list(p.pieces.blocks)) for p in pieces] == [
        ("full", layer, [0, 1, 2]) for layer in range(LAYOUT.num_layers)
    ]
    for layer, event in enumerate(pieces):
        blocks = [node.memory["full"][layer][block].tobytes() for block in IDS]
        assert event.data == b"".join(blocks)
        assert event.pieces.checksum == xxhash.xxh3_64(b"".join(blocks)).intdigest()
        assert event.pieces.block_bytes == LAYOUT.block_bytes
    assert events[-1].done == pb.Done(result=prefill_result(), pieces=9)
    reference = pb.KvReference(engine_id="prefill", request_key=staged, generation=5)
    renewed = stub.RenewLease(pb.RenewLeaseRequest(reference=reference), timeout=STUB_TIMEOUT_S)
    assert renewed.remaining_seconds == 30
    release = pb.ReleaseRequest(reference=reference, complete=True, reader=READER)
    assert stub.Release(release, timeout=STUB_TIMEOUT_S).found
    assert not stub.Release(release, timeout=STUB_TIMEOUT_S).found
    assert node.lease_ended().outcome == "released"


@pytest.mark.parametrize(("mode", "layers"), [("off", []), ("sample", [0]), ("all", [0, 1, 2])])
def test_checksums_are_sent_as_the_mode_says(
    stub: pb_grpc.CacheStoreStub, staged: str, mode: str, layers: list[int]
) -> None:
    events = list(stub.Load(load_request(staged, checksum=mode), timeout=STUB_TIMEOUT_S))
    assert [e.pieces.layer for e in events if e.HasField("pieces") and e.pieces.HasField("checksum")] == layers


def test_share_of_the_heads_is_sent_when_it_is_asked_for(node: Node, stub: pb_grpc.CacheStoreStub, staged: str) -> None:
    second = pb.ReaderRank(rank=1, tp_size=2)
    half = wanted_blocks(partition_count=2, partition_id=1, block_bytes=LAYOUT.block_bytes // 2)
    events = [
        event
        for event in stub.Load(load_request(staged, wanted=[half], reader=second), timeout=STUB_TIMEOUT_S)
        if event.HasField("pieces")
    ]
    blocks = node.memory["full"][0][IDS].reshape(len(IDS), 2, 2, -1)  # blocks, K and V, heads, bytes
    assert events[0].data == blocks[:, :, 1].tobytes()
    assert events[0].pieces.checksum == xxhash.xxh3_64(events[0].data).intdigest()


def test_load_that_came_first_streams_while_the_prompt_is_computed(node: Node, stub: pb_grpc.CacheStoreStub) -> None:
    key = key_of(77)
    call = stub.Load(load_request(key), timeout=STUB_TIMEOUT_S)
    until(lambda: node.agent.stats().parked == 1, "the load is parked")
    node.admit(key, IDS, ready=1)
    first = next(call)
    assert (first.started.cached_blocks, first.state) == (1, pb.COMPUTE_STATE_RUNNING)
    assert [list(next(call).pieces.blocks) for _ in range(LAYOUT.num_layers)] == [[0]] * LAYOUT.num_layers
    for layer in range(LAYOUT.num_layers):
        node.agent.publish(key, "full", layer, 3)
        event = next(call)
        assert (event.pieces.layer, list(event.pieces.blocks)) == (layer, [1, 2])
    node.agent.computed(key, prefill_result(), True)
    last = next(call)
    assert (last.state, last.done.pieces) == (pb.COMPUTE_STATE_COMPUTED, 9)
    assert list(call) == []
    node.agent.fail(key, BatonError(ErrorCode.CANCELLED))
    assert_clean(node)


def test_health_and_reflection_describe_the_service(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo

    def ask(**what: str) -> reflection_pb2.ServerReflectionResponse:
        return next(info(iter([reflection_pb2.ServerReflectionRequest(**what)]), timeout=5))

    assert SERVICE in {service.name for service in ask(list_services="").list_services_response.service}
    pool = descriptor_pool.DescriptorPool()
    names = ["protos/errors.proto", "protos/common.proto", "protos/cache_store.proto"]
    for name in names:
        for raw in ask(file_by_filename=name).file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
    # A client that knows the service from reflection alone can call it.
    request = GetMessageClass(pool.FindMessageTypeByName("baton.v1.RenewLeaseRequest"))(
        reference={"engine_id": "prefill", "request_key": key_of(404)}
    )
    call = channel.unary_unary(f"/{SERVICE}/RenewLease")
    error = refused(lambda: call(request.SerializeToString(), timeout=5))
    assert error.code is ErrorCode.KV_LEASE_EXPIRED


# ---- what it refuses: handshake


@pytest.mark.invariant("RPC-31")
@pytest.mark.parametrize(
    "field",
    ["protocol_version", "engine_id", "expected_engine_id", "tp_size", "rank", "transports", "checksum"],
)
def test_handshake_without_a_field_is_refused_by_name(stub: pb_grpc.CacheStoreStub, field: str) -> None:
    error = refused(lambda: stub.Handshake(handshake_request(**{field: None}), timeout=STUB_TIMEOUT_S))
    assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, field)
    assert field in error.message


@pytest.mark.parametrize(("field", "value"), [("checksum", "md5"), ("rank", 1)])
def test_handshake_with_a_value_out_of_range_is_refused_by_name(
    stub: pb_grpc.CacheStoreStub, field: str, value: object
) -> None:
    error = refused(lambda: stub.Handshake(handshake_request(**{field: value}), timeout=STUB_TIMEOUT_S))
    assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, field)


def group_with(**change: object) -> common_pb2.KvGroup:
    group = LAYOUT.to_proto()
    for name, value in change.items():
        setattr(group, name, value)
    return group


@pytest.mark.invariant("RPC-31")
@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"protocol_version": 99}, {"protocol_version"}),
        ({"model_fingerprint": "model-b"}, {"model_fingerprint"}),
        ({"kv_dtype": "float16"}, {"kv_dtype"}),
        ({"groups": []}, {"groups"}),
        ({"groups": [group_with(tag="other")]}, {"groups"}),
        ({"groups": [group_with(num_layers=4)]}, {"group full"}),
        ({"groups": [group_with(block_size=6)]}, {"group full"}),
        ({"groups": [group_with(num_kv_heads=4)]}, {"group full"}),
        ({"groups": [group_with(head_dim=16)]}, {"group full"}),
        ({"groups": [group_with(dtype="float32")]}, {"group full"}),
        ({"transports": ["nixl"]}, {"transports"}),
        (
            {"protocol_version": 99, "model_fingerprint": "b", "kv_dtype": "x"},
            {"protocol_version", "model_fingerprint", "kv_dtype"},
        ),
    ],
)
def test_handshake_of_an_incompatible_peer_lists_each_differing_fact(
    stub: pb_grpc.CacheStoreStub, change: dict[str, object], facts: set[str]
) -> None:
    error = refused(lambda: stub.Handshake(handshake_request(**change), timeout=STUB_TIMEOUT_S))
    assert error.code is ErrorCode.INCOMPATIBLE_PEER
    assert facts <= set(error.metadata)
    own_facts = {"protocol_version", "model_fingerprint", "kv_dtype", "groups", "group full", "transports"}
    assert set(error.metadata) & own_facts == facts


def test_handshake_that_expects_another_engine_is_restarted_with_both_ids(stub: pb_grpc.CacheStoreStub) -> None:
    error = refused(lambda: stub.Handshake(handshake_request(expected_engine_id="old"), timeout=STUB_TIMEOUT_S))
    assert error.code is ErrorCode.PEER_RESTARTED
    assert (error.metadata["expected_engine_id"], error.metadata["engine_id"]) == ("old", "prefill")


# ---- what it refuses: load


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize("field", ["reference", "wanted", "prompt_tokens", "checksum", "chunk_bytes", "reader"])
def test_k13_load_without_a_field_is_refused_by_name(stub: pb_grpc.CacheStoreStub, staged: str, field: str) -> None:
    error = load_refused(stub, load_request(staged, **{field: None}))
    assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, field)


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize(
    "field",
    [
        "group",
        "block_size",
        "first_block",
        "num_blocks",
        "block_bytes",
        "num_layers",
        "partition_count",
        "partition_id",
    ],
)
def test_k13_load_without_a_field_of_a_group_is_refused_by_name(
    stub: pb_grpc.CacheStoreStub, staged: str, field: str
) -> None:
    error = load_refused(stub, load_request(staged, wanted=[wanted_blocks(**{field: None})]))
    assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, f"wanted[0].{field}")


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize(
    ("reference", "param"),
    [
        ({"request_key": KEY}, "reference.engine_id"),
        ({"engine_id": "prefill"}, "reference.request_key"),
        ({"engine_id": "prefill", "request_key": "no key"}, "request_key"),
        ({"engine_id": "prefill", "request_key": "a#1.0000000G"}, "request_key"),
        ({"engine_id": "prefill", "request_key": "x" * 5000}, "request_key"),
    ],
)
def test_load_with_a_broken_reference_is_refused_by_name(
    stub: pb_grpc.CacheStoreStub, reference: dict[str, str], param: str
) -> None:
    error = load_refused(stub, load_request(KEY, reference=pb.KvReference(**reference)))
    complete = reference.keys() >= {"engine_id", "request_key"}
    code = ErrorCode.INVALID_PARAMS if complete else ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
    assert (error.code, error.param) == (code, param)


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize(
    ("change", "code", "kind"),
    [
        ({"prompt_tokens": 0}, ErrorCode.INVALID_PARAMS, None),
        ({"checksum": "md5"}, ErrorCode.INVALID_PARAMS, None),
        ({"transport": "nixl"}, ErrorCode.INVALID_PARAMS, None),
        ({"transport": "ipc"}, ErrorCode.INVALID_PARAMS, None),
        ({"chunk_bytes": 65535}, ErrorCode.INVALID_PARAMS, None),
        ({"chunk_bytes": (4 << 20) + 1}, ErrorCode.INVALID_PARAMS, None),
        ({"wanted": [wanted_blocks(), wanted_blocks()]}, ErrorCode.INVALID_PARAMS, None),
        ({"wanted": [wanted_blocks(partition_count=0)]}, ErrorCode.INVALID_PARAMS, None),
        ({"wanted": [wanted_blocks(partition_count=2, partition_id=2)]}, ErrorCode.INVALID_PARAMS, None),
        ({"wanted": [wanted_blocks(group="other")]}, ErrorCode.INCOMPATIBLE_PEER, None),
        ({"wanted": [wanted_blocks(block_size=8)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(block_size=6)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(block_size=0)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(block_size=1 << 30)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(num_layers=4)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(num_layers=0)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(block_bytes=LAYOUT.block_bytes - 1)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(block_bytes=0)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(partition_count=2)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        ({"wanted": [wanted_blocks(partition_count=3, block_bytes=1)]}, ErrorCode.READ_BUFFER_MISMATCH, None),
        (
            {"wanted": [wanted_blocks(partition_count=2, block_bytes=LAYOUT.block_bytes // 2)]},
            ErrorCode.INVALID_PARAMS,
            None,
        ),
        ({"reader": pb.ReaderRank(rank=1, tp_size=1)}, ErrorCode.INVALID_PARAMS, None),
        ({"reader": pb.ReaderRank(rank=0, tp_size=3)}, ErrorCode.ASYMMETRIC_TP_FAILED, None),
        ({"reader": pb.ReaderRank(rank=0, tp_size=2)}, ErrorCode.INVALID_PARAMS, None),
        ({"wanted": [wanted_blocks(num_blocks=4)]}, ErrorCode.KV_STALE_REFERENCE, "out_of_range"),
        ({"wanted": [wanted_blocks(first_block=3, num_blocks=1)]}, ErrorCode.KV_STALE_REFERENCE, "out_of_range"),
        ({"wanted": [wanted_blocks(first_block=2**32 - 1)]}, ErrorCode.KV_STALE_REFERENCE, "out_of_range"),
        ({"prompt_tokens": TOKENS - 1}, ErrorCode.KV_STALE_REFERENCE, "out_of_range"),
    ],
)
def test_k2_load_that_does_not_fit_is_refused_and_takes_nothing(
    node: Node,
    stub: pb_grpc.CacheStoreStub,
    staged: str,
    change: dict[str, object],
    code: ErrorCode,
    kind: str | None,
) -> None:
    before = node.count("kv_stale_references_total", kind=kind or "")
    failures = node.count("kv_transfer_failures_total", reason=code.name)
    assert load_refused(stub, load_request(staged, **change)).code is code
    if kind is not None:
        assert node.count("kv_stale_references_total", kind=kind) == before + 1
        assert node.count("kv_transfer_failures_total", reason=code.name) == failures + 1
    # Nothing was taken: the load that fits is still the first one.
    assert list(stub.Load(load_request(staged), timeout=STUB_TIMEOUT_S))[-1].done.pieces == 9


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize(
    ("reference", "code"),
    [
        ({"engine_id": "other"}, ErrorCode.PEER_RESTARTED),
        ({"generation": 4}, ErrorCode.KV_STALE_REFERENCE),
        ({"generation": 2**64 - 1}, ErrorCode.KV_STALE_REFERENCE),
        ({"request_key": key_of(500), "generation": 5}, ErrorCode.KV_STALE_REFERENCE),
    ],
)
def test_k2_reference_to_other_kv_is_refused_in_every_call(
    stub: pb_grpc.CacheStoreStub, staged: str, reference: dict[str, object], code: ErrorCode
) -> None:
    fields: dict[str, object] = {"engine_id": "prefill", "request_key": staged, **reference}
    wrong = pb.KvReference(**fields)
    assert load_refused(stub, load_request(staged, reference=wrong)).code is code
    unknown = "request_key" in reference  # neither renewed nor released, but not stale either
    error = refused(lambda: stub.RenewLease(pb.RenewLeaseRequest(reference=wrong), timeout=STUB_TIMEOUT_S))
    assert error.code is (ErrorCode.KV_LEASE_EXPIRED if unknown else code)
    release = pb.ReleaseRequest(reference=wrong, complete=False, reader=READER)
    if unknown:
        assert not stub.Release(release, timeout=STUB_TIMEOUT_S).found
    else:
        assert refused(lambda: stub.Release(release, timeout=STUB_TIMEOUT_S)).code is code


def test_reload_that_overtakes_the_end_of_the_load_before_it_waits_for_that(
    node: Node, stub: pb_grpc.CacheStoreStub
) -> None:
    key = key_of(79)
    node.admit(key, IDS, generation=3)
    first = stub.Load(load_request(key), timeout=STUB_TIMEOUT_S)
    assert next(first).started.generation == 3
    reference = pb.KvReference(engine_id="prefill", request_key=key, generation=3)
    again = stub.Load(load_request(key, reference=reference), timeout=STUB_TIMEOUT_S)
    opened = node.agent._table.open_reader
    until(lambda: bool(getattr(opened(key, 0), "on_close", [])), "the reload waits")
    first.cancel()
    assert next(again).started.generation == 3
    node.compute(key, 3)
    assert list(again)[-1].done.pieces == 9
    assert stub.Release(
        pb.ReleaseRequest(reference=reference, complete=True, reader=READER), timeout=STUB_TIMEOUT_S
    ).found


def test_reload_beside_a_load_that_stays_open_is_a_duplicate_and_one_of_another_generation_does_not_wait(
    node: Node, stub: pb_grpc.CacheStoreStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RELOAD_WAIT_S", 0.05)
    key = key_of(80)
    node.admit(key, IDS, generation=3)
    first = stub.Load(load_request(key), timeout=STUB_TIMEOUT_S)
    assert next(first).started.generation == 3
    reference = pb.KvReference(engine_id="prefill", request_key=key, generation=3)
    assert load_refused(stub, load_request(key, reference=reference)).code is ErrorCode.DUPLICATE_REQUEST
    open_ = node.agent._table.open_reader(key, 0)
    assert open_ is not None and not open_.on_close, "nobody waits any more"
    monkeypatch.setattr(service, "RELOAD_WAIT_S", 10 * STUB_TIMEOUT_S)
    other = pb.KvReference(engine_id="prefill", request_key=key, generation=4)
    assert load_refused(stub, load_request(key, reference=other)).code is ErrorCode.KV_STALE_REFERENCE
    node.compute(key, 3)
    assert list(first)[-1].done.pieces == 9
    assert stub.Release(
        pb.ReleaseRequest(reference=reference, complete=True, reader=READER), timeout=STUB_TIMEOUT_S
    ).found


def test_k12_second_load_is_a_duplicate_beside_an_open_and_a_parked_one(
    node: Node, stub: pb_grpc.CacheStoreStub
) -> None:
    key = key_of(78)
    first = stub.Load(load_request(key), timeout=STUB_TIMEOUT_S)
    until(lambda: node.agent.stats().parked == 1, "the load is parked")
    assert load_refused(stub, load_request(key)).code is ErrorCode.DUPLICATE_REQUEST
    node.admit(key, IDS, generation=3)
    assert next(first).started.generation == 3
    assert load_refused(stub, load_request(key)).code is ErrorCode.DUPLICATE_REQUEST
    node.compute(key, 3)
    assert list(first)[-1].done.pieces == 9
    assert load_refused(stub, load_request(key)).code is ErrorCode.DUPLICATE_REQUEST
    reference = pb.KvReference(engine_id="prefill", request_key=key, generation=3)
    release = pb.ReleaseRequest(reference=reference, complete=True, reader=READER)
    assert stub.Release(release, timeout=STUB_TIMEOUT_S).found
    assert load_refused(stub, load_request(key)).code is ErrorCode.DUPLICATE_REQUEST
    # With its generation it is a reference to blocks that were given back.
    assert load_refused(stub, load_request(key, reference=reference)).code is ErrorCode.KV_STALE_REFERENCE


# ---- what it refuses: the rest


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize("method", ["Handshake", "Load", "RenewLease", "Release"])
def test_bytes_that_are_no_message_are_a_format_error(channel: grpc.Channel, method: str) -> None:
    path = f"/{SERVICE}/{method}"
    if method == "Load":
        error = refused(lambda: list(channel.unary_stream(path)(b"\xff\xff", timeout=STUB_TIMEOUT_S)))
    else:
        error = refused(lambda: channel.unary_unary(path)(b"\xff\xff", timeout=STUB_TIMEOUT_S))
    assert error.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT


@pytest.mark.invariant("RPC-15")
@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.ReleaseRequest(), "reference"),
        (pb.ReleaseRequest(reference=REFERENCE), "complete"),
        (
            pb.ReleaseRequest(reference=pb.KvReference(request_key=KEY), complete=True, reader=READER),
            "reference.engine_id",
        ),
        (pb.ReleaseRequest(reference=REFERENCE, complete=True), "reader"),
        (pb.ReleaseRequest(reference=REFERENCE, complete=True, reader=pb.ReaderRank(tp_size=1)), "reader.rank"),
        (pb.ReleaseRequest(reference=REFERENCE, complete=True, reader=pb.ReaderRank(rank=0)), "reader.tp_size"),
        (pb.RenewLeaseRequest(), "reference"),
        (pb.RenewLeaseRequest(reference=pb.KvReference(engine_id="prefill")), "reference.request_key"),
    ],
)
def test_control_call_without_a_field_is_refused_by_name(
    stub: pb_grpc.CacheStoreStub, request_: pb.ReleaseRequest | pb.RenewLeaseRequest, param: str
) -> None:
    call = stub.Release if isinstance(request_, pb.ReleaseRequest) else stub.RenewLease
    error = refused(lambda: call(request_, timeout=STUB_TIMEOUT_S))
    assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, param)


def test_release_complete_before_the_load_is_refused(stub: pb_grpc.CacheStoreStub, staged: str) -> None:
    reference = pb.KvReference(engine_id="prefill", request_key=staged, generation=5)
    error = refused(
        lambda: stub.Release(
            pb.ReleaseRequest(reference=reference, complete=True, reader=READER), timeout=STUB_TIMEOUT_S
        )
    )
    assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, "complete")


def test_release_with_a_cause_that_has_no_code_still_releases(stub: pb_grpc.CacheStoreStub, staged: str) -> None:
    reference = pb.KvReference(engine_id="prefill", request_key=staged)
    request = pb.ReleaseRequest(reference=reference, complete=False, cause=errors_pb2.ErrorDetail(message="x"))
    request.reader.CopyFrom(READER)
    assert stub.Release(request, timeout=STUB_TIMEOUT_S).found


def test_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/Steal")(b"", timeout=STUB_TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---- parking


def test_k7_flood_of_invented_keys_is_bounded_and_a_real_request_completes() -> None:
    limits = settings(queue_size=40, parked_per_peer=30, publish_timeout_s=1.0)
    now = 100.0  # stands until the real request is through, however long a busy machine takes over the flood
    flood = Node("prefill", limits, seed=1, clock=lambda: now)
    codes: list[ErrorCode] = []
    done = threading.Event()
    try:
        with grpc.insecure_channel(flood.address) as attacker, grpc.insecure_channel(flood.address, [("x", 1)]) as own:
            calls = [
                pb_grpc.CacheStoreStub(attacker).Load(load_request(key_of(1000 + i)), timeout=FLOOD_TIMEOUT_S)
                for i in range(300)
            ]

            def collect() -> None:
                codes.extend(refused(lambda call=call: list(call)).code for call in calls)
                done.set()

            thread = threading.Thread(target=collect)
            thread.start()
            until(lambda: sum(not call.is_active() for call in calls) == 270, "the flood has its share")
            assert flood.agent.stats().parked == 30
            call = pb_grpc.CacheStoreStub(own).Load(load_request(KEY), timeout=FLOOD_TIMEOUT_S)
            until(lambda: flood.agent.stats().parked == 31, "the real one is parked beside it")
            flood.stage(KEY, IDS)
            assert list(call)[-1].done.pieces == 9
            now += limits.publish_timeout_s
            assert done.wait(FLOOD_TIMEOUT_S)
            thread.join(10)
        assert codes.count(ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED) == 270
        assert codes.count(ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT) == 30
        flood.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        assert_clean(flood)
    finally:
        flood.close()
