"""One meaning for what goes wrong between a client and a supervisor, for the daemon and the command line alike."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from flyball.contracts.errors import Conflict, FlyballError, NotFound, TooBusy, WrongClock
from flyball.http_errors import Problem, connection_error, problem_of, reply_error

HINT = "look there"


def reply(status: int, body: object = b"", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return httpx.Response(status, content=content, headers=headers)


@pytest.mark.parametrize(
    ("code", "kind"), [("conflict", Conflict), ("not_found", NotFound), ("of a later release", FlyballError)]
)
def test_a_problem_becomes_the_error_of_its_code(code: str, kind: type[FlyballError]) -> None:
    response = reply(409, {"title": "t", "detail": "Another.", "code": code, "hint": HINT})
    problem = problem_of(response)
    assert problem is not None
    error = reply_error(problem, response)
    assert (type(error), error.message, error.hint) == (kind, "Another.", HINT)


def test_a_wrong_clock_carries_the_supervisors_time() -> None:
    error = reply_error(Problem("No.", "wrong_clock", HINT, 12.5), reply(422))
    assert isinstance(error, WrongClock) and error.server_time == 12.5


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [({}, 1.0), ({"Retry-After": "7"}, 7.0), ({"Retry-After": "Wed, 21 Oct"}, 1.0), ({"Retry-After": "900"}, 30.0)],
)
def test_a_busy_supervisor_says_when_to_come_back(headers: dict[str, str], expected_s: float) -> None:
    error = reply_error(Problem("Full.", "too_busy"), httpx.Response(429, headers=headers))
    assert isinstance(error, TooBusy) and error.retry_after_s == expected_s


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"code": "conflict"}', b'{"detail": 3}'])
def test_what_is_not_a_supervisors_is_no_problem(body: bytes) -> None:
    assert problem_of(reply(502, body)) is None


@pytest.mark.parametrize(
    ("url", "error", "message", "hint"),
    [
        ("http://a:1", httpx.ReadTimeout("slow"), "did not answer in time", HINT),
        ("http://a:1", httpx.ConnectError("Connection refused."), "cannot be reached: Connection refused.", HINT),
        ("http://a:1", httpx.ReadError(""), "cannot be reached: ReadError.", HINT),
        ("https://a:1", httpx.ReadError(""), "ended the connection", "client certificates"),
    ],
)
def test_a_connection_that_fails(url: str, error: httpx.HTTPError, message: str, hint: str) -> None:
    found = connection_error(url, error, hint=HINT)
    assert url in found.message and message in found.message and hint in found.hint
