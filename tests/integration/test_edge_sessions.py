"""Browsers' sessions end at the server, operators have names in the audit log, and every response forbids sniffing."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.clocks.waits import until
from support.servers.here import bearer, client_of, supervisor_in

from flyball.cli.main import run_cli
from services.main import Supervisor

DEADLINE_S = 300.0
BY_HAND = {"Sec-Fetch-Site": "none"}


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    before = os.umask(0)
    try:
        with supervisor_in(tmp_path_factory.mktemp("supervisor") / "state") as supervisor:
            yield supervisor
    finally:
        os.umask(before)


def state_dir(supervisor: Supervisor) -> Path:
    return supervisor._settings.state_dir


def logged_in(supervisor: Supervisor, token: str) -> tuple[str, dict[str, str]]:
    """The cookie of a browser, and the headers with which it changes things."""
    with httpx.Client(base_url=supervisor.url, timeout=DEADLINE_S) as browser:
        answer = browser.get("/", params={"token": token}, headers=BY_HAND)
        assert answer.status_code == 303, answer.text
        cookie = answer.headers["set-cookie"].partition(";")[0]
        assert "Max-Age=43200" in answer.headers["set-cookie"]
        return cookie, {"Cookie": cookie, "X-CSRF-Token": answer.headers["location"].partition("#operator=")[2]}


def test_whoever_logged_out_is_out_at_every_server(supervisor: Supervisor) -> None:
    cookie, changing = logged_in(supervisor, supervisor.token)
    other, _ = logged_in(supervisor, supervisor.token)
    with httpx.Client(base_url=supervisor.url, timeout=DEADLINE_S) as browser:
        assert browser.get("/v1/jobs", headers={"Cookie": cookie}).status_code == 200
        assert browser.post("/logout", headers={"Cookie": cookie}).status_code == 303
        assert browser.get("/v1/jobs", headers={"Cookie": cookie}).status_code == 401, "a copy of it is of no use"
        assert browser.post("/v1/jobs/demo/stop", headers=changing).status_code == 401
        assert browser.get("/v1/jobs", headers={"Cookie": other}).status_code == 200


def test_a_server_that_is_started_again_remembers_who_logged_out(tmp_path: Path) -> None:
    with supervisor_in(tmp_path / "state") as first:
        cookie, _ = logged_in(first, first.token)
        kept, _ = logged_in(first, first.token)
        httpx.post(f"{first.url}/logout", headers={"Cookie": cookie}, timeout=DEADLINE_S)
    with supervisor_in(tmp_path / "state") as again, httpx.Client(base_url=again.url, timeout=DEADLINE_S) as browser:
        assert browser.get("/v1/jobs", headers={"Cookie": cookie}).status_code == 401
        assert browser.get("/v1/jobs", headers={"Cookie": kept}).status_code == 200


def test_another_server_learns_of_it_from_the_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.dashboard.ended_sessions.FOLLOW_S", 0.05)
    database = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    with supervisor_in(tmp_path / "one", database_url=database) as one:
        shared = {"database_url": database, "token": one.token}
        with supervisor_in(tmp_path / "two", **shared) as two:
            cookie, _ = logged_in(one, one.token)
            asks = httpx.Client(base_url=two.url, headers={"Cookie": cookie}, timeout=DEADLINE_S)
            with asks:
                assert asks.get("/v1/jobs").status_code == 200
                httpx.post(f"{one.url}/logout", headers={"Cookie": cookie}, timeout=DEADLINE_S)
                until(lambda: asks.get("/v1/jobs").status_code == 401, "the end of the session at the other server")


def test_the_audit_log_says_who_it_was(supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(state_dir(supervisor))
    assert run_cli(["token", "operator", "alice", "--state-dir", folder]) == 0
    alice = capsys.readouterr().out.strip()
    _, changing = logged_in(supervisor, alice)
    with httpx.Client(base_url=supervisor.url, timeout=DEADLINE_S) as client:
        ways = (bearer(alice), changing, bearer(supervisor.token))
        for host, headers in zip(("by-token", "by-page", "by-secret"), ways, strict=True):
            assert client.post(f"/v1/hosts/{host}/drain", headers=headers).status_code < 500
        found = client.get("/v1/audit", headers=bearer(alice)).json()["items"]
        assert {e["target"]: e["operator"] for e in found if e["operation"] == "drainHost"} == {
            "by-token": "alice",
            "by-page": "alice",
            "by-secret": "",
        }
        assert all("operator" not in entry["detail"] for entry in found)
        assert run_cli(["token", "operator", "alice", "--remove", "--state-dir", folder]) == 0
        assert client.get("/v1/jobs", headers=bearer(alice)).status_code == 401
        assert client.post("/v1/hosts/x/drain", headers=changing).status_code == 401, "the session went with the token"
    assert run_cli(["token", "operator", "alice", "--remove", "--state-dir", folder]) != 0
    assert "No operator is named alice" in capsys.readouterr().err
    assert stat.S_IMODE((state_dir(supervisor) / "operators").stat().st_mode) == 0o600


def test_every_response_forbids_sniffing(supervisor: Supervisor) -> None:
    with client_of(supervisor) as client:
        for path in ("/healthz", "/metrics", "/v1/jobs", "/v1/nothing", "/login", "/static/js/session.js"):
            assert client.get(path).headers.get_list("x-content-type-options") == ["nosniff"], path
        assert client.put("/v1/jobs").headers["x-content-type-options"] == "nosniff"
    at = urlsplit(supervisor.url)
    assert at.hostname is not None and at.port is not None
    with socket.create_connection((at.hostname, at.port), timeout=DEADLINE_S) as raw:
        raw.sendall(b"not http\r\n\r\n")
        assert b"x-content-type-options: nosniff\r\n" in raw.recv(4096).lower()


def test_the_log_is_private_whatever_the_umask(supervisor: Supervisor) -> None:
    """Like everything in the folder; the umask here is 0."""
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in state_dir(supervisor).iterdir() if path.is_file()}
    assert modes["supervisor.log"] == 0o600
    assert {name for name, mode in modes.items() if mode & 0o077} == set()
