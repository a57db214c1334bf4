"""The OpenAPI document, and the reference that is made of it: complete, readable, with valid examples."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from services.api.auth import ACCESS
from services.api.description.examples import Examples
from services.api.description.reference import markdown, reference
from services.describe_api import document, json_text

WITHOUT_SCHEMA = {"/v1/stream", "/metrics"}  # no JSON


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(document()))  # as the clients get it
    return found


def operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, one) for path, all_of in described["paths"].items() for method, one in all_of.items()]


def test_the_documents_have_every_route(described: dict[str, Any]) -> None:
    routes = {(method, path) for method, path in ACCESS if path.startswith("/v1/") or path in WITHOUT_SCHEMA}
    assert len(routes) > 40, "the test looks at the routes"
    written = json.loads(json_text(described))
    assert routes <= {(method.upper(), path) for method, path, _ in operations(written)}
    page = markdown(reference(described))
    headings = re.findall(r"^### (\w+)\n\n`([A-Z]+) (\S+)` \(", page, re.MULTILINE)
    assert headings and sorted(headings) == sorted(
        (one["operationId"], method.upper(), path) for method, path, one in operations(described)
    )


def test_every_link_of_the_reference_leads_to_a_heading(described: dict[str, Any]) -> None:
    """mkdocs checks them too, but only where the site is built."""
    page = markdown(reference(described))
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^##+ (.+)$", page, re.MULTILINE)}
    links = set(re.findall(r"\]\(([^)]*)\)", page))
    assert len(links) > 100 and links <= {f"#{anchor}" for anchor in anchors}
    assert set(map(str.lower, described["components"]["schemas"])) <= anchors


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
