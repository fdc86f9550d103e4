"""A client that knows nothing of Baton, like grpcurl: services, messages and calls come from reflection alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2

from tests.conformance.live_cluster import CONTEXT, KEY_METADATA, MODEL, PROMPT, Live

LIMIT_S = 15.0
VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
OWN = {
    "router": {"baton.v1.Generation"},
    "prefill": {"baton.v1.Prefill", "baton.v1.Worker"},
    "decode": {"baton.v1.Decode", "baton.v1.Worker"},
    "cache_store": {"baton.v1.CacheStore"},
}


class Stranger:
    """Calls a server by what it says about itself. JSON in, JSON out."""

    def __init__(self, channel: grpc.Channel, version: str = VERSIONS[0], metadata: Any = ()) -> None:
        self._channel = channel
        self._metadata = metadata
        # The messages of both versions are the same on the wire.
        self._reflect = channel.stream_stream(
            f"/{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def _ask(self, **request: str) -> reflection_pb2.ServerReflectionResponse:
        (answer,) = self._reflect(iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=LIMIT_S)
        return answer

    def services(self) -> set[str]:
        return {service.name for service in self._ask(list_services="").list_services_response.service}

    def _learn(self, **request: str) -> None:
        """Takes in the files that the server sends, each after those that it imports."""
        answer = self._ask(**request)
        assert answer.HasField("file_descriptor_response"), answer
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in answer.file_descriptor_response.file_descriptor_proto
        ]
        for file in sorted(files, key=lambda file: len(file.dependency)):
            for needed in file.dependency:
                if needed not in self._known:
                    self._learn(file_by_filename=needed)
            if file.name not in self._known:
                self._pool.Add(file)
                self._known.add(file.name)

    def service(self, name: str) -> ServiceDescriptor:
        self._learn(file_containing_symbol=name)
        return self._pool.FindServiceByName(name)

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers to a method `package.Service/Method`; one for a unary one."""
        service, _, name = method.partition("/")
        found: MethodDescriptor = self.service(service).methods_by_name[name]
        assert not found.client_streaming
        kinds = message_factory.GetMessageClass(found.input_type), message_factory.GetMessageClass(found.output_type)
        options: Any = {"request_serializer": kinds[0].SerializeToString, "response_deserializer": kinds[1].FromString}
        message = json_format.ParseDict(request, kinds[0]())
        if found.server_streaming:
            answers = list(
                self._channel.unary_stream(f"/{method}", **options)(message, timeout=LIMIT_S, metadata=self._metadata)
            )
        else:
            answers = [
                self._channel.unary_unary(f"/{method}", **options)(message, timeout=LIMIT_S, metadata=self._metadata)
            ]
        return [json.loads(json_format.MessageToJson(answer, preserving_proto_field_name=True)) for answer in answers]


