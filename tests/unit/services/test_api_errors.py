"""Errors that name the part of a request that is wrong, and unknown parameters."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.wire import decode
from services.api.problems import problem_of
from services.api.strict_route import check_names
from services.runtime.http.problem_details import FieldError, InvalidFields

KNOWN = ["limit", "before", "state", "job"]


def problem(error: InvalidMessage) -> dict[str, Any]:
    response = problem_of(error)
    found: dict[str, Any] = json.loads(response.body)
    assert found["status"] == response.status_code
    return found


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("stat", "did you mean 'state'? "),
        ("Limit", "did you mean 'limit'? "),
        ("xyz", "this route has: "),
        ("", "this"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(InvalidFields) as refused:
        check_names(["job", name], KNOWN)
    found = problem(refused.value)
    assert (found["status"], found["code"]) == (422, "invalid_request")
    assert found["hint"].startswith(hint)
    assert found["errors"] == [{"place": "query", "field": name, "detail": "no such parameter"}]


def test_known_parameters_pass_and_a_flood_of_unknown_ones_has_a_bound() -> None:
    check_names(["job", "job", "limit"], KNOWN)
    with pytest.raises(InvalidFields) as refused:
        check_names([f"x{number}" * 1000 for number in range(500)], [])
    assert len(problem(refused.value)["errors"]) == 10
    assert len(problem_of(refused.value).body) < 10_000
    assert refused.value.hint == "this route has no query parameters"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"job": "a", "workdir": "/"}, "argv"),
        ({"job": "a", "argv": ["x"], "workdir": "/", "nnode": 2}, "nnode"),
        ({"job": "a", "argv": ["x"], "workdir": "/", "nnodes": "2"}, "nnodes"),
        ({"job": "a", "argv": ["x", 3], "workdir": "/"}, "argv[1]"),
        ({"job": "a", "argv": ["x"], "workdir": "/", "checkpoint": {"every_steps": -1}}, "checkpoint.every_steps"),
        ({"job": "a", "argv": ["x"], "workdir": "/", "checkpoint": {"every": 1}}, "checkpoint.every"),
        ([], ""),
    ],
)
def test_a_wrong_body_names_the_field(body: object, field: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        decode(msgspec.json.encode(body), JobSpec)
    (found,) = problem(refused.value)["errors"]
    assert (found["place"], found["field"]) == ("body", field)
    assert found["detail"]


def test_malformed_json_names_no_field() -> None:
    with pytest.raises(InvalidMessage) as refused:
        decode(b"{", JobSpec)
    assert "errors" not in problem(refused.value)


def test_several_wrong_parts_are_all_in_the_message() -> None:
    error = InvalidFields([FieldError("query", "limit", "too large"), FieldError("body", "", "empty")], hint="")
    assert error.message == "query limit: too large; body: empty."
