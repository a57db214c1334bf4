"""The control plane as processes: all parts in one, each part alone, ended by SIGTERM and by SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import host_credential
from flyball.contracts.wire import WIRE_VERSION

CLOCK = SystemClock()
DEADLINE_S = 300.0
ROOT = Path(__file__).parents[2]
PATIENT = {"FLYBALL_START_TIMEOUT_S": str(DEADLINE_S), "FLYBALL_DRAIN_TIMEOUT_S": str(DEADLINE_S)}


class Part:
    """One process of the control plane."""

    def __init__(self, part: str, state_dir: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.name = part
        self.state_dir = state_dir
        state_dir.parent.mkdir(exist_ok=True)
        self._log = (state_dir.parent / f"{part}.err").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.main", part, "--state-dir", state_dir, "--port", "0", *arguments],
            cwd=ROOT,
            env=os.environ | PATIENT | (environment or {}),
            stderr=self._log,
        )

    def client(self, host_id: str = "") -> httpx.Client:
        """A client once it serves: the operator's, or a host's."""
        record = self.state_dir / ("supervisor.json" if self.name in ("all", "api") else f"{self.name}.json")

        def its_url() -> str | None:
            assert self.process.poll() is None, self.errors()
            found = json.loads(record.read_text()) if record.exists() else {}
            return found["url"] if found.get("pid") == self.process.pid else None

        url = until(its_url, f"{self.name} serves")
        token = (self.state_dir / "token").read_text().strip()
        token = host_credential(token, host_id).token if host_id else token
        return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=DEADLINE_S)

    def errors(self) -> str:
        return (self.state_dir.parent / f"{self.name}.err").read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self._log.close()
        return code


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Part]]:
    started: list[Part] = []

    def run_one(part: str, *arguments: str, environment: dict[str, str] | None = None) -> Part:
        started.append(Part(part, tmp_path / "state", *arguments, environment=environment))
        return started[-1]

    yield run_one
    for part in started:
        part.end(signal.SIGKILL)


def report(host_id: str, signals: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    facts = {
        "host_id": host_id,
        "address": "127.0.0.1",
        "failure_domain": "rack-1",
        "engine_address": "127.0.0.1:1",
        "free_port": 29_500,
        "daemon_version": "0.1.0",
        "pid": 1,
    }
    return {
        "version": WIRE_VERSION,
        "incarnation": f"inc-{host_id}",
        "sent_at": CLOCK.wall_s(),
        "interval_s": 30.0,
        "facts": facts,
        "engine": {"alive": True},
        "signals": signals or [],
    }


def hosts(client: httpx.Client) -> list[str]:
    return [host["host_id"] for host in client.get("/v1/hosts").json()["items"]]


def test_each_part_as_its_own_process(run: Callable[..., Part]) -> None:
    parts = {name: run(name) for name in ("controller", "api", "actuator", "sensor")}
    clients = {name: part.client("host-a" if name in ("sensor", "actuator") else "") for name, part in parts.items()}
    until(lambda: clients["api"].get("/readyz").status_code == 200, "the API knows the leader")
    assert clients["controller"].get("/v1/jobs").status_code == 404, "a part serves its own routes only"

    assert clients["sensor"].post("/v1/reports", json=report("host-a")).status_code == 200
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


def test_sigterm_stores_what_was_received(run: Callable[..., Part]) -> None:
    first = run("all")
    names = [f"host-{number}" for number in range(20)]
    with ExitStack() as stack:
        clients = {name: stack.enter_context(first.client(name)) for name in names}
        for name, client in clients.items():
            assert client.post("/v1/reports", json=report(name)).status_code == 200
        first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0
    assert "serving" in first.errors()
    assert not (first.state_dir / "supervisor.json").exists()
    with run("all").client() as client:
        assert hosts(client) == sorted(names)


def test_kill_9_loses_no_signal(run: Callable[..., Part]) -> None:
    notice = {
        "source": "host-a",
        "incarnation": "inc-host-a",
        "seq": 1,
        "at": CLOCK.wall_s(),
        "body": {"type": "preemption_notice", "deadline_at": CLOCK.wall_s() + 60.0, "source": "test"},
    }
    first = run("all", environment={"FLYBALL_FAULT_POINT": "sensor.before_publish"})
    with first.client("host-a") as client:
        # Killed with the signal only in memory: if there was a reply, it did not report the signal as committed.
        try:
            committed = client.post("/v1/reports", json=report("host-a", [notice])).json()["committed"]
        except httpx.TransportError:
            committed = {}
    assert committed == {}
    assert first.process.wait(DEADLINE_S) == -signal.SIGKILL
    with run("all").client("host-a") as client:
        until(
            lambda: (
                client.post("/v1/reports", json=report("host-a", [notice])).json()["committed"] == {"inc-host-a": 1}
            ),
            "the repeated signal is committed",
        )


def test_errors_are_short_and_have_a_code(run: Callable[..., Part], tmp_path: Path) -> None:
    first = run("all")
    first.client().close()
    second = run("sensor")
    assert second.process.wait(DEADLINE_S) == 3
    assert "runs the sensor in" in second.errors()
    assert "Next step:" in second.errors()
    assert "Traceback" not in second.errors()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = Part("api", tmp_path / "other" / "state", "--port", str(taken.getsockname()[1]))
        assert other.process.wait(DEADLINE_S) == 4
        assert "is in use" in other.errors()
        other.end()
