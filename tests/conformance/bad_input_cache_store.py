"""Bad requests to the cache stores of both servers: rows of the table in test_bad_input_table.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protos import cache_store_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.conformance.bad_input import CALL_LIMIT_S, Row, Send, call
from tests.conformance.bad_input_grpc import ENGINE_ID, HUGE, NO_UTF8, TOO_LARGE, UNIMPLEMENTED, field, put
from tests.conformance.live_cluster import BLOCK, MODEL, Live
from tests.conformance.refusals import Refusal
from tests.integration.wire_client import generate_input, key_of

STORE = "cache_store"  # of the prefill server
PROMPT = list(range(1, 2 * BLOCK + 6))
LAYERS, BLOCK_BYTES = 3, 2 * 2 * BLOCK * 16 * 4  # K and V, heads, tokens, head_dim, float32
UNKNOWN = "nobody#0.01234567"


def info_of(live: Live) -> worker_pb2.WorkerInfo:
    return worker_pb2_grpc.WorkerStub(live.prefill).GetInfo(worker_pb2.GetInfoRequest(), timeout=CALL_LIMIT_S)


def handshake(where: str = STORE, **changes: Any) -> Send:
    """A handshake as a decode server of the same model makes it, but for `changes`."""

    def send(live: Live) -> Refusal:
        info = info_of(live)
        request = cache_store_pb2.HandshakeRequest(
            protocol_version=info.protocol_version,
            engine_id=ENGINE_ID,
            expected_engine_id=(live.p if where == STORE else live.d).engine_id,
            model_fingerprint=info.model_fingerprint,
            kv_dtype=info.kv_dtype,
            groups=info.groups,
            tp_size=1,
            rank=0,
            transports=["grpc"],
            checksum="all",
        )
        for path, value in changes.items():
            if path.startswith("group_"):
                put(request.groups[0], path.removeprefix("group_"), value)
            else:
                put(request, path, value)
        return call(where, "CacheStore/Handshake", request)(live)

    return send


READER = cache_store_pb2.ReaderRank(rank=0, tp_size=1)


def reference_of(live: Live, where: str, key: str, generation: int | None = None) -> cache_store_pb2.KvReference:
    server = live.p if where == STORE else live.d
    return cache_store_pb2.KvReference(engine_id=server.engine_id, request_key=key, generation=generation)


def load_request(to: cache_store_pb2.KvReference, /, **changes: Any) -> cache_store_pb2.LoadRequest:
    """A load of the whole PROMPT; names of `changes` that begin with wanted_ are of its only group."""
    blocks = -(-len(PROMPT) // BLOCK)
    wanted = cache_store_pb2.WantedBlocks(
        group="full", block_size=BLOCK, first_block=0, num_blocks=blocks, block_bytes=BLOCK_BYTES, num_layers=LAYERS,
        partition_count=1, partition_id=0,
    )  # fmt: skip
    request = cache_store_pb2.LoadRequest(
        reference=to, wanted=[wanted], prompt_tokens=len(PROMPT), checksum="all", chunk_bytes=1 << 20, reader=READER
    )
    for path, value in changes.items():
        if path.startswith("wanted_"):
            put(request.wanted[0], path.removeprefix("wanted_"), value)
        else:
            put(request, path.replace("__", "."), value)
    return request


def named(refusal: Refusal, to: cache_store_pb2.KvReference) -> Refusal:
    """The refusal names the request by the id in the key, when there is one."""
    assert not to.request_key or refusal.request_id == UNKNOWN.partition("#")[0]
    return refusal


def load(where: str = STORE, **changes: Any) -> Send:
    """A load of a key that nobody has; it is refused before that matters."""

    def send(live: Live) -> Refusal:
        request = load_request(reference_of(live, where, UNKNOWN), **changes)
        return named(call(where, "CacheStore/Load", request)(live), request.reference)

    return send


@contextmanager
def staged(live: Live) -> Iterator[tuple[str, int]]:
    """Key and generation of a request whose KV is staged on the prefill server; given back at the end."""
    stub = prefill_pb2_grpc.PrefillStub(live.prefill)
    key = key_of("staged")
    message = prefill_pb2.PrefillRequest(input=generate_input("staged", PROMPT, model=MODEL, key=key), hold_kv=True)
    answer = stub.Prefill(message, timeout=CALL_LIMIT_S)
    try:
        yield key, answer.kv_generation
    finally:
        stub.Abort(prefill_pb2.PrefillAbortRequest(request_key=key), timeout=CALL_LIMIT_S)


def staged_load(known_generation: bool = False, later: int = 0, **changes: Any) -> Send:
    """A load of KV that is there. `later` is added to its generation."""

    def send(live: Live) -> Refusal:
        with staged(live) as (key, generation):
            named = generation + later if known_generation or later else None
            return call(STORE, "CacheStore/Load", load_request(reference_of(live, STORE, key, named), **changes))(live)

    return send


def second_load(**changes: Any) -> Send:
    """A load after another one of the key that was served completely."""

    def send(live: Live) -> Refusal:
        with staged(live) as (key, _):
            first = load_request(reference_of(live, STORE, key))
            events = list(_stub(live)(first.SerializeToString(), timeout=CALL_LIMIT_S))
            assert len(events) > LAYERS
            request = load_request(reference_of(live, STORE, key, changes.get("generation")))
            return call(STORE, "CacheStore/Load", request)(live)

    return send


def _stub(live: Live) -> Any:
    return live.cache_store.unary_stream("/baton.v1.CacheStore/Load")


def load_beside_another(live: Live) -> Refusal:
    """Two loads of one key at a time: whichever comes second is refused, the other one waits on."""
    request = load_request(reference_of(live, STORE, key_of("twice")))
    message = request.SerializeToString()
    first = _stub(live)(message, timeout=CALL_LIMIT_S)
    try:
        return call(STORE, "CacheStore/Load", request)(live)
    finally:
        assert first.cancel(), "the first load has ended"


def load_of_aborted(live: Live) -> Refusal:
    """A load of a key whose abort came before its request."""
    key = key_of("aborted")
    abort = prefill_pb2.PrefillAbortRequest(request_key=key)
    assert not prefill_pb2_grpc.PrefillStub(live.prefill).Abort(abort, timeout=CALL_LIMIT_S).found
    return call(STORE, "CacheStore/Load", load_request(reference_of(live, STORE, key)))(live)


def renew(where: str = STORE, **changes: Any) -> Send:
    def send(live: Live) -> Refusal:
        request = cache_store_pb2.RenewLeaseRequest(reference=reference_of(live, where, UNKNOWN))
        for path, value in changes.items():
            put(request, path.replace("__", "."), value)
        return named(call(where, "CacheStore/RenewLease", request)(live), request.reference)

    return send


def release(where: str = STORE, **changes: Any) -> Send:
    def send(live: Live) -> Refusal:
        request = cache_store_pb2.ReleaseRequest(
            reference=reference_of(live, where, UNKNOWN), complete=False, reader=READER
        )
        for path, value in changes.items():
            put(request, path.replace("__", "."), value)
        return named(call(where, "CacheStore/Release", request)(live), request.reference)

    return send


def staged_call(method: str, later: int = 0, **fields: Any) -> Send:
    """RenewLease or Release of KV that is there."""

    def send(live: Live) -> Refusal:
        with staged(live) as (key, generation):
            reference = reference_of(live, STORE, key, generation + later)
            kind = {"RenewLease": cache_store_pb2.RenewLeaseRequest, "Release": cache_store_pb2.ReleaseRequest}[method]
            return call(STORE, f"CacheStore/{method}", kind(reference=reference, **fields))(live)

    return send


def names(prefix: str, *fields: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{prefix}{name}") for name in fields)


CACHE_STORE_ROWS: tuple[Row, ...] = (
    # handshake
    *(Row(f"handshake: {name} is absent", handshake(**{name: ...}), 604, (f"{name} is required",), name)
      for name in ("protocol_version", "engine_id", "expected_engine_id", "tp_size", "rank", "transports", "checksum")),
    Row("handshake: an unknown checksum", handshake(checksum="md5"), 605, ("md5", "sample"), "checksum"),
    Row("handshake: rank 1 of 1", handshake(rank=1), 605, ("rank",), "rank"),
    Row("handshake: tp_size is 0", handshake(tp_size=0), 605, ("rank",)),
    Row("handshake: another engine", handshake(expected_engine_id=ENGINE_ID), 8605, ("engine",)),
    Row("handshake: another engine of D", handshake("decode_cache_store", expected_engine_id=ENGINE_ID), 8605),
    Row("handshake: an endless engine", handshake(expected_engine_id="e" * 1_000_000), 8605),
    Row("handshake: another protocol", handshake(protocol_version=99), 8604, ("protocol_version",)),
    Row("handshake: another model", handshake(model_fingerprint="0" * 32), 8604, ("model_fingerprint",)),
    Row("handshake: no fingerprint", handshake(model_fingerprint=...), 8604, ("model_fingerprint",)),
    Row("handshake: another KV dtype", handshake(kv_dtype="bfloat16"), 8604, ("kv_dtype",)),
    Row("handshake: no groups", handshake(groups=...), 8604, ("groups",)),
    *(Row(f"handshake: another {name} of the group", handshake(**{f"group_{name}": value}), 8604, ("group full",))
      for name, value in (("num_layers", 4), ("num_kv_heads", 8), ("head_dim", 64), ("block_size", 24),
                          ("dtype", "float16"))),
    Row("handshake: another group", handshake(group_tag="swa"), 8604, ("groups",)),
    Row("handshake: no common transport", handshake(transports=["rdma"]), 8604, ("no transport",)),
    Row("handshake: not UTF-8", call(STORE, "CacheStore/Handshake", field(2, NO_UTF8)), 604),
    # load: absent fields
    *(Row(f"load: {name} is absent", load(**{name: ...}), 604, (f"{name} is required",), name)
      for name in ("reference", "wanted", "prompt_tokens", "checksum", "chunk_bytes", "reader")),
    *(Row(f"load: {name} is absent", load(**{f"reference__{name}": ...}), 604, (f"reference.{name} is required",),
          f"reference.{name}") for name in ("engine_id", "request_key")),
    *(Row(f"load: wanted {name} is absent", load(**{f"wanted_{name}": ...}), 604, (f"wanted[0].{name} is required",),
          f"wanted[0].{name}")
      for name in ("group", "block_size", "first_block", "num_blocks", "block_bytes", "num_layers", "partition_count",
                   "partition_id")),
    *(Row(f"{kind}: reader {name} is absent", send(**{f"reader__{name}": ...}), 604, (f"reader.{name} is required",),
          f"reader.{name}") for kind, send in (("load", load), ("release", release)) for name in ("rank", "tp_size")),
    # load: values
    Row("load: reader 1 of 1", load(reader__rank=1), 605, ("reader.rank",), "reader.rank"),
    Row("load: half of the heads for the only reader", load(wanted_partition_count=2,
        wanted_block_bytes=BLOCK_BYTES // 2), 605, ("0 of 1",), "wanted[0].partition_id"),
    Row("load: the key is none", load(reference__request_key="nobody"), 605, ("id#attempt.nonce",), "request_key"),
    Row("load: another engine", load(reference__engine_id=ENGINE_ID), 8605, ("engine",)),
    Row("load: another engine of D", load("decode_cache_store", reference__engine_id=ENGINE_ID), 8605),
    Row("load: prompt_tokens is 0", load(prompt_tokens=0), 605, (">= 1",), "prompt_tokens"),
    Row("load: an unknown checksum", load(checksum="crc"), 605, ("crc",), "checksum"),
    Row("load: an unknown transport", load(transport="rdma"), 605, ("rdma", "grpc"), "transport"),
    Row("load: chunks of 1 byte", load(chunk_bytes=1), 605, ("65536",), "chunk_bytes"),
    Row("load: chunks of 5 MiB", load(chunk_bytes=5 << 20), 605, ("4194304",), "chunk_bytes"),
    Row("load: 0 partitions", load(wanted_partition_count=0), 605, (), "wanted[0].partition_count"),
    Row("load: partition 2 of 2", load(wanted_partition_count=2, wanted_partition_id=2), 605, (),
        "wanted[0].partition_id"),
    Row("load: an unknown group", load(wanted_group="swa"), 8604, ("cache groups",)),
    Row("load: an endless group", load(wanted_group="g" * 1_000_000), 8604, ("cache groups",)),
    Row("load: a block size that does not fit", load(wanted_block_size=24), 8320, ("block_size",)),
    Row("load: an endless block size", load(wanted_block_size=1 << 31), 8320, ("block_size",)),
    Row("load: bytes of another block size", load(wanted_block_size=64), 8320, ("block_bytes",)),
    Row("load: another layer count", load(wanted_num_layers=LAYERS + 1), 8320, ("num_layers",)),
    Row("load: another size in bytes", load(wanted_block_bytes=BLOCK_BYTES + 4), 8320, ("block_bytes",)),
    Row("load: another layout of D", load("decode_cache_store", wanted_num_layers=1), 8320, ("num_layers",)),
    Row("load: 3 parts of 2 heads", load(wanted_partition_count=3), 8320, ("heads_per_partition",)),
    Row("load: not UTF-8", call(STORE, "CacheStore/Load", field(1, field(1, NO_UTF8))), 604),
    Row("load: no message", call(STORE, "CacheStore/Load", b"\x0a\xff\xff"), 604),
    Row("load: a generation of nobody's", load(reference__generation=7), 8602),
    Row("load: a later generation", staged_load(later=1), 8602),
    Row("load: another prompt", staged_load(prompt_tokens=len(PROMPT) + 1), 8602),
    Row("load: blocks beyond the prompt", staged_load(True, wanted_first_block=2, wanted_num_blocks=2), 8602),
    Row("load: 4 billion blocks", staged_load(wanted_num_blocks=2**32 - 1), 8602),
    Row("load: beside another", load_beside_another, 8607),
    Row("load: once more after it was served", second_load(), 8607),
    Row("load: of an aborted key", load_of_aborted, 8606),
    # lease
    Row("renew: the reference is absent", renew(reference=...), 604, ("reference is required",), "reference"),
    Row("renew: the key is absent", renew(reference__request_key=...), 604, (), "reference.request_key"),
    Row("renew: an unknown key", renew(), 8601),
    Row("renew: an unknown key of D", renew("decode_cache_store"), 8601),
    Row("renew: another engine", renew(reference__engine_id=ENGINE_ID), 8605),
    Row("renew: a later generation", staged_call("RenewLease", later=1), 8602),
    Row("release: the reference is absent", release(reference=...), 604, ("reference is required",), "reference"),
    Row("release: complete is absent", release(complete=...), 604, ("complete is required",), "complete"),
    Row("release: reader is absent", release(reader=...), 604, ("reader is required",), "reader"),
    Row("release: reader 3 of 2", release(reader__rank=3, reader__tp_size=2), 605, ("reader.rank",), "reader.rank"),
    Row("release: the engine is absent", release(reference__engine_id=...), 604, (), "reference.engine_id"),
    Row("release: another engine", release(reference__engine_id=ENGINE_ID), 8605),
    Row("release: a later generation", staged_call("Release", later=1, complete=False, reader=READER), 8602),
    Row("release: complete before any load", staged_call("Release", complete=True, reader=READER), 605, ("complete",),
        "complete"),
    Row("release: no message", call(STORE, "CacheStore/Release", b"\x0a\xff"), 604),
    Row("cache store: an unknown method", call(STORE, "CacheStore/Steal", b""), 0, status=UNIMPLEMENTED),
    Row("cache store: Prefill is elsewhere", call(STORE, "Prefill/Prefill", b""), 0, status=UNIMPLEMENTED),
    Row("cache store: 17 MiB at once", call(STORE, "CacheStore/Handshake", b"\x12" + HUGE), 0, status=TOO_LARGE),
)  # fmt: skip
