"""The OpenAPI document: complete, readable, with valid examples, and the same as in the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from services.api.description.examples import Examples
from services.api.description.reference import markdown, reference
from services.describe_api import document, json_text

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference"
REGENERATE = "python -m services.describe_api > docs/reference/api.md, and --json > docs/reference/openapi.json"
WITHOUT_SCHEMA = {"/v1/stream", "/metrics"}  # no JSON


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(document()))  # as the clients get it
    return found


def operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, one) for path, all_of in described["paths"].items() for method, one in all_of.items()]


def test_the_documents_in_the_repository_are_current(described: dict[str, Any]) -> None:
    assert (DOCS / "openapi.json").read_text() == json_text(described), REGENERATE
    assert (DOCS / "api.md").read_text() == markdown(reference(described)), REGENERATE


def test_every_operation_has_a_schema_and_a_readable_name(described: dict[str, Any]) -> None:
    names = []
    for method, path, one in operations(described):
        names.append(one["operationId"])
        replies = [reply for status, reply in one["responses"].items() if status[0] == "2" and status != "204"]
        for reply in replies if path not in WITHOUT_SCHEMA else ():
            media = reply["content"]["application/json"]
            assert media["schema"], (method, path)
            assert "example" in media, (method, path)
        assert one["description"], (method, path)
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[a-z]+([A-Z][a-z]+)*", name)] == []
    assert {"listJobs", "getJob", "listIncidents", "drainHost", "getHealth"} <= set(names)


def test_every_parameter_has_a_description(described: dict[str, Any]) -> None:
    bare = [
        (path, one["name"])
        for _, path, operation in operations(described)
        for one in operation.get("parameters", ())
        if not one.get("description")
    ]
    assert bare == []


def test_the_examples_are_valid(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    examples = Examples(schemas)
    for schema in schemas.values():
        jsonschema_rs.validate(schema | {"components": {"schemas": schemas}}, examples.of(schema))
