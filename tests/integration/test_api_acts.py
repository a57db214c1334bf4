"""What operators do through the API: tried before, repeated safely, recorded; and how often anybody may ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clocks.waits import until
from support.hosts.reports import report
from support.servers.described_replies import DescribedReplies
from support.servers.here import bearer, client_of, supervisor_in

from flyball.cli.main import run_cli
from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import host_credential, reader_token
from flyball.contracts.wire import encode
from goodput.read import simulations
from services.main import Supervisor
from services.runtime.http.auth import Authenticator
from simulator.fleet import scenario
from simulator.fleet.result import simulate

PATIENCE_S = 300.0
SPEC = {"job": "gpt", "argv": ["train.py"], "workdir": "/", "env": {"KEY": "a-secret"}, "nnodes": 1}


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervisor") / "state"


@pytest.fixture(scope="module")
def supervisor(state_dir: Path) -> Iterator[Supervisor]:
    with supervisor_in(state_dir, start_timeout_s=PATIENCE_S) as supervisor:
        yield supervisor


@pytest.fixture
def client(supervisor: Supervisor) -> Iterator[httpx.Client]:
    with client_of(supervisor, event_hooks={"response": [DescribedReplies()]}) as client:
        for host_id in ("host-a", "host-b"):
            daemon = bearer(supervisor.token, host_id)
            assert (
                client.post(
                    "/v1/reports",
                    content=encode(report(host_id, SystemClock().wall_s(), domain=host_id, interval_s=600.0)),
                    headers=daemon,
                ).status_code
                == 200
            )
            path = f"/v1/hosts/{host_id}"
            until(lambda path=path: client.get(path).status_code != 404, f"the sensor stores {host_id}")
        yield client


def audit(client: httpx.Client, **query: str) -> list[dict[str, Any]]:
    return list(client.get("/v1/audit", params=query).json()["items"])


def test_a_dry_run_shows_the_decision_and_changes_nothing(client: httpx.Client) -> None:
    known = len(audit(client))
    answer = client.post("/v1/jobs?dry_run=true", json=SPEC)
    assert answer.status_code == 200
    preview = answer.json()
    assert (preview["status"], preview["reply"]["job"], preview["reply"]["state"]) == (201, "gpt", "submitted")
    (start,) = [one for one in preview["decisions"] if one["job"] == "gpt"]
    assert start["kind"] == "start_job"
    assert len(start["hosts"]) == 1 and start["reason"]
    assert client.get("/v1/jobs/gpt").status_code == 404
    for path, body in (
        ("/v1/hosts/host-a/drain", {"within_s": 60.0}),
        ("/v1/hosts/host-a/undrain", None),
        ("/v1/hosts/host-a/cordon", {"reason": "fans"}),
        ("/v1/hosts/host-a/uncordon", None),
        ("/v1/silence", {"for_s": 60.0, "host_id": "host-a"}),
        ("/v1/hosts/host-a/conditions", {"kind": "xid", "severity": "critical", "message": "XID 48"}),
    ):
        tried = client.post(f"{path}?dry_run=true", json=body)
        assert (tried.status_code, tried.json()["status"]) == (200, 202), path
    assert client.post("/v1/hosts/none/drain?dry_run=true", json={}).status_code == 404
    assert client.post("/v1/approve?dry_run=true", json={"target": "inc-9"}).status_code == 404
    assert client.post("/v1/jobs/none/checkpoint?dry_run=true", json={}).status_code == 404
    alive = client.delete("/v1/hosts/host-a?dry_run=true")
    assert (alive.status_code, alive.json()["code"]) == (409, "conflict")
    host = client.get("/v1/hosts/host-a").json()
    assert (host["drain"], host["conditions"]) == (None, [])
    assert client.get("/v1/orders").json()["items"] == []
    assert len(audit(client)) == known


def test_a_key_is_carried_out_once(client: httpx.Client) -> None:
    key = {"Idempotency-Key": "b2a5d3c0-7d0e-4a0e-9a55-1f2e3d4c5b6a"}
    order = {"for_s": 600.0, "host_id": "host-b", "reason": "fans"}
    first = client.post("/v1/silence", json=order, headers=key)
    again = client.post("/v1/silence", json=order, headers=key)
    assert first.status_code == again.status_code == 202
    assert again.content == first.content
    assert again.headers["Idempotency-Replayed"] == "true" and "Idempotency-Replayed" not in first.headers
    other = client.post("/v1/silence", json=order | {"for_s": 601.0}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "conflict")
    assert len(audit(client, operation="silence")) == 1
    long = client.post("/v1/silence", json=order, headers={"Idempotency-Key": "x" * 256})
    assert (long.status_code, long.json()["errors"][0]["field"]) == (422, "Idempotency-Key")
    assert client.post("/v1/silence", json=order | {"for_s": 0.0}).status_code == 202


@pytest.mark.parametrize("path", ["/v1/hosts/host-a/token", "/v1/reader-token"])
def test_a_token_is_never_stored(client: httpx.Client, supervisor: Supervisor, state_dir: Path, path: str) -> None:
    """Not even for repetitions of its request, which get the same token anyway."""
    key = {"Idempotency-Key": path}
    first = client.post(path, headers=key)
    again = client.post(path, headers=key)
    assert first.status_code == 200
    assert (again.content, again.headers["Cache-Control"]) == (first.content, "no-store")
    token = reader_token(supervisor.token) if "reader" in path else host_credential(supervisor.token, "host-a").token
    assert token in first.text
    files = list(state_dir.glob("flyball.sqlite*"))
    assert files and not [file.name for file in files if token.encode() in file.read_bytes()]


def test_the_audit_log_shows_who_did_what(client: httpx.Client, supervisor: Supervisor) -> None:
    assert client.post("/v1/jobs", json=SPEC).status_code == 201
    assert client.post("/v1/jobs/gpt/stop").status_code == 202
    assert client.post("/v1/hosts/none/drain", json={"reason": "fans"}).status_code == 404
    submitted, stopped, refused = audit(client)[-3:]
    assert (submitted["operation"], submitted["status"], submitted["detail"]) == ("submitJob", 201, {"job": "gpt"})
    assert (stopped["operation"], stopped["target"], stopped["client"]) == ("stopJob", "gpt", "127.0.0.1")
    assert (refused["target"], refused["status"], refused["code"]) == ("none", 404, "not_found")
    assert refused["detail"] == {"reason": "fans"}
    assert client.post("/v1/checks", json={"hosts": ["host-a", "host-b"]}).status_code == 202
    (checked,) = audit(client, operation="checkHosts")
    assert checked["detail"] == {"hosts": "host-a, host-b"}
    assert submitted["token"] == stopped["token"] and submitted["token"] not in supervisor.token
    assert "a-secret" not in client.get("/v1/audit").text
    reader = bearer(reader_token(supervisor.token))
    assert client.get("/v1/audit", headers=reader).status_code == 200


def test_a_job_is_compared_with_a_simulated_run(
    client: httpx.Client, state_dir: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    done = simulate(scenario.load("small", ["days=0.2"]), 1, "small").result
    (state_dir / "simulations" / "Small-1.json").write_bytes(encode(done))
    (state_dir / "simulations" / "Torn.json").write_bytes(encode(done)[:99])
    listed = client.get("/v1/simulations").json()
    assert [(one["name"], one["seed"], bool(one["problem"])) for one in listed["items"]] == [
        ("Small-1", 1, False),
        ("Torn", 0, True),
    ]
    assert listed["folder"] == str(state_dir.resolve() / "simulations") and listed["next_before"] is None
    page = client.get("/v1/simulations", params={"limit": 1, "before": "Torn"}).json()
    assert [one["name"] for one in page["items"]] == ["Small-1"] and page["next_before"] is None
    shown = client.get("/v1/simulations/Small-1").json()
    assert shown["goodput"]["goodput"] == done.goodput.goodput and len(shown["timeline"]) == len(done.timeline)
    for name, status in (("Torn", 400), ("Other", 404), ("a%0Ab", 422)):
        assert client.get(f"/v1/simulations/{name}").status_code == status, name

    assert client.post("/v1/jobs", json=SPEC | {"job": "real", "hosts": ["host-z"]}).status_code == 201
    runs = {"a": "simulation:Small-1", "b": "job:real"}
    found = client.get("/v1/goodput/comparison", params=runs).json()
    assert found["measures"][0]["a"] == done.goodput.goodput and found["measures"][0]["b"] == 0.0
    for wrong, status in (("job:none", 404), ("simulation:Torn", 400), ("Small-1", 422), ("simulation:../x", 422)):
        assert client.get("/v1/goodput/comparison", params=runs | {"b": wrong}).status_code == status, wrong
    assert {"listSimulations", "getSimulation", "compareRuns"} <= client.event_hooks["response"][0].checked
    where = ("--supervisor", supervisor.url, "--token-file", str(state_dir / "token"))
    for line, word in ((["simulations"], "Torn.json is not a result"), (["simulation", "Small-1"], "small")):
        assert run_cli(["get", *line, *where]) == 0
        assert word in " ".join(capsys.readouterr().out.split())


def test_the_page_of_runs_shows_the_chosen_ones_and_tells_them_apart(
    supervisor: Supervisor, state_dir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = simulate(scenario.load("small", ["days=0.2"]), 2, "small").result
    result = state_dir / "simulations" / "same.json"
    result.write_bytes(encode(done))
    request.addfinalizer(result.unlink)
    read: list[Path] = []
    read_result = simulations.read_result
    monkeypatch.setattr(simulations, "read_result", lambda path: [read.append(path), read_result(path)][1])
    with client_of(supervisor) as browser:
        body = SPEC | {"job": "same", "hosts": ["host-z"]}
        assert browser.post("/v1/jobs", json=body).status_code == 201
        page = browser.get("/goodput", params={"run": "job:not-listed", "with": "simulation:same"}).text
        assert '<option value="job:not-listed" selected>job not-listed</option>' in page
        assert page.count(" selected>") == 2 and page.count('value="simulation:same"') == 2
        part = browser.get("/goodput/run", params={"run": "simulation:same"}).text
        assert "Simulation same" in part and 'id="lanes"' in part and len(read) == 1
        part = browser.get("/goodput/comparison", params={"run": "job:same", "with": "simulation:same"}).text
        assert ">job same beside simulation same</h2>" in part


def test_a_check_of_hosts_leads_to_a_page(client: httpx.Client) -> None:
    assert client.post("/v1/checks", json={"hosts": ["host-b"]}).status_code == 202
    query = {"kind": "check_hosts"}
    found = until(lambda: client.get("/v1/decisions", params=query).json()["items"], "the decision")
    assert (found[0]["job"], found[0]["incident_id"]) == ("", "")
    led = client.get(f"/decisions/{found[0]['decision_id']}")
    assert led.status_code == 303
    page = client.get(led.headers["location"])
    assert page.status_code == 200 and "host-" in page.text


def test_users_have_a_limit_and_daemons_have_none(tmp_path: Path) -> None:
    with supervisor_in(tmp_path, start_timeout_s=PATIENCE_S, max_requests_per_s=0.001) as supervisor:
        daemon, operator = bearer(supervisor.token, "host-a"), bearer(supervisor.token)
        with httpx.Client(base_url=supervisor.url, timeout=PATIENCE_S) as client:
            assert client.get("/v1/jobs", headers=operator).status_code == 200
            refused = client.get("/v1/jobs", headers=operator)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_busy")
            assert 1 <= int(refused.headers["Retry-After"]) <= 1000
            assert client.get("/hosts", headers=operator).status_code == 429, "a page counts as well"
            page = client.get("/hosts", headers=operator | {"Accept": "text/html,*/*;q=0.8"})
            assert page.status_code == 429 and page.headers["Content-Type"].startswith("text/html")
            assert "More than 0.001 requests per second" in page.text and "Next step: ask less often" in page.text
            assert page.headers["Retry-After"] and "default-src" in page.headers["Content-Security-Policy"]
            logins = Authenticator(supervisor.token)
            for _ in range(2):
                cookie = {"Cookie": f"{logins.cookie_name}={logins.new_session().cookie}"}
                answers = [client.get("/hosts", headers=cookie).status_code for _ in range(2)]
                assert answers == [200, 429], "each login has its own limit"
            assert [client.post("/login", data={"token": "x"}).status_code for _ in range(2)] == [401, 429]
            for _ in range(5):
                answer = client.post(
                    "/v1/reports", content=encode(report("host-a", SystemClock().wall_s())), headers=daemon
                )
                assert answer.status_code == 200
                assert client.get("/healthz").status_code == 200
                assert client.get("/static/js/session.js", headers=operator).status_code == 200
