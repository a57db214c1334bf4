"""Sends a trace of each closed incident to a collector of OpenTelemetry: OTLP over HTTP, in JSON."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from flyball import __version__
from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.wire import encode
from services.api.outgoing.delivery import DeliveryLoop, Json, Unsent, post
from services.api.outgoing.webhook import check_url
from services.record.incident_trace import TraceSpan, spans_of

_PATH = "/v1/traces"
_INTERNAL = 1  # SPAN_KIND_INTERNAL
_ERROR = 2  # STATUS_CODE_ERROR
_NS = 1_000_000_000


def parse_headers(text: str) -> dict[str, str]:
    """Parse OTEL_EXPORTER_OTLP_HEADERS: name=value pairs with commas, values URL-encoded. Raises ConfigurationError."""
    found = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(
                "otlp_headers is wrong: a part has no name or no value.", hint="write name=value,name=value"
            )
        found[name.strip()] = unquote(value.strip())
    return found


def request(cluster: str, spans: tuple[TraceSpan, ...]) -> Json:
    """Return an ExportTraceServiceRequest in OTLP's JSON."""
    resource = {"service.name": "flyball", "service.version": __version__, "flyball.cluster_id": cluster}
    scope = {"name": "flyball", "version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": [_span(span) for span in spans]}],
            }
        ]
    }


class TraceExporter:
    """The loop that sends traces."""

    def __init__(self, *, endpoint: str, headers: Mapping[str, str], incidents: Unsent, clock: Clock) -> None:
        check_url(endpoint, "otlp_endpoint")
        self._url = endpoint.rstrip("/") + _PATH
        self._headers = headers
        self._delivery = DeliveryLoop(name="traces", unsent=incidents, send=self._send, clock=clock)

    def run(self, stop: threading.Event) -> None:
        """Run until stopped."""
        self._delivery.run(stop)

    def _send(self, _: int, story: Json) -> tuple[str, bool]:
        spans = spans_of(story["cluster"], story["incident"])
        return post(self._url, encode(request(story["cluster"], spans)), self._headers)


def _span(span: TraceSpan) -> Json:
    found: Json = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nanoseconds(span.start_at),
        "endTimeUnixNano": _nanoseconds(span.end_at),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        found["parentSpanId"] = span.parent_id
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return found


def _nanoseconds(at: float) -> str:
    return str(round(at * 1_000_000) * (_NS // 1_000_000))  # floats of today have microseconds


def _attributes(values: Mapping[str, Any]) -> list[Json]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Any) -> Json:  # noqa: ANN401 - one of Attribute
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": str(value)}
