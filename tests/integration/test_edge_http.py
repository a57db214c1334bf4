"""A real supervisor on a free port, used by daemons, users and strangers."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.clocks.waits import until
from support.hosts.reports import report as made_report
from support.servers.described_replies import DescribedReplies
from support.servers.here import bearer, supervisor_in
from support.servers.here import client_of as undescribed_client_of

from flyball.cli.main import run_cli
from flyball.contracts.checkpoints import PeerTransport, SaveInterval
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobSpec, Phase
from flyball.contracts.credentials import host_credential, reader_token
from flyball.contracts.errors import ConfigurationError, PortInUse, StateVersionMismatch
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, Workers
from flyball.contracts.reports.signals import EngineRestarted, EngineStatus, Report, Signal, WorkerExited
from flyball.contracts.wire import MAX_MESSAGE_BYTES, WIRE_VERSION, encode
from services import assembly
from services.actuator.backends import host_daemons
from services.dashboard import recovery_pages, training_pages
from services.dashboard.sessions import MAX_FORM_BYTES
from services.main import Supervisor
from services.runtime.http import http_server

CLOCK = SystemClock()
DEADLINE_S = 300.0
PUBLIC = {"/healthz", "/readyz", "/metrics"}


@pytest.fixture(scope="module", autouse=True)
def long_timeouts() -> Iterator[None]:
    """On a busy machine a supervisor still starts, answers waiting requests, and drains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_daemons, "FIRST_LOOK_S", DEADLINE_S)
        patch.setattr(http_server, "GRACE_S", int(DEADLINE_S))
        yield


def patient(state_dir: Path, **settings: object) -> AbstractContextManager[Supervisor]:
    return supervisor_in(state_dir, **{"start_timeout_s": DEADLINE_S, "drain_timeout_s": DEADLINE_S} | settings)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    with ExitStack() as running:
        yield lambda **given: running.enter_context(patient(**{"state_dir": tmp_path / "supervisor"} | given))


@pytest.fixture
def supervisor(start: Callable[..., Supervisor]) -> Supervisor:
    return start()


@pytest.fixture
def client(supervisor: Supervisor) -> Iterator[httpx.Client]:
    with client_of(supervisor) as client:
        yield client


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """A supervisor for tests that leave nothing in it: it knows no host and no job."""
    with patient(tmp_path_factory.mktemp("empty") / "supervisor") as supervisor:
        yield supervisor


@pytest.fixture
def refused(empty: Supervisor) -> Iterator[httpx.Client]:
    """A client of `empty`. What it asks for must leave nothing."""
    with client_of(empty) as client:
        yield client
        assert items(client, "/v1/hosts") == items(client, "/v1/jobs") == []


def client_of(supervisor: Supervisor) -> httpx.Client:
    """A client that compares each reply with what the API's description says of it."""
    return undescribed_client_of(supervisor, event_hooks={"response": [DescribedReplies()]})


def report(host_id: str = "host-a", **parts: Any) -> Report:  # noqa: ANN401 - fields of Report
    """No host is declared silent while a test is held up."""
    sent = {"sent_at": CLOCK.wall_s(), "interval_s": 60.0, "incarnation": f"inc-{host_id}"}
    return made_report(host_id, **sent | parts)


def as_host(client: httpx.Client, host_id: str = "host-a") -> dict[str, str]:
    """The headers of a host's daemon, for use with the operator's client."""
    secret = client.headers["Authorization"].removeprefix("Bearer ")
    return bearer(secret, host_id)


def send(client: httpx.Client, message: Report) -> httpx.Response:
    return client.post("/v1/reports", content=encode(message), headers=as_host(client, message.facts.host_id))


def items(client: httpx.Client, path: str, **query: str) -> list[dict[str, Any]]:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


SPEC = JobSpec(job="demo", argv=("train.py", "--name", "<img src=x onerror=alert(1)>"), workdir="/tmp")


def answer_commands(client: httpx.Client, host_id: str = "host-a") -> list[dict[str, Any]]:
    """Take the next commands like a daemon, and answer that they succeeded."""
    query = {"incarnation": f"inc-{host_id}", "wait_s": 10}
    answer = client.get(f"/v1/hosts/{host_id}/commands", params=query, headers=as_host(client, host_id))
    assert answer.status_code == 200, answer.text
    commands: list[dict[str, Any]] = answer.json()["commands"]
    for command in commands:
        update = {
            "command_id": command["command_id"],
            "host_id": host_id,
            "incarnation": f"inc-{host_id}",
            "state": "succeeded",
            "at": CLOCK.wall_s(),
            "result": {"positions": [{"rank": 0, "step": 3}], "free_port": 29_501},
        }
        assert (
            client.post(f"/v1/hosts/{host_id}/updates", json=update, headers=as_host(client, host_id)).status_code
            == 204
        )
    return commands


