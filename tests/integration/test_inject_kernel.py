"""Faults that the kernel makes: real packets between two network namespaces, real bytes of a process in a group."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from host_daemon.store.database import HostDatabase
from simulator.inject.host_files import HostFiles
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.hosts import start_again, start_plan
from simulator.inject.kinds.kind import FaultSite
from simulator.inject.kinds.namespaces import held_open
from simulator.inject.kinds.packet_delay import DelayedPackets
from simulator.inject.processes import look_at

OWN, OTHER = "198.19.252.1", "198.19.252.2"
ECHO = f"""
import socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); echo.bind(("{OWN}", 5001)); print(flush=True)
while True: echo.sendto(*echo.recvfrom(100))
"""
ASK = f"""
import json, socket, sys, time
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); asking.settimeout(2.0)
for line in sys.stdin:
    began, times = time.monotonic(), []
    for number in range(int(line)): asking.sendto(b"x", ("{OWN}", 5001))
    try:
        while len(times) < int(line): asking.recv(100); times.append(time.monotonic() - began)
    except TimeoutError: pass
    print(json.dumps(times), flush=True)
"""


class Cable:
    """Two network namespaces on one cable: `host` is the one that is broken, and answers; the other asks."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.host, self.other = self._namespace(), self._namespace()
        ours = (f"fbk{os.getpid()}a", f"fbk{os.getpid()}b")
        _run("ip", "link", "add", ours[0], "type", "veth", "peer", "name", ours[1])
        for name, process, address in zip(ours, (self.host, self.other), (OWN, OTHER), strict=True):
            _run("ip", "link", "set", name, "netns", str(process.pid))
            inside = ("nsenter", f"--net=/proc/{process.pid}/ns/net", "ip")
            _run(*inside, "address", "add", f"{address}/30", "dev", name)
            _run(*inside, "link", "set", name, "up")
        self._start(self.host, ECHO).stdout.readline()  # type: ignore[union-attr]
        self.asking = self._start(self.other, ASK)

    def _namespace(self) -> subprocess.Popen[str]:
        process = self._spawn("unshare", "--net", sys.executable, "-S", "-c", "input(print(flush=True))")
        assert process.stdout
        process.stdout.readline()
        return process

    def _start(self, where: subprocess.Popen[str], code: str) -> subprocess.Popen[str]:
        return self._spawn("nsenter", f"--net=/proc/{where.pid}/ns/net", sys.executable, "-S", "-c", code)

    def _spawn(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def answers(self, asked: int) -> list[float]:
        """Seconds until each answer to so many packets, sent at once."""
        assert self.asking.stdin and self.asking.stdout
        self.asking.stdin.write(f"{asked}\n")
        self.asking.stdin.flush()
        return list(json.loads(self.asking.stdout.readline()))

    def namespace(self) -> Path:
        return Path(f"/proc/{self.host.pid}/ns/net")

    def rules(self) -> str:
        return _run("nsenter", f"--net={self.namespace()}", "nft", "list", "ruleset")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60.0)
            for stream in (process.stdin, process.stdout):
                assert stream
                stream.close()


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "nft", "iptables") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"the commands {', '.join(missing)} are missing")
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True, timeout=60).returncode:
        pytest.skip("network namespaces are not permitted here")
    made = Cable()
    yield made
    made.end()


def folder(path: Path) -> HostFiles:
    path.mkdir()
    (path / "VERSION").write_text("1\n")
    HostDatabase(path / "daemon.sqlite").close()
    return HostFiles(path)


