"""Roles on a real supervisor; hostile requests; daemons with wrong clocks, twins, and new tokens."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.clocks.waits import until
from support.hosts.reports import report as made_report
from support.servers.here import bearer, client_of, supervisor_in

from flyball.cli.main import run_cli
from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import host_credential, reader_token
from flyball.contracts.errors import DaemonSuperseded, FlyballError, Unauthorized
from flyball.contracts.reports.signals import PreemptionNotice, Report
from flyball.contracts.wire import encode
from host_daemon.agent import Agent
from host_daemon.settings import parse_settings
from host_daemon.store.state_dir import HostStateDir
from services.api.auth import ACCESS
from services.main import Supervisor

CLOCK = SystemClock()
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with supervisor_in(tmp_path_factory.mktemp("supervisor") / "state") as supervisor:
        yield supervisor


@pytest.fixture
def client(supervisor: Supervisor) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=supervisor.url, timeout=DEADLINE_S) as client:
        yield client


def hosts(client: httpx.Client, supervisor: Supervisor) -> dict[str, dict[str, Any]]:
    items = client.get("/v1/hosts", headers=bearer(supervisor.token)).json()["items"]
    return {host["host_id"]: host for host in items}


def report(host_id: str, **parts: Any) -> Report:  # noqa: ANN401 - fields of Report
    sent = {"sent_at": CLOCK.wall_s(), "interval_s": 60.0, "incarnation": f"i-{host_id}", "seq": 1}
    return made_report(host_id, **sent | parts)


def routes_of(app: Any) -> set[tuple[str, str]]:  # noqa: ANN401 - FastAPI's routers have several types
    found: set[tuple[str, str]] = set()
    for route in app.routes:
        below = getattr(route, "original_router", None)
        if below is not None:
            found |= routes_of(below)
        elif getattr(route, "methods", None):
            found |= {(method, route.path) for method in route.methods}
        else:
            found |= {(method, f"{route.path}/{{path:path}}") for method in ("GET", "HEAD")}  # a mounted folder
    return found


def test_every_route_has_a_rule_and_every_rule_a_route(supervisor: Supervisor) -> None:
    routes = routes_of(supervisor.app)
    assert len(routes) > 20
    assert routes == set(ACCESS), (
        "list the roles of a new route in services.api.auth.ACCESS; until then nobody may use it"
    )


def test_a_route_without_a_rule_is_served_to_nobody(
    supervisor: Supervisor, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/v1/jobs", headers=bearer(supervisor.token)).status_code == 200
    supervisor.app.add_api_route("/v1/forgotten", lambda: "secret", methods=["GET"])
    for token in (supervisor.token, reader_token(supervisor.token), host_credential(supervisor.token, "h").token):
        assert client.get("/v1/forgotten", headers=bearer(token)).status_code == 404
    assert client.get("/v1/forgotten").status_code == 401
    supervisor.app.router.routes.pop()


def test_a_reader_sees_and_changes_nothing(supervisor: Supervisor, client: httpx.Client) -> None:
    reader = bearer(reader_token(supervisor.token))
    for path in ("/v1/jobs", "/v1/hosts", "/v1/incidents", "/v1/decisions", "/v1/events", "/openapi.json", "/"):
        assert client.get(path, headers=reader).status_code == 200, path
    for method, path in ACCESS:
        if method == "POST" and path not in ("/login", "/logout"):
            answer = client.post(path.replace("{host_id}", "host-a").replace("{job}", "j"), headers=reader)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), path
            assert answer.json()["hint"]


def test_a_daemon_reports_for_its_own_host_and_does_nothing_else(supervisor: Supervisor, client: httpx.Client) -> None:
    daemon = bearer(supervisor.token, "own")
    other = client.post("/v1/reports", content=encode(report("other")), headers=daemon)
    assert (other.status_code, other.json()["code"]) == (403, "forbidden")
    assert "'other'" in other.json()["detail"] and "'own'" in other.json()["detail"]
    assert client.post("/v1/reports", content=encode(report("own")), headers=daemon).status_code == 200
    until(lambda: "own" in hosts(client, supervisor), "its report is stored")
    assert "other" not in hosts(client, supervisor)
    for path in ("/v1/jobs", "/v1/hosts", "/v1/events", "/v1/hosts/other/commands?incarnation=i"):
        assert client.get(path, headers=daemon).status_code == 403, path
    for path in ("/v1/jobs", "/v1/events", "/v1/hosts/own/token", "/v1/hosts/own/drain", "/v1/hosts/other/updates"):
        assert client.post(path, headers=daemon).status_code == 403, path


def test_refused_reports_change_nothing(supervisor: Supervisor, client: httpx.Client) -> None:
    daemon = bearer(supervisor.token, "host-r")

    def send(**parts: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 - fields of Report
        answer = client.post("/v1/reports", content=encode(report("host-r", **parts)), headers=daemon)
        return answer.status_code, answer.json()

    for ahead_s in (3600.0, -86_400.0):
        status, problem = send(sent_at=CLOCK.wall_s() + ahead_s)
        assert (status, problem["code"]) == (422, "wrong_clock")
        assert abs(problem["server_time"] - CLOCK.wall_s()) < DEADLINE_S
    assert send(seq=5)[0] == 200
    assert send(seq=5)[1]["code"] == "report_replayed"
    assert send(seq=4)[1]["code"] == "report_out_of_order"
    assert send(seq=1, incarnation="new")[1]["code"] == "daemon_superseded"
    assert send(seq=1, incarnation="new", succeeds=("i-host-r",))[0] == 200
    status, problem = send(seq=6)
    assert (status, problem["code"]) == (409, "daemon_superseded")
    stored = until(lambda: hosts(client, supervisor).get("host-r"), "the host")
    assert stored["host_id"] == "host-r"
    text = client.get("/metrics").text
    for reason in ("wrong_clock", "report_replayed", "report_out_of_order", "daemon_superseded"):
        assert f'flyball_reports_refused_total{{reason="{reason}"}}' in text


class WrongClock:
    """A host's clock that a test sets."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def wall_s(self) -> float:
        return CLOCK.wall_s() + self.ahead_s

    def monotonic_s(self) -> float:
        return CLOCK.monotonic_s()


