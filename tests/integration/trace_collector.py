"""A collector of traces in the test's own process: OpenTelemetry's protocol over gRPC, spans kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import pytest

from tests.integration.cluster import wait_for

pytest.importorskip("opentelemetry.proto", reason="the collector speaks OTLP")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True)
class Received:
    """One span as it arrived; ids in hex, times in ns since the epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, object]
    error: str  # the status' message; "" when the status is unset
    trace_state: str


def _value(value: common_pb2.AnyValue) -> object:
    return getattr(value, str(value.WhichOneof("value")))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets; while `refuse` is set it answers with UNAVAILABLE, while `hold` is clear not at all."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._lock = threading.Lock()
        self.calls = 0
        self.refuse = False
        self.hold = threading.Event()
        self.hold.set()
        self.address = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            self.calls += 1
        if self.refuse:
            context.abort(grpc.StatusCode.UNAVAILABLE, "told to")
        self.hold.wait(30)
        for resource in request.resource_spans:
            facts = {item.key: _value(item.value) for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                found = [self._read(span, str(facts["service.name"])) for span in scope.spans]
                with self._lock:
                    self._spans += found
        return trace_service_pb2.ExportTraceServiceResponse()

    @staticmethod
    def _read(span: trace_pb2.Span, service: str) -> Received:
        return Received(
            service=service,
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            kind=KINDS[span.kind],
            begin_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes={item.key: _value(item.value) for item in span.attributes},
            error=span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else "",
            trace_state=span.trace_state,
        )

    def spans(self, trace_id: str = "") -> list[Received]:
        with self._lock:
            return [span for span in self._spans if trace_id in ("", span.trace_id)]

    def wait_names(self, trace_id: str, names: set[str], limit_s: float = 20.0) -> dict[str, Received]:
        """The spans of a trace by name, once all `names` have come; each once."""

        def probe() -> bool:
            return names <= {span.name for span in self.spans(trace_id)}

        try:
            wait_for("spans", probe, limit_s)
        except TimeoutError:
            have = sorted(span.name for span in self.spans(trace_id))
            raise AssertionError(f"missing: {sorted(names - set(have))}; there are {have}") from None
        found = self.spans(trace_id)
        by_name = {span.name: span for span in found}
        assert len(by_name) == len(found), sorted(span.name for span in found)
        return by_name


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.hold.set()
        server.stop(1).wait()
