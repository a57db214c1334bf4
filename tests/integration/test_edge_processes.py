"""The control plane as processes: all parts in one, each part alone, ended by SIGTERM and by SIGKILL."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.clocks.waits import DEADLINE_S, until
from support.commands.run_folders import clean_environment
from support.hosts.reports import report
from support.servers.parts import ServicePart

from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.signals import PreemptionNotice, Signal
from flyball.contracts.wire import encode

CLOCK = SystemClock()
PATIENT = {"FLYBALL_START_TIMEOUT_S": str(DEADLINE_S), "FLYBALL_DRAIN_TIMEOUT_S": str(DEADLINE_S)}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., ServicePart]]:
    started: list[ServicePart] = []

    def run_one(part: str, folder: str = "state", fault_point: str = "", port: int | None = None) -> ServicePart:
        started.append(ServicePart(part, tmp_path / folder, clean_environment(**PATIENT), port=port))
        started[-1].launch(fault_point)
        return started[-1]

    yield run_one
    for part in started:
        part.end(signal.SIGKILL)


def sent(host_id: str, *signals: Signal) -> bytes:
    made = report(host_id, CLOCK.wall_s(), interval_s=30.0, incarnation=f"inc-{host_id}", signals=signals)
    return encode(made)


def hosts(client: httpx.Client) -> list[str]:
    return [host["host_id"] for host in client.get("/v1/hosts").json()["items"]]


def test_each_part_as_its_own_process(run: Callable[..., ServicePart]) -> None:
    parts = {name: run(name) for name in ("controller", "api", "actuator", "sensor")}
    clients = {name: part.client("host-a" if name in ("sensor", "actuator") else "") for name, part in parts.items()}
    until(lambda: clients["api"].get("/readyz").status_code == 200, "the API knows the leader")
    assert clients["controller"].get("/v1/jobs").status_code == 404, "a part serves its own routes only"

    assert clients["sensor"].post("/v1/reports", content=sent("host-a")).status_code == 200
    until(lambda: hosts(clients["api"]) == ["host-a"], "what the sensor stored is seen by the API")
    spec = {"job": "demo", "argv": ["train.py"], "workdir": "/"}
    assert clients["api"].post("/v1/jobs", json=spec).status_code == 201
    poll = {"incarnation": "inc-host-a", "wait_s": 20}
    commands = until(
        lambda: clients["actuator"].get("/v1/hosts/host-a/commands", params=poll).json()["commands"], "the commands"
    )
    assert [c["body"]["type"] for c in commands] == ["start_workers"]
    metrics = {name: client.get("/metrics").text for name, client in clients.items()}
    assert "flyball_reports_received_total 1.0" in metrics["sensor"]
    assert "flyball_commands_handed_out_total 1.0" in metrics["actuator"]
    for client in clients.values():
        client.close()
    assert {name: part.end() for name, part in parts.items()} == dict.fromkeys(parts, 0)


def test_sigterm_stores_what_was_received(run: Callable[..., ServicePart]) -> None:
    first = run("all")
    names = [f"host-{number}" for number in range(20)]
    with ExitStack() as stack:
        clients = {name: stack.enter_context(first.client(name)) for name in names}
        for name, client in clients.items():
            assert client.post("/v1/reports", content=sent(name)).status_code == 200
        first.send(signal.SIGTERM)
    assert first.end() == 0
    assert "serving" in first.log()
    assert not (first.state_dir / "supervisor.json").exists()
    with run("all").client() as client:
        assert hosts(client) == sorted(names)


def test_kill_9_loses_no_signal(run: Callable[..., ServicePart]) -> None:
    notice = Signal("host-a", "inc-host-a", 1, CLOCK.wall_s(), PreemptionNotice(CLOCK.wall_s() + 60.0, "test"))
    first = run("all", fault_point="sensor.before_publish")
    with first.client("host-a") as client:
        # Killed with the signal only in memory: if there was a reply, it did not report the signal as committed.
        try:
            committed = client.post("/v1/reports", content=sent("host-a", notice)).json()["committed"]
        except httpx.TransportError:
            committed = {}
    assert committed == {}
    assert first.wait() == -signal.SIGKILL
    with run("all").client("host-a") as client:
        until(
            lambda: client.post("/v1/reports", content=sent("host-a", notice)).json()["committed"] == {"inc-host-a": 1},
            "the repeated signal is committed",
        )


def test_errors_are_short_and_have_a_code(run: Callable[..., ServicePart]) -> None:
    first = run("all")
    first.client().close()
    second = run("sensor")
    assert second.wait() == 3
    assert "runs the sensor in" in second.log()
    assert "Next step:" in second.log()
    assert "Traceback" not in second.log()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = run("api", "other", port=taken.getsockname()[1])
        assert other.wait() == 4
        assert "is in use" in other.log()