def test_a_worker_dies_and_the_whole_way_is_visible(client: httpx.Client) -> None:
    assert send(client, report()).status_code == 200
    until(lambda: items(client, "/v1/hosts"), "the host is known")
    assert client.post("/v1/jobs", content=encode(SPEC)).status_code == 201
    assert client.post("/v1/jobs", content=encode(SPEC)).status_code == 200
    other = msgspec.structs.replace(SPEC, workdir="/elsewhere")
    conflict = client.post("/v1/jobs", content=encode(other))
    assert (conflict.status_code, conflict.json()["code"]) == (409, "conflict")

    started = until(lambda: answer_commands(client), "the start command")
    assert [c["body"]["type"] for c in started] == ["start_workers"]
    generation = started[0]["body"]["placement"]["generation"]
    now = CLOCK.wall_s()
    apart = SaveInterval("demo", generation, 1, 8, 1.5, 0.25)
    trained = report(
        engine=EngineStatus(
            alive=True,
            intervals=(msgspec.structs.replace(apart, generation=0, every_steps=2), apart),
            transports=(PeerTransport("host-b", "tcp", "host-b: There is no RDMA device"),),
        ),
        workers=(Workers("demo", generation, (0,), (9,)),),
        progress=(RankProgress((Phase.STEP,), (3,), (0.1,)),),
        completed=(CompletedSteps("demo", generation, (0,), 0, ((now - 3,), (now - 2,), (now - 1,), (now,))),),
    )
    assert send(client, trained).status_code == 200
    until(lambda: client.get("/v1/jobs/demo").json()["newest_step"] == 3, "the step is known")
    interval = {"wanted_steps": 1, "every_steps": 8, "save_s": 1.5, "step_s": 0.25}
    until(lambda: client.get("/v1/jobs/demo").json()["save_interval"] == interval, "how often is saved is known")
    (host,) = items(client, "/v1/hosts")
    shown = {"peer": "host-b", "transport": "tcp", "reason": "host-b: There is no RDMA device"}
    assert host["transports"] == [shown]

    death = Signal(
        source="host-a",
        incarnation="inc-host-a",
        seq=1,
        at=CLOCK.wall_s(),
        body=WorkerExited(
            job="demo", generation=generation, rank=0, pid=9, exit_code=None, signal_number=9, last_step=3
        ),
    )
    assert send(client, report(signals=(death,))).status_code == 200
    stop = until(lambda: answer_commands(client), "the stop command")
    assert [c["body"]["type"] for c in stop] == ["stop_workers"]

    incident = items(client, "/v1/incidents", job="demo")[0]
    assert incident["cause"] == "worker_killed"
    decision = client.get(f"/v1/decisions/{incident['decision_ids'][0]}").json()
    assert decision["kind"] == "restart_in_place"
    assert decision["signals"][0]["kind"] == "worker_exited"
    assert decision["action"]["commands"][0]["host_id"] == "host-a"
    story = client.get(f"/v1/incidents/{incident['incident_id']}").json()
    assert story["decided"][0]["decision_id"] == decision["decision_id"]
    assert {line["part"] for line in story["story"]} >= {"signal", "state", "decision", "alternative", "action"}
    (restart,) = items(client, "/v1/actions", incident=incident["incident_id"])
    commands = client.get(f"/v1/actions/{restart['action_id']}").json()["commands"]
    assert commands[0]["command_id"] == decision["action"]["commands"][0]["command_id"], "others may follow meanwhile"
    assert [one["kind"] for one in items(client, "/v1/signals", job="demo")] == ["worker_exited"]
    assert items(client, "/v1/incidents", cause="host_silent") == []
    assert items(client, "/v1/jobs", state="failed") == []
    until(
        lambda: send(client, report(signals=(death,))).json()["committed"].get("inc-host-a") == 1,
        "the daemon may forget the signal",
    )
    assert len(items(client, "/v1/incidents", job="demo")) == 1, "a repeated signal changes nothing"
    assert client.get("/v1/goodput", params={"job": "demo"}).json()["job"] == "demo"
    assert client.get("/v1/checkpoints", params={"job": "demo"}).json()["recovery_point"] == -1
    counted = 'flyball_decisions_total{kind="restart_in_place"} 1.0'
    until(lambda: counted in client.get("/metrics").text, "the metric")
    assert client.post("/v1/jobs/demo/stop").status_code == 202
    assert {"getJob", "listHosts", "listIncidents", "getDecision", "getGoodput", "getCheckpoints", "stopJob"} <= (
        client.event_hooks["response"][0].checked
    ), "these replies were as described"


