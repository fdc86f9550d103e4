"""Spans on their way out: OpenTelemetry's protocol over gRPC to a collector. Needs the extra `tracing`, which is
imported here and only once tracing is asked for.

Spans wait in a bounded queue of OpenTelemetry's, whose thread delivers them; a queue that is full drops the oldest. A
collector that cannot be reached costs spans and a line in the log (the 1st, 2nd, 4th, 8th… failure), never a request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rpc.log_limit import LogLimit
from rpc.tracing import Kind, Span, Tracer
from rpc.version import version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

QUEUE_SPANS = 8192
BATCH_SPANS = 512
DELAY_MS = 1000
DELIVERY_LIMIT_S = 5.0
CLOSE_LIMIT_S = 3.0
_LIBRARY_LOGS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")

_log = logging.getLogger(__name__)


class TracingUnavailable(Exception):
    """Tracing was asked for, and its packages are not installed."""


def open_tracer(endpoint: str, ratio: float, *, service: str, role: str) -> Tracer:
    """A tracer that delivers to `endpoint` (`http://host:port`, `https://host:port`). Raises TracingUnavailable."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailable(
            "needs packages that are not installed; install Baton with its extra tracing (pip install '.[tracing]')"
        ) from error
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=DELIVERY_LIMIT_S, headers=None
    )
    resource = Resource.create(
        {
            "service.name": service,
            "service.version": version(),
            "service.instance.id": f"{role}:{os.getpid()}",
            "baton.role": role,
        }
    )
    to_readable = _converter(resource)
    processor = BatchSpanProcessor(
        _quiet(exporter, endpoint),
        max_queue_size=QUEUE_SPANS,
        schedule_delay_millis=DELAY_MS,
        max_export_batch_size=BATCH_SPANS,
    )

    def export(spans: Sequence[Span]) -> None:
        offset_ns = _to_time_of_day()
        for span in spans:
            processor.on_end(to_readable(span, offset_ns))

    def close(limit_s: float) -> None:
        limit_s = min(limit_s, CLOSE_LIMIT_S)
        # On a thread of its own: a delivery that is under way is not given up before its own limit.
        closing = threading.Thread(target=processor.shutdown, daemon=True)
        closing.start()
        closing.join(limit_s)
        if closing.is_alive():
            _log.warning("tracing: closed with spans that were not delivered to %s", endpoint)

    return Tracer(export, ratio=ratio, close=close)


def _to_time_of_day() -> int:
    """Nanoseconds from the common clock to the time of day, of the reading that took least: a process may be held up
    between its two clocks."""
    readings = []
    for _ in range(3):
        before, of_day, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, of_day - (before + after) // 2))
    return min(readings)[1]


def _converter(resource: object) -> Callable[[Span, int], ReadableSpan]:
    """From spans to those of the library."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

    assert isinstance(resource, Resource)
    kinds: Mapping[Kind, SpanKind] = {
        "server": SpanKind.SERVER,
        "client": SpanKind.CLIENT,
        "internal": SpanKind.INTERNAL,
    }
    scope = InstrumentationScope("baton", version())
    sampled = TraceFlags(TraceFlags.SAMPLED)
    fine = Status(StatusCode.UNSET)

    def convert(span: Span, offset_ns: int) -> ReadableSpan:
        context = span.context
        state = TraceState.from_header([context.tracestate]) if context.tracestate else None
        attributes = dict(span.attributes)
        if span.error:
            attributes["error.type"] = span.error
        return ReadableSpan(
            name=span.name,
            context=SpanContext(context.trace_id, context.span_id, False, sampled, state),
            parent=SpanContext(context.trace_id, span.parent, True, sampled) if span.parent else None,
            resource=resource,
            attributes=attributes,
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else fine,
            start_time=span.begin_ns + offset_ns,
            end_time=span.end_ns + offset_ns,
            instrumentation_scope=scope,
        )

    return convert


class _Cause(logging.Filter):
    """Keeps the library's last words, in place of a line for every failure of a collector that is away for hours."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.words = record.getMessage()
        return False


def _quiet(exporter: SpanExporter, endpoint: str) -> SpanExporter:
    """The exporter, whose failures are logged now and then."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    cause, limit = _Cause(), LogLimit()
    for name in _LIBRARY_LOGS:
        logging.getLogger(name).addFilter(cause)

    class Quiet(SpanExporter):
        def __init__(self) -> None:
            self.lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:  # whatever the library did not expect ends here, and is said below
                cause.words, result = repr(error), SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                self.lost += len(spans)
                times = limit.occurred("delivery")
                if times:
                    _log.warning(
                        "tracing: %d spans could not be delivered, failure %d: %s", self.lost, times, cause.words
                    )
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Quiet()
