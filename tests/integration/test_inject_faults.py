"""The four faults against real processes, recorded as a host daemon records its own, and an HTTP server that answers as
a supervisor does."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flyball.cli.reach.client import ApiClient
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Forbidden, NotFound, StateVersionMismatch, Unreachable, UsageError
from flyball.contracts.events import EventKind
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE, shm_prefix
from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.condition_files import ConditionFiles
from host_daemon.store.database import HostDatabase
from simulator.inject import faults
from simulator.inject.chaos import Chaos
from simulator.inject.processes import look_at

CLOCK = SystemClock()
PAUSE = "import signal; signal.pause()"
FORK_AND_PAUSE = "import os, signal; pid = os.fork(); pid and print(pid, flush=True); signal.pause()"


class HostLookalike:
    """A state folder with processes that have the arguments, sessions and records of a real host's."""

    def __init__(self, host_id: str, folder: Path) -> None:
        self.host_id = host_id
        self.root = folder / host_id
        self.root.mkdir()
        self.shm = folder / f"{host_id}-shm"
        self.shm.mkdir()
        (self.root / "VERSION").write_text("1\n")
        HostDatabase(self.root / "daemon.sqlite").close()
        self.processes: list[subprocess.Popen[str]] = []
        self.daemon = self.start(PAUSE, "host_daemon", "--state-dir", str(self.root), "--host-id", host_id)

    def start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, *arguments],
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, SHM_DIR_VARIABLE: str(self.shm)},
        )
        self.processes.append(process)
        deadline_s = time.monotonic() + 60.0
        while (found := look_at(process.pid)) is not None and not found.argv[0]:  # in the middle of its exec
            assert time.monotonic() < deadline_s
        return process

    def worker(self, rank: int, *, generation: int = 1, code: str = PAUSE, ticks_off: int = 0) -> subprocess.Popen[str]:
        process = self.start(code)
        found = look_at(process.pid)
        assert found is not None
        with sqlite3.connect(self.root / "daemon.sqlite") as connection:
            connection.execute(
                "INSERT INTO workers (job, generation, rank, pid, start_ticks, spawned_at, log_path)"
                " VALUES ('gpt', ?, ?, ?, ?, 1.0, '')",
                (generation, rank, process.pid, found.start_ticks + ticks_off),
            )
        connection.close()
        return process

    def segment(self, name: str) -> Path:
        path = Path(f"{shm_prefix(str(self.root.resolve()), str(self.shm))}.{name}")
        path.write_bytes(b"x")
        return path

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(60.0)
            if process.stdout:
                process.stdout.close()


