"""A closed incident reaches a real receiver of OTLP as one trace, once."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any, cast

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.servers.http_receiver import DEADLINE_S, Receiver

from services.api.outgoing.traces import TraceExporter
from services.store.read.closed_incidents import SqlClosedIncidents


def decoded(body: bytes) -> ExportTraceServiceRequest:
    """OTLP's JSON is protobuf's, but for ids, which are hexadecimal. A name or type that OTLP lacks is an error."""

    def with_bytes(value: object) -> object:
        if isinstance(value, list):
            return [with_bytes(one) for one in value]
        if not isinstance(value, dict):
            return value
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            name: base64.b64encode(bytes.fromhex(one)).decode() if name in ids else with_bytes(one)
            for name, one in value.items()
        }

    return ParseDict(cast("dict[str, Any]", with_bytes(json.loads(body))), ExportTraceServiceRequest())


def test_a_closed_incident_is_sent_as_one_trace(stores, make, clock) -> None:
    stores.run_job()
    stores.begin_restart()
    unsent = SqlClosedIncidents(stores.db, "controller#1")
    assert unsent.following() is None, "what happened before is no news"
    receiver = Receiver(503)
    stop = threading.Event()
    exporter = TraceExporter(endpoint=receiver.url, headers={"Api-Key": "k"}, incidents=unsent, clock=clock)
    loop = threading.Thread(target=exporter.run, args=(stop,))
    try:
        stores.commit(incidents=(make.incident(1, "resolved", action_id="act-2", resolved_at=make.T + 5.0),))
        loop.start()
        first, again = receiver.received(2)  # the first was refused for now
    finally:
        stop.set()
        loop.join(DEADLINE_S)
        receiver.close()
    assert first == again
    assert receiver.requests[0][0] == "/v1/traces"
    assert receiver.requests[0][1]["Api-Key"] == "k"
    (resource,) = decoded(again).resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "flyball"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    root = spans["incident worker_killed"]
    decision = next(span for name, span in spans.items() if name.startswith("decision "))
    action = spans["action"]
    assert (root.parent_span_id, decision.parent_span_id, action.parent_span_id) == (
        b"",
        root.span_id,
        decision.span_id,
    )
    assert len({span.trace_id for span in spans.values()}) == 1
    assert root.start_time_unix_nano == round(make.T * 1_000_000) * 1000
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans.values())
    assert any(name.startswith("step ") for name in spans)
    assert SqlClosedIncidents(stores.db, "controller#1").following() is None, (
        "a restarted exporter does not send it again"
    )
