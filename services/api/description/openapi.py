"""Completes FastAPI's OpenAPI description: contract types, problem details for every error, the roles of each route.

The types are the msgspec structs that bodies are decoded into, and those of `replies` for what is shown to users.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import msgspec

from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.events import Event
from flyball.contracts.orders import (
    AdoptRequest,
    ApproveRequest,
    CheckpointRequest,
    CheckRequest,
    CordonRequest,
    SilenceRequest,
)
from flyball.contracts.reports.conditions import ConditionRequest
from flyball.contracts.reports.drains import Departure, DrainRequest
from flyball.contracts.reports.rank_logs import LogPiece
from flyball.contracts.reports.signals import Report, ReportReply
from flyball.contracts.reports.standings import HostStanding
from services.api.description.examples import Examples
from services.api.replies.acts import AuditPage, DryRunReply
from services.api.replies.history import (
    ActionPage,
    ActionStory,
    DecisionPage,
    DecisionStory,
    EventPage,
    IncidentPage,
    IncidentStory,
    SignalPage,
)
from services.api.replies.hosts import ChecksReply, HostMapReply, HostPage, HostTokenReply, OrderPage, ReaderTokenReply
from services.api.replies.jobs import CheckpointsReply, JobPage, JobReply, LogPieceReply, RecoverabilityReply
from services.runtime.health import HealthVerdict
from services.runtime.http.problem_details import MEDIA_TYPE, FieldError

_REF_TEMPLATE = "#/components/schemas/{name}"
_TYPES = (
    *(Report, ReportReply, HostStanding, CommandBatch, CommandUpdate),
    *(Departure, DrainRequest, ConditionRequest, JobSpec, Event, LogPiece),
    *(CordonRequest, SilenceRequest, ApproveRequest, CheckRequest, CheckpointRequest, AdoptRequest),
    *(RecoverabilityReply, HostMapReply),
    *(
        JobPage,
        JobReply,
        CheckpointsReply,
        LogPieceReply,
        HostPage,
        OrderPage,
        ChecksReply,
        HostTokenReply,
        ReaderTokenReply,
    ),
    *(
        IncidentPage,
        IncidentStory,
        ActionPage,
        ActionStory,
        SignalPage,
        AuditPage,
        DryRunReply,
        DecisionPage,
        DecisionStory,
        EventPage,
        HealthVerdict,
        FieldError,
    ),
)


def body_of(kind: object) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body has this type."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(kind)}}}}


def reply_of(kind: object, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route whose response has this type, the type with this name, or one of a tuple of
    types. By default with status 200."""
    content = {"application/json": {"schema": _schema(kind)}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses or (200,)}


def act_replies(kind: object) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that is carried out soon, or with `dry_run` only tried."""
    return reply_of(kind, 202) | reply_of(DryRunReply, 200)


_MEANINGS = {
    200: "Success",
    201: "Created",
    202: "Accepted: it is stored, and carried out soon",
    503: "Not now",
}


def operation_id(route_name: str) -> str:
    """Return `listJobs` for `list_jobs`."""
    first, *rest = route_name.split("_")
    return first + "".join(map(str.capitalize, rest))


def media_of(media_type: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that answers with this media type and these statuses."""
    return {status: {"description": "Success", "content": {media_type: {}}} for status in statuses}


def components() -> dict[str, Any]:
    """Return the schemas of all contract types in bodies and responses, for `components.schemas`."""
    from goodput.comparison import ReportComparison  # these load the calculator
    from goodput.read.simulations import SimulatedRun
    from services.api.replies.goodput import GoodputReply, SimulationPage

    _, schemas = msgspec.json.schema_components(
        (*_TYPES, GoodputReply, SimulatedRun, SimulationPage, ReportComparison), ref_template=_REF_TEMPLATE
    )
    return schemas


def finish(description: dict[str, Any], roles: Callable[[str, str], Collection[str]]) -> dict[str, Any]:
    """Complete FastAPI's description. `roles(method, path template)` returns who may use a route; empty: public."""
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # our errors are problems instead
        schemas.pop(name, None)
    schemas |= {**components(), "Problem": _PROBLEM}
    description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    examples = Examples(schemas)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            for part in (operation.get("requestBody", {}), *operation["responses"].values()):
                examples.add(part.get("content", {}).get("application/json", {}))
            operation["responses"]["default"] = {
                "description": "The cause and the next step",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }
            allowed = sorted(roles(method.upper(), path))
            if method in ("post", "delete") and "operator" in allowed:
                operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
            operation["security"] = [{"token": []}] if allowed else []
            operation["x-flyball-roles"] = allowed
    return cast("dict[str, Any]", _portable(description))


_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A repetition within a day, by an operator with the same key, gets the first answer.",
    "schema": {"type": "string", "maxLength": 255, "pattern": "^[ -~]*$"},
}
_PROBLEM = {
    "title": "Problem",
    "description": "RFC 9457.",
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "hint": {"type": "string"},
        "errors": {
            "type": "array",
            "description": "The parts of the request that are wrong, if they are known",
            "items": {"$ref": "#/components/schemas/FieldError"},
        },
        "server_time": {
            "type": "number",
            "description": "With code wrong_clock: the supervisor's time, in seconds since 1970",
        },
    },
    "required": ["type", "title", "status", "detail", "code", "hint"],
}


def _portable(node: Any) -> Any:  # noqa: ANN401 - JSON
    """Translate patterns to the dialect of JSON Schema, whose `$` matches what Python's `\\Z` does."""
    if isinstance(node, dict):
        return {
            key: value.replace(r"\Z", "$") if key == "pattern" and isinstance(value, str) else _portable(value)
            for key, value in node.items()
        }
    return [_portable(item) for item in node] if isinstance(node, list) else node


def _schema(kind: object) -> dict[str, Any]:
    if isinstance(kind, tuple):
        return {"anyOf": [_schema(one) for one in kind]}
    if isinstance(kind, str):
        return {"$ref": _REF_TEMPLATE.format(name=kind)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):  # its schema takes a while, and nobody asked yet
        return {"$ref": _REF_TEMPLATE.format(name=kind.__name__)}
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REF_TEMPLATE)
    return schema
