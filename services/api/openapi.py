"""Completes FastAPI's OpenAPI description: contract types, problem details for every error, the roles of each route."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import msgspec

from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.events import Event
from flyball.contracts.reports.drains import Departure, DrainRequest
from flyball.contracts.reports.rank_logs import LogPiece
from flyball.contracts.reports.signals import Report, ReportReply
from services.runtime.http.problem_details import MEDIA_TYPE

_REF_TEMPLATE = "#/components/schemas/{name}"
_TYPES = (Report, ReportReply, CommandBatch, CommandUpdate, Departure, DrainRequest, JobSpec, Event, LogPiece)


def body_of(kind: object) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body has this type."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(kind)}}}}


def reply_of(kind: object) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route whose response has this type."""
    return {200: {"description": "Success", "content": {"application/json": {"schema": _schema(kind)}}}}


def media_of(media_type: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that answers with this media type and these statuses."""
    return {status: {"description": "Success", "content": {media_type: {}}} for status in statuses}


def components() -> dict[str, Any]:
    """Return the schemas of all contract types in bodies and responses, for `components.schemas`."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF_TEMPLATE)
    return schemas


def finish(description: dict[str, Any], roles: Callable[[str, str], Collection[str]]) -> dict[str, Any]:
    """Complete FastAPI's description. `roles(method, path template)` returns who may use a route; empty: public."""
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # our errors are problems instead
        schemas.pop(name, None)
    schemas |= {**components(), "Problem": _PROBLEM}
    description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "The cause and the next step",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }
            allowed = sorted(roles(method.upper(), path))
            operation["security"] = [{"token": []}] if allowed else []
            operation["x-flyball-roles"] = allowed
    return cast("dict[str, Any]", _portable(description))


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
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REF_TEMPLATE)
    return schema
