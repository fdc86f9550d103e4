"""Calls the servers over gRPC with the generated stubs, as a router would, but one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.errors import BatonError
from rpc.ids import new_nonce
from rpc.status import details_payload, parse_status
from tests.integration.cluster import ServerProcess

TIMEOUT_S = 20.0


def key_of(request_id: str, attempt: int = 0) -> str:
    return f"{request_id}#{attempt}.{new_nonce()}"


def generate_input(
    request_id: str,
    prompt: list[int],
    *,
    model: str,
    max_tokens: int = 8,
    key: str = "",
    output: list[int] | tuple[int, ...] = (),
    **sampling: Any,
) -> common_pb2.GenerateInput:
    values = {"seed": 1, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **sampling}
    return common_pb2.GenerateInput(
        request_id=request_id,
        request_key=key or key_of(request_id),
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **values),
        model=model,
    )


def typed(error: grpc.RpcError) -> BatonError:
    """Baton's error in a failed call."""
    found = parse_status(details_payload(error.trailing_metadata()))
    assert found is not None, error
    assert error.code() is found.spec.grpc
    return found


@dataclass
class Generated:
    """Everything that one decode stream brought."""

    events: list[decode_pb2.DecodeEvent] = field(default_factory=list)
    prefill: prefill_pb2.PrefillResponse | None = None

    @property
    def kinds(self) -> list[str]:
        return [event.WhichOneof("event") or "" for event in self.events]

    @property
    def tokens(self) -> list[common_pb2.TokenOutput]:
        return [token for event in self.events for token in event.tokens.tokens]

    @property
    def token_ids(self) -> list[int]:
        assert [token.index for token in self.tokens] == list(range(len(self.tokens)))
        return [token.token_id for token in self.tokens]

    @property
    def finished(self) -> decode_pb2.Finished:
        assert self.events, "no event came"
        assert self.events[-1].WhichOneof("event") == "finished", self.events[-1]
        return self.events[-1].finished


class Client:
    """Stubs of one server."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self.server = server
        self.model = model
        self.channel = server.channel()
        self.worker = worker_pb2_grpc.WorkerStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *unused: object) -> None:
        self.channel.close()

    def info(self) -> worker_pb2.WorkerInfo:
        return self.worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)

    def kv_source(self) -> common_pb2.KvSource:
        """Reference to this prefill server for a decode server."""
        info = self.info()
        return common_pb2.KvSource(
            engine_id=info.engine_id, cache_store_addresses=info.cache_store_addresses, tp_size=info.tp_size
        )

    def local(self, request: common_pb2.GenerateInput, timeout: float = TIMEOUT_S) -> Generated:
        """One colocated request."""
        message = decode_pb2.DecodeRequest(input=request, local_prefill=decode_pb2.LocalPrefill())
        return Generated(list(self.decode.Decode(message, timeout=timeout)))

    def abort(self, key: str, **fields: Any) -> bool:
        if self.server.role == "prefill":
            return self.prefill.Abort(
                prefill_pb2.PrefillAbortRequest(request_key=key, **fields), timeout=TIMEOUT_S
            ).found
        return self.decode.Abort(decode_pb2.DecodeAbortRequest(request_key=key, **fields), timeout=TIMEOUT_S).found


class EventReader:
    """Reads a stream on a thread of its own, so that a test can wait for single events."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.result = Generated()
        self.error: grpc.RpcError | None = None
        self._news = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self.call:
                with self._news:
                    self.result.events.append(event)
                    self._news.notify_all()
        except grpc.RpcError as error:
            self.error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def wait_for(self, kind: str, limit_s: float = TIMEOUT_S) -> None:
        """Until an event of this kind came."""
        with self._news:
            came = self._news.wait_for(lambda: kind in self.result.kinds or self._ended, limit_s)
        assert came, f"no {kind} within {limit_s:g} s; events: {self.result.kinds}"
        assert kind in self.result.kinds, f"the stream ended without {kind}: {self.error}"

    def wait_end(self, limit_s: float = TIMEOUT_S) -> Generated:
        """Until the stream has ended, in order or with `error`."""
        with self._news:
            assert self._news.wait_for(lambda: self._ended, limit_s), f"no end within {limit_s:g} s"
        return self.result


class Pair:
    """A prefill and a decode server, and requests that go through both."""

    def __init__(self, prefill: ServerProcess, decode: ServerProcess, model: str) -> None:
        self.p = Client(prefill, model)
        self.d = Client(decode, model)
        # A call that nobody holds is cancelled by its finalizer.
        self._calls: list[Any] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *unused: object) -> None:
        self.p.channel.close()
        self.d.channel.close()

    def open_decode(self, request: common_pb2.GenerateInput, timeout: float = TIMEOUT_S) -> EventReader:
        message = decode_pb2.DecodeRequest(input=request, kv_source=self.p.kv_source())
        return EventReader(self.d.decode.Decode(message, timeout=timeout))

    def open_prefill(self, request: common_pb2.GenerateInput, timeout: float = TIMEOUT_S) -> Any:
        """A future of the answer."""
        message = prefill_pb2.PrefillRequest(input=request, hold_kv=True)
        call = self.p.prefill.Prefill.future(message, timeout=timeout)
        self._calls.append(call)
        return call

    def generate(self, request: common_pb2.GenerateInput, timeout: float = TIMEOUT_S) -> Generated:
        """The request through both servers: decode first, prefill at once after."""
        reader = self.open_decode(request, timeout)
        answer = self.open_prefill(request, timeout)
        prefill = answer.result(timeout)
        result = reader.wait_end(timeout)
        if reader.error is not None:
            raise reader.error
        result.prefill = prefill
        return result


def statuses(client: Client, interval_s: float) -> Iterator[worker_pb2.WorkerStatus]:
    return client.worker.WatchStatus(worker_pb2.WatchStatusRequest(interval_seconds=interval_s), timeout=TIMEOUT_S)
