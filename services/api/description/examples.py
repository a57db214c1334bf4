"""Builds an example of a schema from the examples of its fields. Pure."""

from __future__ import annotations

from typing import Any, cast

Json = dict[str, Any]
_REF = "#/components/schemas/"
MAX_DEPTH = 12
_BY_NAME: Json = {  # for texts whose schema has no example
    **{"job": "gpt", "workdir": "/home/me/gpt", "argv": "train.py"},
    **{"host_id": "host-a", "peer": "host-b", "source": "host-a", "source_host": "host-b", "host": "host-a"},
    **{"address": "10.0.0.11", "engine_address": "10.0.0.11:7371", "master_address": "10.0.0.11"},
    **{"failure_domain": "rack-1", "transport": "tcp", "reason": "maintenance", "message": "GPU 3 reported XID 48"},
    **{"incarnation": "5f0c2d7e", "daemon_version": "0.1.0", "digest": "9f0c", "kind": "xid", "target": "inc-4"},
    **{"command_id": "act-3f9a01c2-17.stop.host-a.1", "action_id": "act-17", "request_id": "log-1"},
    **{"incident_id": "inc-4", "decision_id": "dec-17", "cause": "worker_killed", "code": "not_found"},
    **{"place": "query", "field": "limit", "detail": "no such parameter"},
    **{"hosts": "host-a", "witnesses": "host-b", "heard_by": "host-b", "unreachable_peers": "host-b"},
    **{"signals": "worker_exited", "decision_ids": "dec-17", "note": ""},
}
_USUAL = ("restart_in_place", "resolved", "running", "healthy", "succeeded", "memory", "standing", "cordon", "critical")
_NUMBERS_BY_NAME: Json = {"exit_code": 1, "signal_number": 9}
_PLAIN: Json = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "null": None}


class Examples:
    """Examples for the schemas of one OpenAPI document."""

    def __init__(self, schemas: Json) -> None:
        self._schemas = schemas

    def add(self, media: Json) -> None:
        """Add an example to the description of a body that has a schema."""
        if media.get("schema"):
            media["example"] = self.of(media["schema"])

    def of(self, schema: Json, depth: int = 0, name: str = "") -> Any:  # noqa: ANN401 - JSON
        """Return a value of this schema: the first example, default, enumerated value or alternative. `name`: of the
        field that it is for."""
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].removeprefix(_REF)], depth, name)
        if given := _given(schema):
            return given[0]
        if alternatives := schema.get("anyOf"):
            return self.of(_simplest(alternatives) if depth > MAX_DEPTH else alternatives[0], depth + 1, name)
        kind = schema.get("type")
        if kind == "object":
            wanted = schema.get("required", ())
            return {
                field: self.of(part, depth + 1, field)
                for field, part in schema.get("properties", {}).items()
                if field in wanted
            }
        if kind == "array":
            return self._array(schema, depth, name)
        return _scalar(schema, cast("str", kind), name)

    def _array(self, schema: Json, depth: int, name: str) -> list[Any]:
        if "prefixItems" in schema:
            return [self.of(part, depth + 1, name) for part in schema["prefixItems"]]
        items = schema.get("items")
        if not items or depth > MAX_DEPTH or "anyOf" in items:
            return []
        if items.get("type") == "string" and "examples" not in items and name not in _BY_NAME:
            return []
        return [self.of(items, depth + 1, name)]


def _given(schema: Json) -> list[Any]:
    """Return the values that the schema itself names, the best first."""
    usual = [word for word in _USUAL if word in schema.get("enum", ())]
    fixed = [schema[key] for key in ("default", "const") if key in schema]
    return [*schema.get("examples", ()), *usual, *schema.get("enum", ()), *fixed]


def _simplest(alternatives: list[Json]) -> Json:
    return next((one for one in alternatives if one.get("type") == "null"), alternatives[0])


def _scalar(schema: Json, kind: str, name: str) -> Any:  # noqa: ANN401 - JSON
    if kind == "string":
        return _BY_NAME.get(name, "")
    if kind in ("integer", "number"):
        if name in _NUMBERS_BY_NAME:
            return _NUMBERS_BY_NAME[name]
        return schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    return _PLAIN.get(kind)
