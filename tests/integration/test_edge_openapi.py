"""The whole OpenAPI document, tried with generated requests on a real supervisor: no 5xx, responses as described."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.servers.here import bearer, supervisor_in

from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import host_credential, reader_token
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.wire import WIRE_VERSION
from services.actuator.backends import host_daemons
from services.api.auth import ACCESS
from services.main import Supervisor

EXAMPLES = 8  # examples of valid and of invalid data, per operation
EXAMPLES_OF_REPORTS = 6  # they are large
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
STREAM = "/v1/stream"  # has no end: see below
TIMEOUT_S = 120.0
CLOCK = SystemClock()
SENSORS_OWN = ("host_silent", "host_suspect", "host_returned", "rank_stalled")
WHO = [*["entitled"] * 5, "operator", "daemon", "reader", "wrong", ""]


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with supervisor_in(tmp_path_factory.mktemp("supervisor") / "state") as supervisor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_daemons, "FIRST_LOOK_S", TIMEOUT_S)  # beyond that, a poll is refused with a 5xx
            yield supervisor
        metrics = httpx.get(f"{supervisor.url}/metrics", timeout=TIMEOUT_S).text
    assert "flyball_reports_dropped_total 0.0" in metrics, "what was accepted was also stored"
    restarts = [line for line in metrics.splitlines() if line.startswith("flyball_loop_restarts_total{")]
    assert restarts and all(line.endswith(" 0.0") for line in restarts), "and nothing crashed over it"


@pytest.fixture(scope="module")
def description(supervisor: Supervisor) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(
        f"{supervisor.url}/openapi.json", headers=bearer(supervisor.token), timeout=TIMEOUT_S
    ).json()
    return found


@pytest.fixture(scope="module")
def schema(description: dict[str, Any]) -> BaseSchema:
    return schemathesis.openapi.from_dict(description)


def host_of(case: Case) -> str:
    """The host that a request is about, if a token can be made for it."""
    named = (case.path_parameters or {}).get("host_id", "")
    body = case.body if isinstance(case.body, dict) else {}
    facts = body.get("facts")
    reported = facts.get("host_id") if isinstance(facts, dict) else body.get("host_id")
    return next((str(name) for name in (named, reported) if name and str(name).isascii()), "host-a")[:63]


def made_plausible(node: Any, host_id: str) -> Any:  # noqa: ANN401 - JSON
    """A report that its sensor accepts: current, of this release, of one host, with signals in order."""
    if isinstance(node, list):
        return [made_plausible(item, host_id) for item in node]
    if isinstance(node, float) and node.is_integer():
        return int(node)  # to JSON Schema 1.0 is an integer
    if not isinstance(node, dict):
        return node
    now = CLOCK.wall_s()
    node = {key: made_plausible(value, host_id) for key, value in node.items()}
    if "completed_at" in node:
        node["completed_at"] = [[now for _ in times] for times in node["completed_at"]]
    node |= {key: now for key in node if key == "at" or (key.endswith("_at") and key != "completed_at")}
    node |= {key: host_id for key in node.keys() & {"source", "host_id"} if isinstance(node[key], str)}
    if "signals" in node:
        own = [s for s in node["signals"] if s["body"]["type"] not in SENSORS_OWN]
        node["signals"] = [signal | {"seq": number} for number, signal in enumerate(own, 1)]
    if "facts" in node:
        fit_columns(node, now)
    return node | ({"version": WIRE_VERSION} if "version" in node else {})


def fit_columns(report: dict[str, Any], now: float) -> None:
    """Make the columns of a report as long as its ranks, which a schema cannot express."""
    workers = list({(of["job"], of["generation"]): of for of in report.get("workers", [])}.values())
    progress_of = [*report.get("progress", []), *({"phases": [], "steps": [], "beacon_ages_s": []} for _ in workers)]
    progress = []
    for of, at in zip(workers, progress_of, strict=False):
        of["ranks"] = list(dict.fromkeys(of["ranks"]))
        count = len(of["ranks"])
        of["pids"] = filled(of["pids"], 1, count)
        columns = {"steps": filled(at["steps"], 5, count), "beacon_ages_s": filled(at["beacon_ages_s"], 0.5, count)}
        progress.append(columns | {"phases": filled(at["phases"], 2, 1 if len(at["phases"]) < count else count)})
    for steps in report.get("completed", []):
        steps["ranks"] = list(dict.fromkeys(steps["ranks"]))
        steps["completed_at"] = [filled(times, now, len(steps["ranks"])) for times in steps["completed_at"]]
    report |= {"workers": workers, "progress": progress}


def filled(column: list[Any], value: float, count: int) -> list[Any]:
    return [*column, *[value] * count][:count]


PUBLIC = ("/healthz", "/readyz", "/metrics")
OPERATIONS = sorted((m, p) for m, p in ACCESS if p in PUBLIC or (p.startswith("/v1") and p != STREAM))


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=str)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_is_answered_with_a_server_error(
    supervisor: Supervisor,
    description: dict[str, Any],
    schema: BaseSchema,
    method: str,
    path: str,
    mode: GenerationMode,
) -> None:
    operation = schema[path][method]
    operator = supervisor.token
    examples = EXAMPLES_OF_REPORTS if path == "/v1/reports" else EXAMPLES
    # On a busy machine a supervisor may not be ready, and answers 503.
    checks = [check for check in CHECKS if path != "/readyz" or check is not not_a_server_error]

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(case=operation.as_strategy(generation_mode=mode), who=st.sampled_from(WHO))
    def attempt(case: Case, who: str) -> None:
        if mode is GenerationMode.POSITIVE and path.endswith("/commands"):
            case.query["wait_s"] = 0  # no request should wait for commands here
        if mode is GenerationMode.POSITIVE and path == "/v1/reports":
            case.body = made_plausible(case.body, "host-a")
        daemon = host_credential(operator, host_of(case)).token
        roles = description["paths"][path][method.lower()]["x-flyball-roles"]
        tokens = {"operator": operator, "daemon": daemon, "reader": reader_token(operator), "wrong": "wrong", "": ""}
        token = tokens.get(who, daemon if "daemon" in roles else operator)
        case.call_and_validate(
            base_url=supervisor.url, headers=bearer(token) if token else {}, checks=checks, timeout=TIMEOUT_S
        )

    try:
        attempt()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "an operation without parameters cannot be misused"


@pytest.mark.parametrize(
    "query",
    ["", "job=x", "job=%00", "after=-1", "after=99999999999999999999", "kind=signal&kind=step", "kind=x", "job="],
)
def test_the_stream_opens_or_describes_the_error(supervisor: Supervisor, query: str) -> None:
    with (
        httpx.Client(headers=bearer(supervisor.token), timeout=TIMEOUT_S) as client,
        client.stream("GET", f"{supervisor.url}{STREAM}?{query}") as answer,
    ):
        assert answer.status_code in (200, 422)
        if answer.status_code == 200:
            lines = answer.iter_lines()
            assert next(lines).startswith("retry:")


def test_the_description_lists_the_roles(description: dict[str, Any]) -> None:
    assert description["paths"]["/v1/reports"]["post"]["x-flyball-roles"] == ["daemon"]
    assert description["paths"]["/healthz"]["get"]["security"] == []
    assert {path for path in description["paths"] if path.startswith("/v1")} == {
        path for _, path in ACCESS if path.startswith("/v1")
    }
    assert r"\Z" not in str(description)
    assert NAME_PATTERN in json.dumps(description)


def test_every_type_that_the_description_names_is_in_it(description: dict[str, Any]) -> None:
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(description)))
    assert "HostStanding" in named
    assert named <= description["components"]["schemas"].keys()