QUICK_DETECTOR = {"silence": {"min_deadline_s": 0.2, "expected_deadline_s": 0.2, "correlated_factor": 3.0}}


def test_a_host_that_stops_reporting_is_found_even_by_a_sensor_that_it_never_reported_to(
    start: Callable[..., Supervisor],
) -> None:
    first = start()
    with client_of(first) as client:
        send(client, report())
        until(lambda: items(client, "/v1/hosts"), "the host is known")
        client.post("/v1/jobs", content=encode(SPEC))
        until(lambda: answer_commands(client), "the host has ranks")
    first.stop()
    with client_of(start(detector=QUICK_DETECTOR)) as client:
        found = until(lambda: items(client, "/v1/incidents", job="demo"), "the incident")
        assert (found[0]["cause"], found[0]["host_id"]) == ("host_silent", "host-a")
        signals = items(client, "/v1/events", job="demo", kind="signal")
        assert signals[-1]["event"]["data"]["source"].startswith("sensor.")


def test_commands_are_kept_for_a_daemon_that_left_its_poll(client: httpx.Client) -> None:
    send(client, report())
    until(lambda: items(client, "/v1/hosts"), "the host is known")
    url = client.base_url
    head = f"GET /v1/hosts/host-a/commands?incarnation=inc-host-a&wait_s=60 HTTP/1.1\r\nHost: {url.host}\r\n"
    with socket.create_connection((url.host, url.port or 0), DEADLINE_S) as daemon:
        daemon.sendall(f"{head}Authorization: {as_host(client)['Authorization']}\r\n\r\n".encode())
        until(lambda: "flyball_waiting_polls 1.0" in client.get("/metrics").text, "the poll waits")
        daemon.shutdown(socket.SHUT_WR)
        assert daemon.recv(1) == b"", "the server has seen that the daemon left"
    client.post("/v1/jobs", content=encode(SPEC))
    until(lambda: items(client, "/v1/decisions", job="demo"), "the decision to start")
    started = until(lambda: answer_commands(client), "the start command")
    assert [c["body"]["type"] for c in started] == ["start_workers"]
    assert "flyball_commands_handed_out_total 1.0" in client.get("/metrics").text, "not to the dead connection too"


def test_nothing_but_health_answers_without_the_right_token(empty: Supervisor, refused: httpx.Client) -> None:
    paths: dict[str, dict[str, Any]] = refused.get("/openapi.json").json()["paths"]
    assert {"/v1/reports", "/v1/jobs", "/v1/stream", "/v1/hosts/{host_id}/commands"} < paths.keys()
    tried = 0
    stranger = httpx.Client(base_url=empty.url, timeout=DEADLINE_S)
    for path, methods in [*paths.items(), ("/openapi.json", {"get": {}}), ("/no/such/path", {"get": {}, "post": {}})]:
        for method in methods:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {empty.token}"}):
                answer = stranger.request(method, re.sub(r"{\w+}", "x", path), headers=headers)
                if path in PUBLIC:  # on a busy machine it may not be ready
                    assert answer.status_code in (200, 503)
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["www-authenticate"].startswith("Bearer")
                tried += 1
    stranger.close()
    assert tried > 40
    assert empty.token not in refused.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_message"),
        (b"{", 400, "invalid_message"),
        (b'{"version": 1}', 400, "invalid_message"),
        (b"[" * 100_000, 400, "invalid_message"),
        (b"\xff\xfe", 400, "invalid_message"),
        (encode(report(version=WIRE_VERSION + 1)), 400, "invalid_message"),
        (encode(report()).replace(b'"host-a"', b'"../../etc"'), 400, "invalid_message"),
        (b" " * (MAX_MESSAGE_BYTES + 1), 413, "body_too_large"),
    ],
)
def test_a_bad_report_is_refused_and_leaves_nothing(refused: httpx.Client, body: bytes, status: int, code: str) -> None:
    answer = refused.post("/v1/reports", content=body, headers=as_host(refused))
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]
    assert items(refused, "/v1/hosts") == []


