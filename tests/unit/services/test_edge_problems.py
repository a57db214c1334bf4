"""Errors as problem responses."""

from __future__ import annotations

import json

from flyball.contracts.errors import ConfigurationError, TooBusy
from services.api.problems import problem_of


def test_a_database_that_refuses_the_service_is_not_the_senders_fault() -> None:
    response = problem_of(ConfigurationError("The database server refused.", hint="check the password"))
    assert response.status_code == 503
    assert json.loads(response.body)["code"] == "configuration"


def test_who_comes_too_soon_learns_when_to_come_back() -> None:
    response = problem_of(TooBusy("Full.", retry_after_s=1.2))
    assert (response.status_code, response.headers["Retry-After"]) == (429, "2")