def daemon_of(supervisor: Supervisor, root: Path, host_id: str, clock: Any) -> Any:  # noqa: ANN401 - what it is told
    """A daemon whose loops do not run: it does what a test tells it."""
    root.mkdir(exist_ok=True)
    token_file = root / "token"
    if not token_file.exists():
        token_file.write_text(host_credential(supervisor.token, host_id).text())
    arguments = ["--state-dir", str(root / "state"), "--host-id", host_id, "--supervisor", supervisor.url]
    state_dir = HostStateDir(root / "state")
    state_dir.open(host_id)
    settings = parse_settings([*arguments, "--token-file", str(token_file)], {})
    agent = Agent(settings, state_dir, clock)
    outbox, reporter = agent._outbox, agent._reporter
    told = {"put": outbox.put, "report": reporter.send_once, "succeed": agent._succeed}
    return SimpleNamespace(outbox=outbox, reporter=reporter, **told, close=agent._http.close, die=state_dir.close)


def test_a_daemon_whose_clock_is_set_wrong_goes_on_reporting_with_the_right_time(
    supervisor: Supervisor, client: httpx.Client, tmp_path: Path
) -> None:
    clock = WrongClock(3600.0)

    async def scenario() -> None:
        daemon = daemon_of(supervisor, tmp_path / "host-w", "host-w", clock)
        await daemon.put(PreemptionNotice(CLOCK.wall_s() + 1e6, "dated an hour ahead"))
        for ahead_s in (3600.0, -86_400.0, 0.0, 500.0):
            clock.ahead_s = ahead_s
            await daemon.report()
        await daemon.close()

    asyncio.run(scenario())
    until(lambda: "host-w" in hosts(client, supervisor), "its reports are stored")
    events = client.get("/v1/events", headers=bearer(supervisor.token)).json()["items"]
    ahead = [e for e in events if e["event"]["at"] > CLOCK.wall_s() + 60.0]
    assert ahead == [], "no event lies in the future"