class Supervisor:
    """Answers what the injector asks, and keeps the events that it posts."""

    def __init__(self) -> None:
        self.state = "running"
        self.ranks: dict[int, str] = {}
        self.hosts: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []
        self.takes_events = self.injectable = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str) -> dict[str, Any] | None:
        job = {
            "job": "gpt",
            "state": self.state,
            "world_size": 1,
            "spec": {"injectable": self.injectable},
            "ranks": [{"rank": rank, "host_id": host} for rank, host in self.ranks.items()],
        }
        answers: dict[str, dict[str, Any]] = {"/v1/jobs": {"items": [job]}, "/v1/jobs/gpt": job}
        for host, pid in self.hosts.items():
            job_there = "gpt" if host in self.ranks.values() and self.state == "running" else ""
            answers[f"/v1/hosts/{host}"] = {"host_id": host, "daemon_pid": pid, "job": job_there}
        return answers.get(path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                missing = {"detail": f"There is no {self.path}.", "code": "not_found", "hint": "look"}
                answer = supervisor.answer(self.path)
                self._reply(200 if answer else 404, answer or missing)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not supervisor.takes_events:
                    self._reply(503, {"detail": "The database is away.", "code": "unreachable", "hint": "wait"})
                    return
                supervisor.events += body
                self._reply(204, None)

            def _reply(self, status: int, body: dict[str, Any] | None) -> None:
                data = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    server = Supervisor()
    yield server
    server.close()


@pytest.fixture
def api(supervisor: Supervisor) -> Iterator[ApiClient]:
    with ApiClient(supervisor.url, "token") as client:
        yield client


@pytest.fixture
def host(tmp_path: Path, supervisor: Supervisor) -> Iterator[HostLookalike]:
    made = HostLookalike("host-a", tmp_path)
    supervisor.hosts["host-a"] = made.daemon.pid
    supervisor.ranks = {0: "host-a", 1: "host-a"}
    yield made
    made.end()


@pytest.fixture
def other_host(tmp_path: Path, supervisor: Supervisor) -> Iterator[HostLookalike]:
    made = HostLookalike("host-b", tmp_path)
    supervisor.hosts["host-b"] = made.daemon.pid
    supervisor.ranks[2] = "host-b"
    yield made
    made.end()


def test_kill_ends_the_newest_worker_of_that_rank_and_no_other(
    api: ApiClient, supervisor: Supervisor, host: HostLookalike
) -> None:
    neighbour, older, target = host.worker(0), host.worker(1), host.worker(1, generation=2)
    before = CLOCK.wall_s()

    injection = faults.kill(api, job="gpt", rank=1, clock=CLOCK)

    assert target.wait(60.0) == -signal.SIGKILL
    assert neighbour.poll() is older.poll() is None
    assert before <= injection.at <= CLOCK.wall_s()
    assert (injection.host_id, injection.generation, injection.pids) == ("host-a", 2, (target.pid,))
    (event,) = supervisor.events
    assert event["kind"] == EventKind.FAULT_INJECTED
    assert (event["at"], event["job"], event["rank"], event["host_id"]) == (injection.at, "gpt", 1, "host-a")
    assert event["data"] == {"fault": "kill", "target": "rank 1 on host-a"}


def test_a_job_without_the_mark_is_left_alone(api: ApiClient, supervisor: Supervisor, host: HostLookalike) -> None:
    supervisor.injectable = False
    rank, on = {"job": "gpt", "rank": 0, "clock": CLOCK}, {"host_id": "host-a", "clock": CLOCK}
    target = host.worker(0)
    condition = partial(faults.condition, api, kind="gpu-lost", **on)
    for act in (
        *(partial(one, api, **rank) for one in (faults.kill, faults.hang)),
        *(partial(one, api, **on) for one in (faults.host_down, faults.preempt)),
        condition,
        Chaos(api, job="gpt", host_id="host-a", every_s=60.0, seed=1, clock=CLOCK, announce=print).take_turn,
    ):
        with pytest.raises(Forbidden, match="Job gpt may not be broken on purpose: nothing was done"):
            act()
    assert target.poll() is host.daemon.poll() is None and not supervisor.events
    condition(ends=True)


def test_hang_stops_the_worker_and_leaves_it_alive(api: ApiClient, supervisor: Supervisor, host: HostLookalike) -> None:
    target = host.worker(0)

    faults.hang(api, job="gpt", rank=0, clock=CLOCK)

    _, status = os.waitpid(target.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    assert supervisor.events[0]["data"]["fault"] == "hang"


def test_a_pid_that_now_belongs_to_another_process_is_not_signalled(
    api: ApiClient, supervisor: Supervisor, host: HostLookalike
) -> None:
    innocent = host.worker(0, ticks_off=-1)  # the record is of a process that started earlier

    with pytest.raises(NotFound, match=r"does not run on host-a .* nothing was done"):
        faults.kill(api, job="gpt", rank=0, clock=CLOCK)

    assert innocent.poll() is None
    assert supervisor.events == []


def test_a_worker_that_has_ended_is_not_found(api: ApiClient, host: HostLookalike) -> None:
    target = host.worker(0)
    target.kill()
    target.wait(60.0)
    with pytest.raises(NotFound, match="wait until the job has recovered"):
        faults.hang(api, job="gpt", rank=0, clock=CLOCK)


def test_host_down_leaves_nothing_of_the_host_and_everything_of_the_others(
    api: ApiClient, supervisor: Supervisor, host: HostLookalike, other_host: HostLookalike
) -> None:
    host.start(PAUSE, "ckpt_engine.host.server", "--state-dir", str(host.root))
    host.start(PAUSE, "host_daemon.spawning.spawner", f"--state-dir={host.root}")
    worker = host.worker(0, code=FORK_AND_PAUSE)
    assert worker.stdout
    grandchild = look_at(int(worker.stdout.readline()))
    slots = [host.segment("gpt.r0.s0"), host.segment("gpt.p2.ctl"), host.segment("gpt.g1.r0.beacon")]
    other_host.worker(2)
    kept = [other_host.segment("gpt.r2.s0"), host.shm / "flyball-0123456789.gpt.r0.s0"]
    kept[1].write_bytes(b"of a host with the same folder for shared memory")

    injection = faults.host_down(api, host_id="host-a", clock=CLOCK)

    assert [p.wait(60.0) for p in host.processes] == [-signal.SIGKILL] * 4
    assert grandchild is not None
    assert look_at(grandchild.pid) is None
    assert set(injection.pids) == {*(p.pid for p in host.processes), grandchild.pid}
    assert injection.pids[0] == host.daemon.pid
    assert not host.root.exists()
    assert not any(path.exists() for path in slots)
    assert injection.removed_segments == 3
    assert all(path.exists() for path in kept)
    assert [p.poll() for p in other_host.processes] == [None, None]
    assert other_host.root.exists()
    (event,) = supervisor.events
    assert (event["job"], event["host_id"], event["data"]["fault"]) == ("gpt", "host-a", "host-down")
    kept[1].unlink()


def test_a_host_without_a_daemon_can_be_lost_too_if_its_folder_is_named(
    api: ApiClient, supervisor: Supervisor, host: HostLookalike
) -> None:
    worker = host.worker(0)
    host.daemon.kill()
    host.daemon.wait(60.0)
    with pytest.raises(NotFound, match="--state-dir"):
        faults.host_down(api, host_id="host-a", clock=CLOCK)

    faults.host_down(api, host_id="host-a", clock=CLOCK, state_dir=host.root)

    assert worker.wait(60.0) == -signal.SIGKILL
    assert not host.root.exists()


def test_preempt_writes_the_notice_whole(api: ApiClient, supervisor: Supervisor, host: HostLookalike) -> None:
    injection = faults.preempt(api, host_id="host-a", deadline_s=12.5, clock=CLOCK)

    assert json.loads((host.root / "preemption-notice.json").read_bytes()) == {
        "deadline_s": 12.5,
        "source": "flyball inject",
    }
    assert [p.name for p in host.root.glob(".preemption*")] == []
    assert host.daemon.poll() is None
    assert injection.jobs == ("gpt",)
    assert supervisor.events[0]["data"] == {"fault": "preempt", "target": "host host-a, 12.5 s of notice"}


def test_a_condition_is_reported_and_taken_back(api: ApiClient, supervisor: Supervisor, host: HostLookalike) -> None:
    made = {"host_id": "host-a", "kind": "gpu-lost", "clock": CLOCK}
    faults.condition(api, severity=Severity.WARNING, **made)
    (told,) = ConditionFiles(host.root / "conditions").read().states
    assert (told.kind, told.severity, told.subject) == ("gpu-lost", Severity.WARNING, "injected-gpu-lost")
    for _ in range(2):
        faults.condition(api, ends=True, **made)
    assert ConditionFiles(host.root / "conditions").read().states == ()
    targets = [event["data"]["target"] for event in supervisor.events]
    assert targets == ["host host-a, warning gpu-lost", *2 * ["host host-a, gpu-lost is over"]]
    with pytest.raises(UsageError):
        faults.condition(api, host_id="host-a", kind="../x", clock=CLOCK)


def test_a_host_without_a_job_is_noted_down_too(api: ApiClient, supervisor: Supervisor, host: HostLookalike) -> None:
    supervisor.state = "succeeded"
    faults.preempt(api, host_id="host-a", clock=CLOCK)
    assert [e["job"] for e in supervisor.events] == [""]


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_a_notice_without_time_is_refused(api: ApiClient, host: HostLookalike, deadline_s: float) -> None:
    with pytest.raises(UsageError):
        faults.preempt(api, host_id="host-a", deadline_s=deadline_s, clock=CLOCK)


def test_unknown_targets_say_what_there_is(api: ApiClient, supervisor: Supervisor, host: HostLookalike) -> None:
    with pytest.raises(NotFound, match=r"no rank 7.*0, 1"):
        faults.kill(api, job="gpt", rank=7, clock=CLOCK)
    with pytest.raises(NotFound, match="host-z"):
        faults.host_down(api, host_id="host-z", clock=CLOCK)
    supervisor.state = "failed"
    with pytest.raises(NotFound, match="has ended"):
        faults.kill(api, job="gpt", rank=0, clock=CLOCK)


def test_a_folder_that_is_no_state_folder_is_left_alone(api: ApiClient, host: HostLookalike, tmp_path: Path) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    with pytest.raises(NotFound, match="nothing was done"):
        faults.host_down(api, host_id="host-a", clock=CLOCK, state_dir=precious)
    (precious / "VERSION").write_text("1")
    with pytest.raises(NotFound, match=r"no daemon\.sqlite"):
        faults.host_down(api, host_id="host-a", clock=CLOCK, state_dir=precious)
    (precious / "daemon.sqlite").write_text("")
    (precious / "VERSION").write_text("2")
    with pytest.raises(StateVersionMismatch):
        faults.host_down(api, host_id="host-a", clock=CLOCK, state_dir=precious)
    assert precious.exists()
    assert host.daemon.poll() is None


def test_the_pid_of_a_process_that_is_no_daemon_is_not_believed(
    api: ApiClient, supervisor: Supervisor, host: HostLookalike
) -> None:
    supervisor.hosts["host-a"] = os.getpid()  # the real one runs on another machine
    with pytest.raises(NotFound, match="does not run on this machine"):
        faults.preempt(api, host_id="host-a", clock=CLOCK)


def test_a_fault_that_could_not_be_noted_down_was_injected_all_the_same(
    api: ApiClient, supervisor: Supervisor, host: HostLookalike
) -> None:
    target = host.worker(0)
    supervisor.takes_events = False
    with pytest.raises(Unreachable, match=r"The fault was injected, but .* The database is away"):
        faults.kill(api, job="gpt", rank=0, clock=CLOCK)
    assert target.wait(60.0) == -signal.SIGKILL
