"""What processes notify their service manager of, on a real datagram socket; and the units for systemd."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from flyball.service_manager import ServiceManager
from services.runtime.http.http_server import HttpServer

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
DEADLINE_S = 120.0
WATCHDOG_US = 1_000_000
TOKEN = "a-secret-of-24-characters"


class Manager:
    """Receives as systemd does."""

    def __init__(self, address: str) -> None:
        self.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(WATCHDOG_US)}
        self.receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiver.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.receiver.settimeout(DEADLINE_S)

    def next(self) -> str:
        return self.receiver.recv(4096).decode()

    def until(self, state: str) -> list[str]:
        """What came before `state`."""
        before: list[str] = []
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.next()) != state:
            before.append(found)
            assert time.monotonic() < deadline, before
        return before


@pytest.fixture(params=["a path", "an abstract name"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify") if request.param == "a path" else f"@flyball-test-{os.getpid()}")
    yield made
    made.receiver.close()


def test_states_and_signs_of_life(manager: Manager) -> None:
    class Clock(SystemClock):
        now_s = 100.0

        def monotonic_s(self) -> float:
            return self.now_s

    clock, environ = Clock(), manager.environment | {"HOME": "/"}
    ours = ServiceManager(environ, clock)
    assert environ == {"HOME": "/"}, "child processes must not notify in this one's name"
    ours.ready()
    ours.alive()
    clock.now_s += 0.39  # a sign every 0.4 s, for a watchdog of 1 s
    ours.alive()
    clock.now_s += 0.02
    ours.alive()
    ours.stopping()
    assert [manager.next() for _ in range(4)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "1000000"},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "@flyball-nobody-listens", "WATCHDOG_USEC": "many"},
        {"NOTIFY_SOCKET": "@flyball-nobody-listens", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
)
def test_without_a_manager_nothing_happens(environ: dict[str, str]) -> None:
    ours = ServiceManager(environ, SystemClock())
    ours.ready()
    ours.alive()
    ours.stopping()
    assert environ == {}


def test_an_event_loop_that_stands_gives_no_sign_of_life() -> None:
    blocked, released = threading.Event(), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        blocked.set()
        released.wait(DEADLINE_S)  # holds the loop
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, listener, cert_file=None, key_file=None, client_ca_file=None)
    assert not server.turns()
    server.start()
    try:
        until(server.turns)
        until(server.turns)
        request = threading.Thread(target=httpx.get, args=(f"http://127.0.0.1:{listener.getsockname()[1]}/",))
        request.start()
        assert blocked.wait(DEADLINE_S)
        server.turns()  # the answer may be that of a turn before the block
        assert not any(server.turns() for _ in range(10))
        released.set()
        until(server.turns)
        request.join()
    finally:
        released.set()
        server.stop(DEADLINE_S)


PROCESSES = {
    "control plane": ["services.main", "all", "--port", "0"],
    "flyball up": ["flyball.cli.main", "up", "--port", "0"],
    "host daemon": ["flyball.cli.main", "host", "--host-id", "host-a", "--supervisor", "http://127.0.0.1:1"],
}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_is_ready_alive_and_stops(name: str, tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    env = os.environ | manager.environment | {"FLYBALL_STATE_DIR": str(tmp_path / "s"), "FLYBALL_TOKEN": TOKEN}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *PROCESSES[name]], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        assert set(manager.until("READY=1")) <= {"WATCHDOG=1"}
        assert manager.until("WATCHDOG=1") == manager.until("WATCHDOG=1") == []
        process.send_signal(signal.SIGTERM)
        manager.until("STOPPING=1")
        assert process.wait(DEADLINE_S) in (0, 128 + signal.SIGTERM), (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        manager.receiver.close()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_says_what_it_needs(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    for line in ("Type=notify", "User=flyball", "Restart=always", "LimitNOFILE=65536", "NoNewPrivileges=yes"):
        assert line in lines
    assert any(line.startswith("WatchdogSec=") for line in lines)
    assert ("KillMode=process" in lines) == (unit.stem == "flyball-host"), "workers outlive their daemon"
    assert not any("token=" in line.lower() for line in lines if line.startswith("Environment="))


def test_there_is_a_unit_for_every_process() -> None:
    assert {unit.stem for unit in UNITS} == {
        f"flyball-{name}" for name in ("sensor", "controller", "actuator", "api", "up", "host")
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:  # with a program that is there: the units name where docs/how-to/deploying.md installs it
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/flyball/bin/python", sys.executable))
    words = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.glob("*.service")))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