def test_a_daemon_whose_report_was_sent_twice_on_the_way_is_not_stuck(supervisor: Supervisor, tmp_path: Path) -> None:
    async def scenario() -> None:
        daemon = daemon_of(supervisor, tmp_path / "p", "host-p", CLOCK)
        await daemon.put(PreemptionNotice(CLOCK.wall_s() + 1e6, "test"))
        await daemon.report()
        daemon.reporter._seq -= 1  # as if a proxy repeated it, and lost the first reply
        await daemon.report()
        async with asyncio.timeout(DEADLINE_S):
            while daemon.outbox.has_uncommitted:
                await daemon.report()
                await asyncio.sleep(0.05)
        await daemon.close()

    asyncio.run(scenario())


def test_of_two_daemons_with_one_id_the_first_is_accepted_until_it_restarts(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    async def scenario() -> FlyballError:
        first = daemon_of(supervisor, tmp_path / "a", "host-t", CLOCK)
        second = daemon_of(supervisor, tmp_path / "b", "host-t", CLOCK)
        await first.succeed()
        await first.report()
        with pytest.raises(DaemonSuperseded) as caught:
            await second.report()
        await first.report()
        first.die()
        again = daemon_of(supervisor, tmp_path / "a", "host-t", CLOCK)
        await again.succeed()
        await again.report()
        with pytest.raises(DaemonSuperseded):
            await first.report()
        for daemon in (first, second, again):
            await daemon.close()
        return caught.value

    error = asyncio.run(scenario())
    assert "--host-id" in error.hint


def test_a_running_daemon_finds_its_new_token(supervisor: Supervisor, tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "n").mkdir()
        token_file = tmp_path / "n" / "token"
        token_file.write_text(host_credential("another-secret-of-16", "host-n").text())
        daemon = daemon_of(supervisor, tmp_path / "n", "host-n", CLOCK)
        with pytest.raises(Unauthorized):
            await daemon.report()
        token_file.write_text("")  # half written
        with pytest.raises(Unauthorized):
            await daemon.report()
        token_file.write_text(host_credential(supervisor.token, "host-n").text())
        await daemon.report()
        await daemon.close()

    asyncio.run(scenario())


# --- bytes that no client would send ----------------------------------------------------------------------------------


STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def speak(supervisor: Supervisor, request: bytes, answers: int = 0) -> list[int]:
    """The statuses of this many responses, or of all until the connection ends."""
    host, _, port = supervisor.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            if not answers:
                with contextlib.suppress(OSError):  # already closed by the other side
                    connection.shutdown(socket.SHUT_WR)
            while (not answers or len(STATUS.findall(answer)) < answers) and (block := connection.recv(65_536)):
                answer += block
    return [int(status) for status in STATUS.findall(answer)]


@pytest.mark.parametrize(
    "headers",
    [
        b"Authorization: Bearer " + b"x" * 30_000,
        b"Authorization: Bearer " + b"x" * 2_000_000,
        b"X-Filler: " + b"x" * 2_000_000,
        b"Authorization: Bearer \xc3\xa9\xff",
        b"Authorization: Bearer {token}\r\nAuthorization: Bearer {token}",
        b"Authorization:",
        b"Cookie: " + b"a=b; " * 5_000,
        b"Authorization: Bearer {token}\x00",
        b"Authorization : Bearer {token}",
    ],
)
def test_hostile_headers_are_refused(supervisor: Supervisor, headers: bytes) -> None:
    headers = headers.replace(b"{token}", supervisor.token.encode())
    statuses = speak(supervisor, b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n\r\n")
    assert set(statuses) <= {400, 401}  # none: the connection closed before all of it was sent


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nContent-Length: 60",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: -1",
        b"Content-Length: 5, 60",
        b"Content-Length: 0x10",
        b"Transfer-Encoding: gzip",
    ],
)
def test_a_smuggled_request_is_not_served(supervisor: Supervisor, framing: bytes) -> None:
    """Bytes after a body of ambiguous length must not count as a request with somebody's token."""
    hidden = b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + supervisor.token.encode() + b"\r\n\r\n"
    request = b"POST /v1/reports HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n0\r\n\r\n" + hidden
    assert 200 not in speak(supervisor, request)