def channels(live: Live) -> Iterator[tuple[str, grpc.Channel]]:
    yield from (
        ("router", live.router), ("prefill", live.prefill), ("decode", live.decode), ("cache_store", live.cache_store),
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_services_when_listed_then_they_are_the_servers_own(live: Live, version: str) -> None:
    for name, channel in channels(live):
        services = Stranger(channel, version).services()
        reflection = {f"{each}.ServerReflection" for each in VERSIONS}
        assert services == OWN[name] | {"grpc.health.v1.Health"} | reflection, name


@pytest.mark.parametrize("version", VERSIONS)
def test_services_when_described_then_every_method_can_be_called(live: Live, version: str) -> None:
    methods = {}
    for name, channel in channels(live):
        stranger = Stranger(channel, version)
        for service in stranger.services():
            described = stranger.service(service)
            assert isinstance(described.file, FileDescriptor)
            if service in OWN[name]:
                methods[service] = {method.name for method in described.methods}
    assert methods == {
        "baton.v1.Generation": {"Generate", "Abort", "ListModels"},
        "baton.v1.Prefill": {"Prefill", "Abort"},
        "baton.v1.Decode": {"Decode", "Abort"},
        "baton.v1.CacheStore": {"Handshake", "Load", "RenewLease", "Release"},
        "baton.v1.Worker": {
            "GetInfo",
            "GetStatus",
            "WatchStatus",
            "SubscribeKvEvents",
            "Drain",
            "FlushCache",
            "StartProfile",
            "StopProfile",
        },
    }


def test_symbol_when_unknown_then_it_is_not_found(live: Live) -> None:
    for _, channel in channels(live):
        answer = Stranger(channel)._ask(file_containing_symbol="baton.v1.Nothing")
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_generate_when_called_by_reflection_then_it_answers_as_over_http(live: Live) -> None:
    stranger = Stranger(live.router, metadata=KEY_METADATA)
    request = {
        "model": MODEL, "prompt": PROMPT, "sampling": {"max_tokens": 12, "temperature": 0, "ignore_eos": True},
    }  # fmt: skip
    parts = stranger.call("baton.v1.Generation/Generate", request)
    assert "".join(part.get("text", "") for part in parts) == live.expected
    assert [token["index"] for part in parts for token in part["tokens"]] == list(range(12))
    assert len({part["request_id"] for part in parts}) == 1
    assert parts[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert parts[-1]["usage"]["completion_tokens"] == 12
    assert (parts[-1]["baton"]["path"], parts[-1]["baton"]["attempts"]) == ("pd", 1)
    (whole,) = stranger.call("baton.v1.Generation/Generate", {**request, "stream": False, "request_id": "reflected"})
    assert (whole["text"], whole["request_id"]) == (live.expected, "reflected")
    chat = stranger.call("baton.v1.Generation/Generate", {
        "messages": {"messages": [{"role": "user", "content": "hi"}]}, "n": 2, "stream": False,
        "sampling": {"max_tokens": 3, "seed": "18446744073709551615", "logprobs": 1},
    })  # fmt: skip
    assert [choice.get("index", 0) for choice in chat] == [0, 1]
    assert all(len(token["top_logprobs"]) == 1 for choice in chat for token in choice["tokens"])


def test_models_and_aborts_when_called_by_reflection_then_they_answer(live: Live) -> None:
    stranger = Stranger(live.router, metadata=KEY_METADATA)
    (models,) = stranger.call("baton.v1.Generation/ListModels", {})
    assert [(model["id"], model["max_model_len"]) for model in models["models"]] == [(MODEL, CONTEXT)]
    assert stranger.call("baton.v1.Generation/Abort", {"request_id": "nobody"}) == [{"found": False}]


def test_workers_when_called_by_reflection_then_they_say_what_and_how_they_are(live: Live) -> None:
    for channel, server, role in ((live.prefill, live.p, "ROLE_PREFILL"), (live.decode, live.d, "ROLE_DECODE")):
        stranger = Stranger(channel)
        (info,) = stranger.call("baton.v1.Worker/GetInfo", {})
        assert (info["role"], info["engine_id"]) == (role, server.engine_id)
        assert info["cache_store_addresses"] == server.cache_store
        assert info["served_model_names"] == [MODEL]
        (status,) = stranger.call("baton.v1.Worker/GetStatus", {})
        assert (status["state"], status["engine_id"]) == ("WORKER_STATE_READY", server.engine_id)
        (ledger,) = status["ledgers"]
        counts = {
            name: int(ledger[name]) for name in ("free", "running", "staged", "receiving", "quarantined", "cached")
        }
        assert sum(counts.values()) == int(ledger["total"])


def test_health_when_checked_by_reflection_then_every_service_is_serving(live: Live) -> None:
    for name, channel in channels(live):
        stranger = Stranger(channel)
        for service in ("", *OWN[name]):
            assert stranger.call("grpc.health.v1.Health/Check", {"service": service}) == [{"status": "SERVING"}]


def test_cache_store_when_called_by_reflection_then_it_refuses_what_does_not_fit(live: Live) -> None:
    stranger = Stranger(live.cache_store)
    reference = {"engine_id": live.p.engine_id, "request_key": "nobody#0.01234567"}
    reader = {"rank": 0, "tp_size": 1}
    request = {"reference": reference, "complete": False, "reader": reader}
    (answer,) = stranger.call("baton.v1.CacheStore/Release", request)
    assert answer == {"found": False}
    with pytest.raises(grpc.RpcError) as caught:
        stranger.call("baton.v1.CacheStore/RenewLease", {"reference": reference})
    assert caught.value.code() is grpc.StatusCode.ABORTED
    live.check_serving()