def test_a_body_of_unknown_length_is_cut_off(refused: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 65_536

    with contextlib.suppress(httpx.WriteError):  # the server may close the connection before all of it was sent
        assert refused.post("/v1/reports", content=endless(), headers=as_host(refused)).status_code == 413
    assert items(refused, "/v1/hosts") == []


def test_a_daemon_acts_for_its_own_host_only(refused: httpx.Client) -> None:
    signal = Signal(
        source="host-b",
        incarnation="i",
        seq=1,
        at=0.0,
        body=WorkerExited(job="demo", generation=0, rank=0, pid=1, exit_code=1, signal_number=None, last_step=0),
    )
    answer = send(refused, report(signals=(signal,)))
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    update = {"command_id": "c", "host_id": "host-b", "incarnation": "i", "state": "failed", "at": 0.0}
    assert refused.post("/v1/hosts/host-a/updates", json=update, headers=as_host(refused)).status_code == 400
    assert refused.post("/v1/hosts/host-b/updates", json=update, headers=as_host(refused)).status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/no-such-thing", 404),
        ("GET", "/v1/jobs/none", 404),
        ("GET", "/v1/decisions/dec-999999999999999999", 404),
        ("POST", "/v1/jobs/none/stop", 404),
        ("GET", "/v1/goodput?job=none", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/decisions/first", 422),
        ("GET", "/v1/checkpoints", 422),
        ("GET", "/v1/jobs?stat=failed", 422),
        ("GET", "/v1/hosts?jobs=demo", 422),
        ("GET", "/v1/jobs/none?x=1", 422),
        ("GET", "/v1/incidents?=1", 422),
        ("GET", "/v1/events?Limit=1", 422),
        ("GET", "/v1/stream?jobs=demo", 422),
        ("POST", "/v1/jobs/none/stop?dry-run=true", 422),
        ("GET", "/v1/events?after=-1", 422),
        ("GET", "/v1/events?limit=1000000", 422),
        ("GET", "/v1/hosts/host-a/commands?incarnation=i", 403),
        ("GET", "/static/../templates/index.html", 404),
        ("GET", "/static/%2e%2e/pages.py", 404),
    ],
)
def test_every_refusal_is_a_problem_with_a_detail(refused: httpx.Client, method: str, path: str, status: int) -> None:
    answer = refused.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["type"] == f"urn:flyball:error:{problem['code']}"
    assert problem["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"argv": []},
        {"nnodes": 0},
        {"nproc_per_node": -1},
        {"nnodes": 100_000, "nproc_per_node": 100_000},
        {"job": "../x"},
        {"no_such_field": 1},
        {"hosts": ["host-a", "host-a"], "nnodes": 2},
    ],
)
def test_a_job_that_cannot_be_run_is_refused(refused: httpx.Client, wrong: dict[str, object]) -> None:
    spec = {"job": "demo", "argv": ["train.py"], "workdir": "/"} | wrong
    answer = refused.post("/v1/jobs", json=spec)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_message")
    assert items(refused, "/v1/jobs") == []