def test_one_connection_is_not_one_sender(supervisor: Supervisor) -> None:
    """A valid report on a connection does not authorize the next request on it."""

    def request(token: str, message: Report) -> bytes:
        body = encode(message)
        head = f"POST /v1/reports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body

    mine, yours = (host_credential(supervisor.token, host_id).token for host_id in ("host-x", "host-y"))
    forged = mine.replace("host-x", "host-y")
    statuses = speak(
        supervisor,
        request(mine, report("host-x", seq=1))
        + request(mine, report("host-y", seq=1))  # the very same head
        + request(forged, report("host-y", seq=2))
        + request(mine, report("host-x", seq=1))
        + request(yours, report("host-y", seq=3))
        + request(mine, report("host-x", seq=2)),
        answers=6,
    )
    assert statuses == [200, 403, 401, 409, 200, 200]


# --- the command line -------------------------------------------------------------------------------------------------


def test_tokens_are_made_offline_and_over_the_api(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLYBALL_TOKEN", raising=False)
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "token").write_text(supervisor.token)
    assert run_cli(["token", "host", "node-7", "--state-dir", str(folder), "--out", str(tmp_path / "n7")]) == 0
    credential = host_credential(supervisor.token, "node-7")
    assert (tmp_path / "n7").read_text() == credential.text()
    assert (tmp_path / "n7").stat().st_mode & 0o777 == 0o600
    assert run_cli(["token", "reader", "--state-dir", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == reader_token(supervisor.token)
    remote = ["--supervisor", supervisor.url, "--token-file", str(folder / "token")]
    assert run_cli(["token", "host", "node-7", *remote]) == 0
    assert capsys.readouterr().out == credential.text()
    assert run_cli(["token", "reader", *remote]) == 0
    assert capsys.readouterr().out.strip() == reader_token(supervisor.token)
    assert run_cli(["token", "host", "no/name", *remote]) == 2
    wrong_role = ["--supervisor", supervisor.url, "--token-file", str(tmp_path / "n7")]
    assert run_cli(["token", "reader", *wrong_role]) == 17
    assert run_cli(["token", "reader", "--token-file", str(tmp_path / "n7")]) == 3
    assert run_cli(["status", *wrong_role]) == 17
    assert "operator" in capsys.readouterr().err


def test_a_single_hosts_token_is_withdrawn_by_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLYBALL_TOKEN", raising=False)
    monkeypatch.setenv("FLYBALL_HOST_TOKEN_EPOCHS", '{"node-7": 1}')
    with supervisor_in(tmp_path / "state") as supervisor:
        offline = ["--state-dir", str(tmp_path / "state")]
        remote = ["--supervisor", supervisor.url, "--token-file", str(tmp_path / "state" / "token")]
        for how in (offline, remote, [*offline, "--epoch", "1"], [*remote, "--epoch", "1"]):
            assert run_cli(["token", "host", "node-7", *how]) == 0
            assert capsys.readouterr().out == host_credential(supervisor.token, "node-7", 1).text()
        assert run_cli(["token", "host", "node-7", *remote, "--epoch", "2"]) == 16
        with httpx.Client(base_url=supervisor.url, timeout=DEADLINE_S) as client:
            codes = [
                client.get(
                    f"/v1/hosts/{host_id}/departure",
                    headers=bearer(host_credential(supervisor.token, host_id, epoch).token),
                ).status_code
                for host_id, epoch in (("node-7", 0), ("node-7", 1), ("node-8", 0))
            ]
        assert codes == [401, 200, 200]


def test_a_new_secret_and_the_former_one_are_taken_until_the_change_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "state"

    def answers(*tokens: str) -> list[int]:
        with supervisor_in(folder) as supervisor, client_of(supervisor) as client:
            return [client.get("/v1/jobs", headers=bearer(token)).status_code for token in tokens]

    old = "the-secret-until-now"
    folder.mkdir()
    (folder / "token").write_text(old)
    (folder / "token").chmod(0o600)
    assert run_cli(["token", "rotate", "--state-dir", str(folder)]) == 0
    new = (folder / "token").read_text().strip()
    assert new != old
    assert run_cli(["token", "rotate", "--state-dir", str(folder)]) == 16, "the former one is still valid"
    assert answers(old, new, reader_token(old), reader_token(new)) == [200] * 4
    assert run_cli(["token", "rotate", "--finish", "--state-dir", str(folder)]) == 0
    assert answers(old, new, reader_token(old)) == [401, 200, 401]
    assert run_cli(["token", "rotate", "--state-dir", str(tmp_path)]) == 8
