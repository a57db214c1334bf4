"""Checks every reply of a supervisor against the OpenAPI document, strictly: no field may be missing in either."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import httpx
import jsonschema_rs

from services import describe_api

Json = dict[str, Any]


def strict(node: Any) -> Any:  # noqa: ANN401 - JSON
    """A schema without room for fields that it does not name."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items()}
    if "properties" in found and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


@cache
def _description() -> Json:
    """Every supervisor with all parts has the same one, and takes a while to make it."""
    return describe_api.document()


class DescribedReplies:
    """A hook for httpx's responses."""

    def __init__(self) -> None:
        description = _description()
        self._schemas = {"schemas": strict(description["components"]["schemas"])}
        self._paths = [
            (re.compile(re.sub(r"{\w+}", "[^/]+", path)), methods) for path, methods in description["paths"].items()
        ]
        self.checked: set[str] = set()  # operation ids

    def __call__(self, response: httpx.Response) -> None:
        media_type = response.headers.get("content-type", "")
        if not media_type.endswith("json"):
            return
        operation = self._operation(response.request)
        if operation is None:
            return
        response.read()
        part = operation["responses"].get(str(response.status_code)) or operation["responses"]["default"]
        schema = part["content"][media_type]["schema"] | {"components": self._schemas}
        errors = list(jsonschema_rs.iter_errors(schema, json.loads(response.content)))
        assert not errors, f"{response.request.method} {response.request.url}: {errors[0]}"
        if response.is_success:
            self.checked.add(operation["operationId"])

    def _operation(self, request: httpx.Request) -> Json | None:
        for pattern, methods in self._paths:
            if pattern.fullmatch(request.url.path) and request.method.lower() in methods:
                found: Json = methods[request.method.lower()]
                return found
        return None
