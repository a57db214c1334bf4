"""Servers that are told to end, and are started again once they have."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flyball.contracts.errors import ConfigurationError, NotFound
from simulator.inject.kinds import services
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.hosts import start_plan
from simulator.inject.kinds.kind import Plan
from simulator.inject.kinds.processes import of_process
from simulator.inject.processes import look_at

pytestmark = pytest.mark.processes

KIND = KINDS["server-stop"]
SERVER = """
import signal, sys
def end(*_): print(flush=True); sys.stdin.readline(); sys.exit()
signal.signal(signal.SIGTERM, end); print(flush=True)
while True: signal.pause()
"""


class Server:
    """A process that ends some time after SIGTERM: when it is told so."""

    def __init__(self, log: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wait_line()
        found = look_at(self.process.pid)
        assert found is not None
        self.plan: Plan = of_process(found) | start_plan(found, "services.main") | {"log": str(log)}

    def wait_line(self) -> None:
        assert self.process.stdout
        self.process.stdout.readline()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "log")
    with made.process:
        yield made
        made.process.kill()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    plans: list[Plan] = []
    monkeypatch.setattr(services, "start_again", lambda plan, *_: plans.append(plan))
    return plans


def test_a_server_is_started_again_after_it_has_ended(server: Server, started: list[Plan]) -> None:
    KIND.inject(server.plan)
    server.wait_line()
    undoing = threading.Thread(target=KIND.undo, args=(server.plan,))
    undoing.start()
    undoing.join(0.05)
    assert undoing.is_alive() and not started, "the one that ends has the same command line"
    server.process.communicate("\n", timeout=60)
    undoing.join(60.0)
    assert started == [server.plan]


def test_a_server_that_does_not_end_is_an_error(
    server: Server, started: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "END_TIMEOUT_S", 0.01)
    KIND.inject(server.plan)
    with pytest.raises(ConfigurationError, match="still runs, so it was not started again"):
        KIND.undo(server.plan)
    assert not started


def test_a_server_that_got_no_signal_is_left_alone(server: Server, started: list[Plan]) -> None:
    KIND.undo(server.plan)  # its injector was killed before
    assert server.process.poll() is None
    server.process.kill()
    server.process.wait(60.0)
    with pytest.raises(NotFound, match="nothing was done"):
        KIND.inject(server.plan)
    KIND.undo(server.plan)
    assert not started