def test_a_full_queue_pushes_back_and_nothing_taken_is_lost(
    start: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MAX_QUEUED_REPORTS", 2)
    supervisor = start()
    database = sqlite3.connect(tmp_path / "supervisor" / "flyball.sqlite", isolation_level=None, timeout=DEADLINE_S)
    with client_of(supervisor) as client:
        database.execute("BEGIN IMMEDIATE")  # the database takes no writes for a while
        taken: list[str] = []
        refused = None
        for number in range(20):
            host_id = f"host-{number}"  # with a signal: of plain state only the newest report waits
            restarted = Signal(host_id, f"inc-{host_id}", 1, CLOCK.wall_s(), EngineRestarted("the engine was away"))
            answer = send(client, report(host_id, signals=(restarted,)))
            if answer.status_code == 429:
                refused = answer
                break
            assert answer.status_code == 200
            taken.append(host_id)
        database.execute("ROLLBACK")
        database.close()
        assert refused is not None
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["code"] == "too_busy"
        until(lambda: {h["host_id"] for h in items(client, "/v1/hosts")} == set(taken), "what was taken is stored")
        assert send(client, report("host-19")).status_code == 200


def test_the_stream_delivers_what_happens_and_goes_on_where_it_was_left(client: httpx.Client) -> None:
    fault = Event(at=1.0, kind=EventKind.FAULT_INJECTED, job="demo", data={"fault": "kill\n\ndata: forged"})
    after = client.get("/v1/events").json()["next_after"]
    seen: list[tuple[int, dict[str, Any]]] = []
    with client.stream("GET", "/v1/stream", params={"job": "demo", "kind": "fault_injected", "after": after}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert next(lines).startswith("retry:")
        assert client.post("/v1/events", content=encode([fault])).status_code == 204
        position = 0
        for line in lines:
            if line.startswith("id: "):
                position = int(line[4:])
            if line.startswith("data: "):
                seen.append((position, json.loads(line[6:])))
                break
    assert [event["data"]["fault"] for _, event in seen] == ["kill\n\ndata: forged"]
    second = msgspec.structs.replace(fault, at=2.0)
    assert client.post("/v1/events", content=encode([second])).status_code == 204
    seen_id = {"Last-Event-ID": str(seen[0][0])}
    # Only this job's: a controller that was held up is elected again, which is an event too.
    with client.stream("GET", "/v1/stream", params={"job": "demo"}, headers=seen_id) as stream:
        data = next(json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
    assert data["at"] == 2.0


def test_only_injected_faults_are_taken_from_outside(client: httpx.Client) -> None:
    forged = Event(at=1.0, kind=EventKind.JOB_ENDED, job="demo", data={"outcome": "succeeded"})
    answer = client.post("/v1/events", content=encode([forged]))
    assert answer.status_code == 400
    assert items(client, "/v1/events", job="demo", kind="job_ended") == []


def test_the_number_of_streams_is_bounded(start: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "MAX_STREAMS", 1)
    with client_of(start()) as client:
        with client.stream("GET", "/v1/stream") as first:
            lines = first.iter_lines()  # keep it: dropping the iterator closes its connection
            assert next(lines).startswith("retry:")
            refused = client.get("/v1/stream")
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
        until(lambda: "flyball_open_streams 0.0" in client.get("/metrics").text, "the stream is given back")


def test_the_page_takes_the_token_once_and_then_a_cookie(empty: Supervisor) -> None:
    with httpx.Client(base_url=empty.url, timeout=DEADLINE_S) as browser:
        closed = browser.get("/")
        assert closed.status_code == 401
        assert "needs a token" in closed.text
        script = '"><script>alert(1)</script>'
        assert "<script>" not in browser.get("/", params={"token": script}).text
        wrong = browser.get("/", params={"token": script}, headers={"Sec-Fetch-Site": "none"})
        assert wrong.status_code == 401
        assert "<script>" not in wrong.text
        for elsewhere in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {}):
            asked = browser.get("/", params={"token": empty.token}, headers=elsewhere)
            assert asked.status_code == 200 and "set-cookie" not in asked.headers, "nobody is logged in unasked"
            assert "Log in only if you trust" in asked.text and f'value="{empty.token}"' in asked.text
        by_hand = {"Sec-Fetch-Site": "none"}
        answer = browser.get("/", params={"token": empty.token}, headers=by_hand)
        assert answer.status_code == 303
        path, _, csrf = answer.headers["location"].partition("#operator=")
        assert path == "/"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        assert empty.token not in cookie
        page = browser.get("/")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert empty.token not in page.text
        assert browser.get("/v1/jobs").status_code == 200
        assert browser.post("/v1/jobs/demo/stop").status_code == 403, "a cookie grants reading only"
        stop = browser.post("/v1/jobs/demo/stop", headers={"X-CSRF-Token": csrf})
        assert stop.status_code == 404, "an operator's browser may change things: there is no such job"


def test_the_login_leads_on_and_out_again(empty: Supervisor) -> None:
    with httpx.Client(base_url=empty.url, timeout=DEADLINE_S) as browser:
        closed = browser.get("/incidents", params={"state": "open"})
        assert closed.status_code == 401
        assert 'value="/incidents"' in closed.text and 'value="state=open"' in closed.text
        filters = {"filters": "state=open&token=x&job=a%23b%26c%0d"}
        for token, why in (("", "This token is wrong"), (host_credential(empty.token, "h").token, "a host&#39;s")):
            refused = browser.post("/login", data={"token": token, "after": "/incidents?state=open"} | filters)
            assert 'value="/incidents"' in refused.text, "where to go is not forgotten"
            assert 'value="state=open&amp;job=a%23b%26c%0D"' in refused.text
            assert (refused.status_code, why in refused.text) == (401, True)
        form = {"token": f" {empty.token}\n", "after": "/incidents?state=open"}
        for foreign in ({"Origin": "http://elsewhere"}, {"Sec-Fetch-Site": "cross-site", "Origin": empty.url}):
            assert browser.post("/login", data=form, headers=foreign).status_code == 403
        assert browser.post("/login", data=form | {"after": "x" * MAX_FORM_BYTES}).status_code == 413
        behind_proxy = {"Sec-Fetch-Site": "same-origin", "Origin": "https://flyball.example"}
        led = browser.post("/login", data=form, headers=behind_proxy).headers["location"]
        assert led.startswith("/incidents#operator="), "`after` is a path"
        led = browser.post("/login", data=form | filters, headers=behind_proxy).headers["location"]
        assert led.startswith("/incidents?state=open&job=a%23b%26c%0D#operator="), "a query stays one"
        kept = {"X-CSRF-Token": led.partition("#operator=")[2]}
        assert browser.get("/session", headers=kept).json() == {"role": "operator"}
        for away in (
            "//elsewhere",
            "https://elsewhere",
            "/\\elsewhere",
            "/login",
            "/a\nb",
            "/?token=x",
            "/#operator=x",
        ):
            led = browser.post("/login", data={"token": reader_token(empty.token), "after": away})
            assert led.headers["location"] == "/#operator=", "a reader has no CSRF token, and nobody is led away"
        assert browser.get("/session", headers=kept).json() == {"role": "reader"}, "the operator's session is over"
        assert browser.post("/v1/jobs/demo/stop", headers=kept).status_code == 403
        assert browser.get("/incidents").status_code == 200
        assert browser.get("/incidents/inc-999").status_code == 404
        assert browser.get("/decisions/x").status_code == 404
        assert browser.post("/logout").headers["location"] == "/login"
        assert browser.get("/incidents").status_code == 401
        assert browser.get("/session").status_code == 401


def test_a_page_says_what_it_leaves_out(
    supervisor: Supervisor, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_pages, "MAX_JOBS", 1)
    monkeypatch.setattr(recovery_pages, "MAX_JOBS", 1)
    with httpx.Client(base_url=supervisor.url, headers=client.headers, timeout=DEADLINE_S) as pages:
        for name in ("first", "second"):
            assert "The newest" not in pages.get("/").text
            spec = JobSpec(job=name, argv=("train.py",), workdir="/tmp", hosts=("host-z",))
            assert client.post("/v1/jobs", content=encode(spec)).status_code == 201
        for path in ("/", "/recovery"):
            shown = pages.get(path).text
            assert "The newest 1 of 2 open jobs." in shown and "/jobs/second" in shown and "/jobs/first" not in shown
        assert client.post("/v1/jobs/first/stop").status_code < 300
        until(lambda: "/jobs/first" in pages.get("/").text, "it has ended")
        assert "The newest" not in pages.get("/").text


def test_a_browser_that_asks_wrongly_gets_a_page_and_a_program_a_problem(
    empty: Supervisor, refused: httpx.Client
) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml", "Authorization": refused.headers["Authorization"]}
    with httpx.Client(base_url=empty.url, timeout=DEADLINE_S) as pages:
        for path, status in (("/nowhere", 404), ("/jobs/demo?rank=-1", 422)):
            answer = pages.get(path, headers=browser)
            assert (answer.status_code, answer.headers["Content-Type"]) == (status, "text/html; charset=utf-8")
            assert "Next step: " in answer.text
        assert "This page needs a token" in pages.get("/nowhere", headers={"Accept": "text/html"}).text
        assert pages.get("/nowhere", headers=browser | {"Accept": "*/*"}).json()["code"] == "not_found"
        assert pages.get("/v1/nowhere", headers=browser).json()["code"] == "not_found"


def test_the_log_has_no_secret(
    supervisor: Supervisor, client: httpx.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    httpx.get(supervisor.url, params={"token": supervisor.token}, timeout=DEADLINE_S)
    httpx.get(supervisor.url, params={"token": "a-wrong-secret"}, timeout=DEADLINE_S)
    assert client.get("/v1/jobs/none").status_code == 404
    supervisor.stop()
    log = (tmp_path / "supervisor" / "supervisor.log").read_text()
    assert '"path": "/v1/jobs/none"' in log
    everything = log + "".join(r.getMessage() for r in caplog.records if not r.name.startswith("http"))
    assert "a-wrong-secret" not in everything
    assert supervisor.token not in everything


def test_a_second_supervisor_in_the_same_folder_is_an_error(
    supervisor: Supervisor, start: Callable[..., Supervisor]
) -> None:
    with pytest.raises(ConfigurationError, match="Another supervisor"):
        start()
    with client_of(supervisor) as client:
        until(lambda: client.get("/readyz").status_code == 200, "the first is not disturbed")


def test_a_port_in_use_and_a_folder_of_another_version(
    supervisor: Supervisor, start: Callable[..., Supervisor], tmp_path: Path
) -> None:
    port = int(supervisor.url.rsplit(":", 1)[1])
    with pytest.raises(PortInUse):
        start(state_dir=tmp_path / "other", port=port)
    start(state_dir=tmp_path / "other")  # nothing was left locked by the failure
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "VERSION").write_text("0\n")
    with pytest.raises(StateVersionMismatch):
        start(state_dir=tmp_path / "old")


def test_stopping_answers_waiting_requests_and_a_restart_continues(
    start: Callable[..., Supervisor], tmp_path: Path
) -> None:
    first = start()
    answers: list[httpx.Response] = []
    with client_of(first) as client:
        send(client, report())
        until(lambda: items(client, "/v1/hosts"), "the host is known")

        def poll() -> None:
            query = {"incarnation": "inc-host-a", "wait_s": "30"}
            answers.append(client.get("/v1/hosts/host-a/commands", params=query, headers=as_host(client)))

        waiting = threading.Thread(target=poll)
        waiting.start()
        until(lambda: "flyball_waiting_polls 1.0" in client.get("/metrics").text, "the poll waits")
        first.stop()
        waiting.join(DEADLINE_S)
        assert [(a.status_code, a.json()["commands"]) for a in answers] == [(200, [])]
    assert not (tmp_path / "supervisor" / "supervisor.json").exists()
    second = start()
    record = json.loads((tmp_path / "supervisor" / "supervisor.json").read_text())
    assert record["url"] == second.url
    assert second.token == first.token
    with client_of(second) as client:
        assert [h["host_id"] for h in items(client, "/v1/hosts")] == ["host-a"]


def test_an_operator_drains_a_host_and_gives_it_back(client: httpx.Client) -> None:
    assert client.post("/v1/hosts/host-a/drain", json={}).json()["code"] == "not_found"
    send(client, report())
    until(lambda: items(client, "/v1/hosts"), "the host")
    for wrong in ({"within_s": 0}, {"within_s": "soon"}, {"why": "typo"}, {"reason": 501 * "x"}):
        assert client.post("/v1/hosts/host-a/drain", json=wrong).status_code == 400
    for reason in ("new fans", "new fans, really"):
        asked = client.post("/v1/hosts/host-a/drain", json={"within_s": 60, "reason": reason})
        assert (asked.status_code, asked.json()["drain"]["reason"]) == (202, reason)

    def is_drained() -> bool:
        return bool(client.get("/v1/hosts/host-a").json()["drain"]["state"] == "drained")

    until(is_drained, "the drain")
    (decision,) = items(client, "/v1/decisions")
    assert (decision["kind"], decision["job"]) == ("cordon", "") and "new fans" in decision["reason"]
    assert client.post("/v1/hosts/host-a/drain", json={}, headers=as_host(client)).status_code == 403
    assert client.post("/v1/hosts/host-a/undrain").status_code == 202
    until(lambda: client.get("/v1/hosts/host-a").json()["drain"] is None, "the release")
    assert client.get("/v1/hosts/host-a").json()["state"] == "spare"
    assert [d["kind"] for d in items(client, "/v1/decisions")] == ["cordon", "uncordon"]
    (newer,) = items(client, "/v1/decisions", after=decision["decision_id"])
    assert newer["kind"] == "uncordon"


def test_others_report_conditions_of_a_host(client: httpx.Client) -> None:
    path = "/v1/hosts/host-a/conditions"
    hot = {
        "kind": "thermal",
        "severity": "critical",
        "message": "GPU 1 is hot.",
        "reporter": "dcgm",
        "subject": "gpu 1",
    }
    unknown = client.post(path, json=hot)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found") and unknown.json()["hint"]
    send(client, report())
    until(lambda: items(client, "/v1/hosts"), "the host")
    for wrong in ({}, {**hot, "severity": "bad"}, {**hot, "message": ""}, {**hot, "why": "typo"}, {**hot, "ttl_s": -1}):
        refused = client.post(path, json=wrong)
        assert refused.status_code == 400 and refused.headers["content-type"] == "application/problem+json"
    assert client.post(path, json={**hot, "message": 20_000 * "x"}).status_code == 413
    for headers in (None, as_host(client)):
        asked = client.post(path, json={**hot, "evidence": {"celsius": 91}}, headers=headers)
        assert asked.status_code == 202
        (shown,) = asked.json()["conditions"]
        assert (shown["source"], shown["evidence"], shown["until"]) == ("api:dcgm", {"celsius": 91}, None)
    until(lambda: client.get("/v1/hosts/host-a").json()["state"] == "cordoned", "the cordon")
    assert "GPU 1 is hot." in client.get("/v1/hosts/host-a").json()["reason"]

    ended = client.delete(path, params={"kind": "thermal", "reporter": "dcgm", "subject": "gpu 1"})
    assert ended.status_code == 202
    until(lambda: client.get("/v1/hosts/host-a").json()["state"] == "spare", "the release")
    assert client.get("/v1/hosts/host-a").json()["conditions"] == []
    assert [d["rule"] for d in items(client, "/v1/decisions")] == [
        "cordon_a_host_with_a_condition",
        "release_a_recovered_host",
    ]


def test_operators_orders(
    client: httpx.Client, supervisor: Supervisor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("hosts/host-a/cordon", "hosts/host-a/uncordon"):
        assert client.post(f"/v1/{path}", json={"reason": "x"}).json()["code"] == "not_found"
    send(client, report())
    until(lambda: items(client, "/v1/hosts"), "the host")
    where = ("--supervisor", supervisor.url, "--token-file", str(tmp_path / "supervisor" / "token"))
    assert run_cli(["cordon", "host-a", "--reason", "ECC errors", *where]) == 0
    assert "an operator cordoned it: ECC errors" in capsys.readouterr().out
    assert run_cli(["status", *where]) == 0
    assert "1 cordon (flyball get orders)" in capsys.readouterr().out
    checks = client.post("/v1/checks", json={"hosts": ["host-a", "host-x"]})
    assert (checks.status_code, checks.json()["code"]) == (404, "not_found")
    for wrong in ({"hosts": []}, {"hosts": ["a b"]}, {"hosts": "host-a"}, {}):
        assert client.post("/v1/checks", json=wrong).status_code == 400
    waits = client.post("/v1/hosts/host-a/uncordon")  # until it passes a check, but there is no daemon
    assert (waits.status_code, waits.json()["state"]) == (202, "cordoned")
    (order,) = [o for o in client.get("/v1/orders").json()["items"] if o["kind"] == "check"]
    assert (order["target"], order["awaited"]) == ("host-a", "uncordon")
    assert run_cli(["uncordon", "host-a", "--skip-check", "-o", "json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "spare"

    assert run_cli(["silence", "host-a", "--for", "2h", "--reason", "firmware", "-o", "json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "host-a"
    for wrong in ({"for_s": 9}, {"for_s": 9, "host_id": "host-a", "failure_domain": "rack-1"}, {"for_s": -1}):
        assert client.post("/v1/silence", json=wrong).status_code in (400, 422)
    assert run_cli(["silence", "--failure-domain", "rack-1", "--for", "30m", *where]) == 0
    assert [o["target"] for o in client.get("/v1/orders").json()["items"] if o["kind"] == "silence"] == [
        "domain:rack-1",
        "host-a",
    ]
    for target in ("host-a", "--failure-domain=rack-1"):
        assert run_cli(["silence", target, "--end", *where]) == 0
    until(lambda: not [o for o in client.get("/v1/orders").json()["items"] if o["kind"] == "silence"], "their ends")

    assert run_cli(["approve", "inc-9", *where]) == 8
    assert run_cli(["approve", "host-a", *where]) == 2
    for wrong in (["silence"], ["silence", "host-a"], ["silence", "host-a", "--for", "soon"]):
        assert run_cli([*wrong, *where]) == 2
    for path in ("silence", "approve", "hosts/host-a/cordon"):
        assert client.post(f"/v1/{path}", json={}, headers=as_host(client)).status_code == 403