@pytest.fixture
def site(tmp_path: Path, cable: Cable, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a maker of sites
    """Of a host whose daemon is in the cable's namespace."""
    daemon = look_at(cable.host.pid)
    monkeypatch.setattr(HostFiles, "daemon", lambda _: daemon)
    files = folder(tmp_path / "host-a")

    def made(kind: str, **options: str) -> FaultSite:
        return FaultSite(
            None,  # type: ignore[arg-type] - nothing is asked
            SystemClock(),
            "a1b2c3d4",
            host_id="host-a",
            files=files,
            values=KINDS[kind].values(options),
        )

    return made


def test_packets_are_lost_at_random_and_arrive_again_when_it_is_undone(cable: Cable, site: Any) -> None:  # noqa: ANN401
    kind, asked = KINDS["net-loss"], site("net-loss", percent="30")
    assert kind.lacks(asked) == ""
    plan = json.loads(json.dumps(kind.plan(asked)))
    kind.inject(plan)
    try:
        assert 70 < len(cable.answers(200)) < 190, "140 are expected, with a deviation of 6.5"
    finally:
        kind.undo(plan)
    kind.undo(plan)
    assert len(cable.answers(200)) == 200 and plan["table"] not in cable.rules()


def test_packets_are_delayed_until_it_is_undone(cable: Cable, site: Any) -> None:  # noqa: ANN401
    kind, asked = KINDS["net-delay"], site("net-delay", delay_ms="300")
    plan = json.loads(json.dumps(kind.plan(asked)))
    over = threading.Event()
    kind.inject(plan)
    holding = threading.Thread(target=kind.hold, args=(plan, over))
    holding.start()
    try:
        delayed = cable.answers(50)
    finally:
        over.set()
        holding.join(60.0)
        kind.undo(plan)
    kind.undo(plan)
    assert len(delayed) == 50 and min(delayed) >= 0.3
    assert min(cable.answers(1)) < 0.3 and plan["queue"] not in cable.rules()


def test_a_delay_whose_injector_was_killed_delays_nothing(cable: Cable, site: Any) -> None:  # noqa: ANN401
    """The queue is closed with its process. The rule is left; it is undone by the journal, without the queue."""
    kind = KINDS["net-delay"]
    plan = kind.plan(site("net-delay", delay_ms="10000"))
    kind.inject(plan)
    try:
        with pytest.raises(ConfigurationError, match="no queue for packets"):
            DelayedPackets(cable.namespace(), int(plan["queue"]))
        kind._queues.pop(plan["queue"])._socket.close()  # type: ignore[attr-defined] - as the kernel does at its death
        assert plan["queue"] in cable.rules() and len(cable.answers(20)) == 20
    finally:
        type(kind)().undo(plan)
    assert plan["queue"] not in cable.rules()


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [("net-loss", "percent", "0"), ("net-loss", "percent", "101"), ("net-delay", "delay_ms", "0")],
)
def test_a_loss_or_delay_that_is_none_is_refused(site: Any, kind: str, option: str, value: str) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=option):
        KINDS[kind].plan(site(kind, **{option: value}))


def test_a_process_starts_again_in_its_network_although_nothing_is_left_in_it(cable: Cable, tmp_path: Path) -> None:
    found = look_at(cable._namespace().pid)
    assert found is not None
    where = ("-S", "-c", "import os; print(os.readlink('/proc/self/ns/net'))")
    plan = start_plan(found, "") | {"argv": [sys.executable, *where]}
    log = tmp_path / "log"
    with held_open(plan["namespace"]) as namespace:
        cable.processes[-1].kill()
        cable.processes[-1].wait(60.0)
        start_again(plan, log, namespace)
        until(lambda: log.read_text().endswith("\n"), "what the process says")
    assert log.read_text() == f"{plan['namespace']}\n"

    def is_gone() -> bool:
        with held_open(plan["namespace"]) as namespace:
            return namespace is None

    until(is_gone, "the end of the process, and of its network with it")
    with pytest.raises(NotFound, match="namespace is gone: it was not started again"):
        start_again(plan, log, None)
    state = tmp_path / "host-b"
    state.mkdir()
    with pytest.raises(NotFound, match="namespace is gone: nothing was done"):
        KINDS["host-reboot"].inject(plan | {"state_dir": str(state), "prefix": str(tmp_path / "fb"), "token": {}})
    assert state.exists()


WRITE = """
import os, sys, time
for line in sys.stdin:
    began = time.monotonic()
    with open(line.strip(), "wb") as file:
        file.write(bytes(2_000_000)); file.flush(); os.fsync(file.fileno())
    print(time.monotonic() - began, flush=True)
"""


def test_a_disk_is_slow_for_the_hosts_processes_until_it_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["disk-slow"]
    files = folder(tmp_path / "host-a")
    asked = FaultSite(
        None, SystemClock(), "a1b2c3d5", host_id="host-a", files=files, values=kind.values({"mb_per_s": "2"})
    )  # type: ignore[arg-type]
    if kind.lacks(asked):
        pytest.skip(kind.lacks(asked))
    with subprocess.Popen(
        [sys.executable, "-S", "-c", WRITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writing:
        assert writing.stdin and writing.stdout
        found = look_at(writing.pid)
        monkeypatch.setattr(HostFiles, "processes", lambda _: [found])
        plan = json.loads(json.dumps(kind.plan(asked)))
        groups = Path(f"/proc/{writing.pid}/cgroup").read_text()

        def written_s() -> float:
            writing.stdin.write(f"{files.root / 'shard'}\n")  # type: ignore[union-attr]
            writing.stdin.flush()  # type: ignore[union-attr]
            return float(writing.stdout.readline())  # type: ignore[union-attr]

        kind.inject(plan)
        try:
            assert written_s() > 0.9
        finally:
            kind.undo(plan)
        kind.undo(plan)
        assert Path(f"/proc/{writing.pid}/cgroup").read_text() == groups and not Path(plan["group"]).exists()
        writing.stdin.close()
