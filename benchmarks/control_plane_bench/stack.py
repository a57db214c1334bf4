"""Starts a control plane for one run: a database, a Redis server, and a process for each service."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pymysql
from sqlalchemy import insert, select

from control_plane_bench.fleet import INTERVAL_S, RANKS_PER_HOST, placed
from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.decisions import GenerationPlan
from services.record.codec import dump
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate
from services.store.sql.tables import generations, incidents, jobs

START_TIMEOUT_S = 300.0  # on a machine that much else uses
STOP_TIMEOUT_S = 20.0
SERVICES = ("sensor", "controller", "actuator")
ROOT = Path(__file__).resolve().parents[2]


class Service(msgspec.Struct, frozen=True):
    process: subprocess.Popen[bytes]
    port: int

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics, keyed by name and labels as written there."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


class Stack(msgspec.Struct, frozen=True):
    """The running control plane."""

    secret: str
    database: Database
    services: dict[str, Service]

    @property
    def sensor(self) -> Service:
        return self.services["sensor"]


@contextmanager
def running_stack(folder: Path, *, bus: str, database_url: str) -> Iterator[Stack]:
    """Run a control plane. Without a `database_url`, create a database on the MariaDB server at 127.0.0.1:3306, and
    drop it afterwards."""
    with ExitStack() as stack:
        url = database_url or stack.enter_context(_own_database())
        database = Database(url)
        stack.callback(database.close)
        migrate(database)
        secret = secrets.token_urlsafe(32)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLYBALL_")}
        environment |= {"FLYBALL_POLICY": msgspec.json.encode({"max_actions_per_hour": 1_000_000}).decode()}
        environment |= {"FLYBALL_DATABASE_URL": url, "FLYBALL_TOKEN": secret, "FLYBALL_LOG_LEVEL": "warning"}
        if bus == "redis":
            environment["FLYBALL_REDIS_URL"] = stack.enter_context(_own_redis(folder))
        services = {part: stack.enter_context(_service(part, folder, environment)) for part in SERVICES}
        for part, service in services.items():
            _wait_until(lambda service=service: _is_open(service.port), f"start of the {part}", folder)  # type: ignore[misc]
        yield Stack(secret, database, services)


def false_incidents(database: Database, real: str) -> list[str]:
    """Return the causes of incidents of jobs whose names do not begin with `real`, each with its job: nothing else
    fails."""
    query = select(incidents.c.job, incidents.c.cause, incidents.c.host_id).order_by(incidents.c.number)
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [f"{cause} of {job or host_id}" for job, cause, host_id in rows if not (job or host_id).startswith(real)]


def add_jobs(database: Database, names: list[list[str]], *, first: int = 0, starts_in_s: float = INTERVAL_S) -> None:
    """Insert running jobs, one for each list of hosts; numbered from `first` on. `starts_in_s`: by then their hosts
    should report ranks, and this returns long before."""
    now = SystemClock().wall_s()
    with database.write() as connection:
        for number, hosts in enumerate(names, first):
            job = f"fleet-{number}"
            spec = JobSpec(job, ("train.py",), "/", nnodes=len(hosts), nproc_per_node=RANKS_PER_HOST)
            plan = GenerationPlan(job, 1, None, placed(hosts), {}, (), 0)
            connection.execute(
                insert(jobs).values(
                    job=job,
                    spec=dump(spec),
                    state=JobState.RUNNING.value,
                    message="running",
                    submitted_at=now,
                    ended_at=0.0,
                    stop_requested=False,
                    newest_step=-1,
                    generation=1,
                    loss="",
                    loss_step=-1,
                )
            )
            connection.execute(
                insert(generations).values(
                    job=job,
                    generation=1,
                    decision=0,
                    plan=dump(plan),
                    granted_at=now,
                    started_at=now + starts_in_s,
                    restore_step=None,
                    lineage=dump((LineageEntry(1),)),
                    placement=None,
                )
            )


@contextmanager
def _own_database() -> Iterator[str]:
    name = f"flyball_bench_{secrets.token_hex(6)}"
    server: dict[str, Any] = {"host": "127.0.0.1", "port": 3306, "user": "root", "password": "", "connect_timeout": 5}
    with pymysql.connect(**server) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    try:
        yield f"mysql://root@127.0.0.1:3306/{name}"
    finally:
        with pymysql.connect(**server) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


@contextmanager
def _own_redis(folder: Path) -> Iterator[str]:
    port = _free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with _process([*command, "--appendonly", "yes"], folder / "redis.log", dict(os.environ)):
        _wait_until(lambda: _is_open(port), "start of Redis", folder)
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _service(part: str, folder: Path, environment: dict[str, str]) -> Iterator[Service]:
    port = _free_port()
    own = {"FLYBALL_STATE_DIR": str(folder / part), "FLYBALL_PORT": str(port)}
    command = [sys.executable, "-P", "-m", "services.main", part]
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    with _process(command, folder / f"{part}.out", environment | own | {"PYTHONPATH": path}) as process:
        yield Service(process, port)


@contextmanager
def _process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


_given: set[int] = set()


def _free_port() -> int:
    """Return a free port below the range of outgoing connections, so that it is still free when its service starts."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(condition: Any, what: str, folder: Path) -> None:  # noqa: ANN401 - a callable of anything
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            logs = "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in folder.glob("*.out"))
            raise TimeoutError(f"no {what} within {START_TIMEOUT_S:.0f} s\n{logs}")
        time.sleep(0.05)
