"""Bad input, cancels and aborts in every state, against real server processes: the code, the record, the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, decode_pb2, prefill_pb2
from rpc.errors import ErrorCode
from tests.integration.cluster import Cluster, wait_for
from tests.integration.direct_servers import DECODE_BLOCKS
from tests.integration.test_servers_handoff import BLOCK, MODEL, prompt_of
from tests.integration.wire_client import TIMEOUT_S, EventReader, Pair, generate_input, key_of, typed
from tests.unit.engine.tiny_models import VOCAB_SIZE

LIMIT_S = 20.0
FORMAT, PARAMS = ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, ErrorCode.INVALID_PARAMS


@pytest.fixture(scope="module")
def cluster(direct: Cluster) -> Cluster:
    return direct


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Iterator[Pair]:
    with Pair(cluster.prefill[0], cluster.decode[0], MODEL) as both:
        yield both


@pytest.fixture(autouse=True)
def _cluster_serves_on(cluster: Cluster, pair: Pair) -> Iterator[None]:
    """After every test: clean ledgers, living processes, and one ordinary request answered right."""
    yield
    cluster.assert_clean_ledgers()
    assert all(server.alive for server in cluster.servers)
    prompt = prompt_of(20)
    split = pair.generate(generate_input("after", prompt, model=MODEL, max_tokens=4, ignore_eos=True))
    alone = pair.d.local(generate_input("after-local", prompt, model=MODEL, max_tokens=4, ignore_eos=True))
    assert split.token_ids == alone.token_ids
    assert cluster.errors_without_code() == []


def spoilt(**fields: Any) -> common_pb2.GenerateInput:
    return generate_input("bad", prompt_of(8), model=MODEL, **fields)


def changed(change: Callable[[common_pb2.GenerateInput], object]) -> common_pb2.GenerateInput:
    message = spoilt()
    change(message)
    return message


BAD: dict[str, tuple[common_pb2.GenerateInput, ErrorCode]] = {
    "no id": (changed(lambda m: m.ClearField("request_id")), FORMAT),
    "no key": (changed(lambda m: m.ClearField("request_key")), FORMAT),
    "key of another": (changed(lambda m: setattr(m, "request_key", "x#0.00000000")), PARAMS),
    "no sampling": (changed(lambda m: m.ClearField("sampling")), FORMAT),
    "no seed": (changed(lambda m: m.sampling.ClearField("seed")), FORMAT),
    "no model": (changed(lambda m: m.ClearField("model")), FORMAT),
    "other model": (changed(lambda m: setattr(m, "model", "x")), ErrorCode.MODEL_NOT_FOUND),
    "empty prompt": (changed(lambda m: m.ClearField("prompt_token_ids")), PARAMS),
    "id beyond the vocabulary": (
        changed(lambda m: m.prompt_token_ids.append(VOCAB_SIZE)),
        ErrorCode.OUT_OF_VOCAB_RANGE,
    ),
    "too long": (changed(lambda m: m.prompt_token_ids.extend([3] * 600)), ErrorCode.LONG_PROMPT_ERROR),
    "max_tokens 0": (spoilt(max_tokens=0), PARAMS),
    "temperature": (spoilt(temperature=3.0), PARAMS),
    "temperature NaN": (spoilt(temperature=math.nan), PARAMS),
    "top_p": (spoilt(top_p=0.0), PARAMS),
    "logprobs": (spoilt(logprobs=99), PARAMS),
}


@pytest.mark.parametrize("name", BAD)
def test_request_when_a_field_is_wrong_then_both_servers_answer_the_same_code(pair: Pair, name: str) -> None:
    message, code = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        pair.p.prefill.Prefill(prefill_pb2.PrefillRequest(input=message, hold_kv=True), timeout=TIMEOUT_S)
    assert typed(caught.value).code is code
    with pytest.raises(grpc.RpcError) as caught:
        pair.d.local(message)
    assert typed(caught.value).code is code


def test_decode_when_the_source_is_another_engine_then_it_is_8212_with_the_cause_and_no_token(pair: Pair) -> None:
    source = pair.p.kv_source()
    source.engine_id = "0" * 32
    message = decode_pb2.DecodeRequest(
        input=generate_input("foreign", prompt_of(20, salt=1), model=MODEL), kv_source=source
    )
    reader = EventReader(pair.d.decode.Decode(message, timeout=TIMEOUT_S))
    result = reader.wait_end()
    error = typed(reader.error)
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.metadata["cause"] == "PEER_RESTARTED"
    assert result.tokens == []


def test_decode_when_nobody_listens_at_the_source_then_it_is_8212_and_the_blocks_are_free(pair: Pair) -> None:
    source = pair.p.kv_source()
    del source.cache_store_addresses[:]
    source.cache_store_addresses.append("127.0.0.1:1")
    message = decode_pb2.DecodeRequest(
        input=generate_input("nobody", prompt_of(20, salt=2), model=MODEL), kv_source=source
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(pair.d.decode.Decode(message, timeout=TIMEOUT_S))
    assert typed(caught.value).code is ErrorCode.LOAD_KV_CACHE_FAILED


def test_prompt_when_it_can_never_fit_the_pool_then_it_is_refused_for_good(cluster: Cluster, pair: Pair) -> None:
    assert cluster.decode[0].ledger()[0]["total"] == DECODE_BLOCKS
    with pytest.raises(grpc.RpcError) as caught:
        pair.d.local(generate_input("huge", prompt_of((DECODE_BLOCKS + 1) * BLOCK), model=MODEL))
    assert typed(caught.value).code is ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN


# -- cancels and aborts --------------------------------------------------------------------------------------


def test_prefill_when_cancelled_while_it_computes_then_p_stops_and_records_8100(
    cluster: Cluster, pair: Pair, held: Path
) -> None:
    request = generate_input("slow-compute", prompt_of(400, salt=3), model=MODEL)
    call = pair.open_prefill(request)
    prefill = cluster.prefill[0]
    wait_for("the request on P", lambda: prefill.open_state("slow-compute"), LIMIT_S)
    wait_for("its blocks", lambda: prefill.ledger()[0]["running"], LIMIT_S)
    call.cancel()
    wait_for("its end at the front", lambda: not prefill.open_state("slow-compute"), LIMIT_S)
    held.unlink()
    record = prefill.finished("slow-compute")
    assert (record["code"], record["source"], record["abort_source"]) == (8100, "client_cancel", "client")


def test_prefill_when_aborted_while_it_waits_in_the_queue_then_only_it_ends(
    cluster: Cluster, pair: Pair, held: Path
) -> None:
    first = generate_input("slow-queue-1", prompt_of(300, salt=4), model=MODEL)
    second = generate_input("slow-queue-2", prompt_of(300, salt=5), model=MODEL)
    calls = [pair.open_prefill(first), pair.open_prefill(second)]
    prefill = cluster.prefill[0]
    for request in (first, second):  # one that came before them may be open too, until its KV is released
        wait_for(request.request_id, lambda of=request: prefill.open_state(of.request_id), LIMIT_S)
    assert pair.p.abort(second.request_key, code=8205, source="peer")
    held.unlink()
    error = calls[1].exception(LIMIT_S)
    assert typed(error).code is ErrorCode.CONNECTION_RESET_BY_PEER
    assert calls[0].result(TIMEOUT_S).result.HasField("first_token")
    assert pair.p.abort(first.request_key)
    assert prefill.finished("slow-queue-1")["kv"]["outcome"] == "aborted"


def test_prefill_when_aborted_while_its_kv_is_held_then_the_blocks_are_free_at_once(
    cluster: Cluster, pair: Pair
) -> None:
    request = generate_input("held", prompt_of(40, salt=6), model=MODEL)
    pair.open_prefill(request).result(TIMEOUT_S)
    prefill = cluster.prefill[0]
    wait_for("the held request", lambda: prefill.open_state("held") == "held", LIMIT_S)
    assert wait_for("staged blocks", lambda: prefill.ledger()[0]["staged"], LIMIT_S)
    assert pair.p.abort(request.request_key, source="peer")
    record = prefill.finished("held")
    assert (record["kv"]["outcome"], record["code"]) == ("aborted", 0)
    cluster.assert_clean_ledgers()  # long before its lease ends
    # The decode server comes too late.
    reader = pair.open_decode(request)
    reader.wait_end()
    error = typed(reader.error)
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.metadata["cause"] in ("REQUEST_TOMBSTONED", "CANCELLED")


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_decode_when_ended_while_it_loads_then_its_blocks_and_those_of_p_are_free(
    cluster: Cluster, pair: Pair, held: Path, how: str
) -> None:
    request = generate_input(f"slow-load-{how}", prompt_of(300, salt=7), model=MODEL)
    reader = pair.open_decode(request)
    answer = pair.open_prefill(request)
    reader.wait_for("reserved")
    decode = cluster.decode[0]
    wait_for("the load", lambda: decode.open_state(request.request_id) == "load", LIMIT_S)
    wait_for("its blocks", lambda: decode.ledger()[0]["receiving"], LIMIT_S)  # told a little later
    if how == "cancel":
        reader.call.cancel()
    else:
        assert pair.d.abort(request.request_key, source="client")
    reader.wait_end()
    held.unlink()
    record = decode.finished(request.request_id)
    assert (record["code"], record["abort_source"]) == (8100, "client")
    pair.p.abort(request.request_key, source="peer")
    answer.exception(TIMEOUT_S)


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_decode_when_ended_while_it_generates_then_it_stops(cluster: Cluster, pair: Pair, how: str) -> None:
    request = generate_input(f"gen-{how}", prompt_of(20, salt=8), model=MODEL, max_tokens=400, ignore_eos=True)
    reader = pair.open_decode(request)
    pair.open_prefill(request)
    reader.wait_for("tokens")
    if how == "cancel":
        reader.call.cancel()
    else:
        assert pair.d.abort(request.request_key)
    reader.wait_end()
    record = cluster.decode[0].finished(request.request_id)
    assert record["code"] == 8100
    assert record["generated_tokens"] < 400


def test_decode_when_its_reservation_waits_and_p_never_gets_the_request_then_it_ends_at_its_deadline(
    cluster: Cluster, pair: Pair
) -> None:
    request = generate_input("lonely", prompt_of(40, salt=9), model=MODEL)
    reader = pair.open_decode(request, timeout=3.0)
    reader.wait_for("reserved")
    reader.wait_end(LIMIT_S)
    assert reader.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    record = cluster.decode[0].finished("lonely")
    assert (record["code"], record["abort_source"]) == (603, "deadline")
    counted = cluster.decode[0].counted
    wait_for("its count", lambda: counted("baton_aborts_total", leg="decode", source="deadline") >= 1, LIMIT_S)


def test_prefill_when_the_deadline_passes_while_it_computes_then_the_record_has_603(
    cluster: Cluster, pair: Pair, held: Path
) -> None:
    request = generate_input("slow-late", prompt_of(400, salt=10), model=MODEL)
    with pytest.raises(grpc.RpcError) as caught:
        pair.open_prefill(request, timeout=2.0).result(LIMIT_S)
    held.unlink()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert cluster.prefill[0].finished("slow-late")["code"] == 603


def test_abort_when_it_comes_before_the_request_then_both_servers_refuse_the_request(pair: Pair) -> None:
    request = generate_input("early", prompt_of(20, salt=11), model=MODEL, key=key_of("early"))
    assert not pair.p.abort(request.request_key)
    assert not pair.d.abort(request.request_key)
    with pytest.raises(grpc.RpcError) as caught:
        pair.open_prefill(request).result(TIMEOUT_S)
    assert typed(caught.value).code is ErrorCode.REQUEST_TOMBSTONED
    with pytest.raises(grpc.RpcError) as caught:
        pair.d.local(request)
    assert typed(caught.value).code is ErrorCode.REQUEST_TOMBSTONED


def test_request_when_its_key_is_open_on_both_servers_then_the_second_is_8607_and_the_first_goes_on(pair: Pair) -> None:
    request = generate_input("slow-twice", prompt_of(200, salt=12), model=MODEL, max_tokens=4)
    reader = pair.open_decode(request)
    answer = pair.open_prefill(request)
    reader.wait_for("reserved")
    second = pair.open_decode(request)
    second.wait_end()
    assert typed(second.error).code is ErrorCode.DUPLICATE_REQUEST
    assert typed(pair.open_prefill(request).exception(TIMEOUT_S)).code is ErrorCode.DUPLICATE_REQUEST
    assert answer.result(TIMEOUT_S).result.HasField("first_token")
    assert len(reader.wait_end().tokens) >= 1
