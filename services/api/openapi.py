"""Contract types in the OpenAPI description, which FastAPI would only know of pydantic models."""

from __future__ import annotations

from typing import Any

import msgspec

from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.events import Event
from flyball.contracts.signals import Report, ReportReply

_REF_TEMPLATE = "#/components/schemas/{name}"
_TYPES = (Report, ReportReply, CommandBatch, CommandUpdate, JobSpec, Event)


def body_of(kind: object) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is of this type."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(kind)}}}}


def reply_of(kind: object) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is of this type."""
    return {200: {"description": "Success", "content": {"application/json": {"schema": _schema(kind)}}}}


def components() -> dict[str, Any]:
    """All contract types that routes speak of, for `components.schemas`."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF_TEMPLATE)
    return schemas


def _schema(kind: object) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REF_TEMPLATE)
    return schema
