"""Two sensors, controllers and actuators, Redis and MariaDB as processes of their own, and a job on two hosts: each of
them is killed, stopped for longer than the lease, or loses what it knew, while a worker dies. Every such incident is
decided once and training is back, by what the database says.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from recovery_processes import PATIENT, Part

from flyball.contracts.clock import SystemClock
from services.store.sql.database import Database
from simulator.database_check import check_database

LEASE_TTL_S = 1.5
BOUND_S = 60.0  # for an incident to be closed
DEPOSED = "not_leading_any_more"  # what a controller logs
KINDS = ("sensor", "controller", "actuator")


class Cluster:
    def __init__(self, make_stack, redis, mariadb) -> None:  # type: ignore[no-untyped-def]  # fixtures
        token = secrets.token_hex(16)
        self.redis, self.mariadb = redis, mariadb
        self.stack = make_stack(
            FLYBALL_DATABASE_URL=mariadb.url,
            FLYBALL_REDIS_URL=redis.url,
            FLYBALL_LEASE_TTL_S=str(LEASE_TTL_S),
            FLYBALL_TOKEN=token,
            **PATIENT,
        )
        folder = self.stack.root / "supervisor"  # where the hosts of a stack look for their token
        folder.mkdir(mode=0o700)
        (folder / "token").write_text(token)
        (folder / "token").chmod(0o600)
        parts = {"api": Part(self.stack.root, "api", self.stack.environment)}
        for kind in KINDS:
            for number in (1, 2):
                name = f"{kind}-{number}"
                parts[name] = Part(self.stack.root, kind, self.stack.environment, folder=name)
        self.stack.parts = parts
        self.stack.daemons_url = parts["api"].url
        for kind in ("sensor", "actuator"):
            urls = ",".join(part.url for part in self.of(kind))
            self.stack.environment[f"FLYBALL_{kind.upper()}_URLS"] = urls
        self.db = Database(mariadb.url)

    def of(self, kind: str) -> list[Part]:
        return [part for part in self.stack.parts.values() if part.name == kind]

    def start(self, *parts: Part) -> None:
        for part in parts:
            part.launch()
        for part in parts:
            part.wait_up()

    def leader(self) -> Part:
        """Who was elected last."""

        def epoch(controller: Part) -> int:
            return max((line["epoch"] for line in controller.logged("leading")), default=0)

        return max(self.of("controller"), key=epoch)

    def stop_leader(self) -> Part:
        """Stop a controller that believes to lead. It may lose that at any moment before, if it is held up."""
        while True:
            leader = self.leader()
            leader.send(signal.SIGSTOP)
            process = psutil.Process(leader.process.pid)
            self.stack.until("its stop", lambda process=process: process.status() == psutil.STATUS_STOPPED)
            ended = [line["epoch"] for line in leader.logged(DEPOSED)]
            if leader.logged("leading")[-1]["epoch"] not in ended:
                return leader
            leader.send(signal.SIGCONT)

    def misses(self, part: Part) -> set[str]:
        """What a process says that it cannot do without."""
        checks = httpx.get(f"{part.url}/readyz", timeout=60.0, trust_env=False).json()["checks"]
        return {name for name, why in checks.items() if why != "ok"}

    def check_database(self) -> None:
        assert check_database(self.db, now=SystemClock().wall_s(), bound_s=BOUND_S) == []


@pytest.fixture(scope="module")
def cluster(make_stack, redis_of_module, own_mariadb) -> Iterator[Cluster]:
    cluster = Cluster(make_stack, redis_of_module(), own_mariadb())
    cluster.start(*cluster.stack.parts.values())
    cluster.stack.add_hosts("host-a", "host-b")
    yield cluster
    cluster.db.close()


@pytest.fixture(scope="module")
def job(cluster):
    return cluster.stack.train("served", nnodes=2, nproc_per_node=1)


@pytest.fixture
def one_incident(cluster, job):
    """Whatever happens in its block: a worker is killed, that is decided once, and training is back."""

    @contextmanager
    def one_incident() -> Iterator[None]:
        with job.next_incident() as incident:
            yield
        assert (incident["state"], incident["cause"]) == ("resolved", "worker_killed"), incident
        assert [d["kind"] for d in job.decisions(incident)] == ["restart_in_place"]
        assert incident["lost_steps"] <= 1
        job.train_on()
        cluster.check_database()

    return one_incident


def kill_worker(job, rank: int = 1) -> None:
    os.kill(job.pid_of(rank), signal.SIGKILL)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_kind_are_killed_and_started_again_during_an_incident(cluster, job, one_incident, kind: str) -> None:
    with one_incident():
        for part in cluster.of(kind):
            part.kill()
        kill_worker(job)
        cluster.start(*cluster.of(kind))


def test_one_of_each_kind_is_stopped_for_longer_than_the_lease(cluster, job, one_incident) -> None:
    others = [cluster.of("sensor")[0], cluster.of("actuator")[1]]
    with one_incident():
        leader = cluster.stop_leader()
        for part in others:
            part.send(signal.SIGSTOP)
        known = len(leader.logged("leading")), len(leader.logged(DEPOSED))
        decided = len(cluster.stack.api.items("/v1/decisions", job=job.name))
        kill_worker(job)
        cluster.stack.until(
            "the decision of the other controller, which has waited for the lease",
            lambda: len(cluster.stack.api.items("/v1/decisions", job=job.name)) > decided,
        )
        assert cluster.leader() is not leader
        for part in (leader, *others):
            part.send(signal.SIGCONT)

    def has_seen_it() -> bool:
        """It is told so, or elected again, if the other one was held up meanwhile."""
        return (len(leader.logged("leading")), len(leader.logged(DEPOSED))) != known

    cluster.stack.until("that the stopped one sees it", has_seen_it)


def test_a_leader_that_comes_back_in_the_middle_of_a_commit_is_refused(cluster, job, one_incident) -> None:
    stale, other = cluster.of("controller")
    for controller in (other, stale):
        controller.kill()
    known = len(stale.logged(DEPOSED))
    stale.start("controller.before_commit:1:SIGSTOP")
    cluster.stack.until("that it leads", lambda: cluster.leader() is stale)
    process = psutil.Process(stale.process.pid)
    with one_incident():
        kill_worker(job)
        cluster.stack.until("its stop", lambda: process.status() == psutil.STATUS_STOPPED)
        cluster.start(other)
    stale.send(signal.SIGCONT)
    refused = cluster.stack.until(
        "the refusal", lambda: [line for line in stale.logged(DEPOSED)[known:] if "has begun" in line["why"]]
    )[0]
    begun = re.search(r"epoch is (\d+), but (\d+) has begun", refused["why"])
    assert begun is not None and int(begun[1]) == refused["epoch"] < int(begun[2]), refused
    job.train_on()
    cluster.check_database()


def test_redis_is_killed_and_comes_back_empty_during_an_incident(cluster, job, one_incident) -> None:
    with one_incident():
        cluster.redis.kill()
        kill_worker(job)
        cluster.redis.start()


def test_redis_is_flushed_while_it_has_a_signal_that_nobody_has_read(cluster, job, one_incident) -> None:
    with one_incident():
        for controller in cluster.of("controller"):
            controller.send(signal.SIGSTOP)
        kill_worker(job)
        cluster.stack.until("the signal", lambda: cluster.redis.client.xlen("flyball:signals"))
        cluster.redis.client.flushall()
        for controller in cluster.of("controller"):
            controller.send(signal.SIGCONT)


def test_the_database_is_stopped_and_then_killed_during_an_incident(cluster, job, one_incident) -> None:
    api = cluster.stack.parts["api"]
    with one_incident():
        cluster.mariadb.process.send_signal(signal.SIGSTOP)
        kill_worker(job)
        cluster.stack.until("its absence", lambda: "database" in cluster.misses(api))
        cluster.mariadb.process.send_signal(signal.SIGCONT)
    with one_incident():
        cluster.mariadb.kill()
        kill_worker(job)
        cluster.stack.until("its absence", lambda: "database" in cluster.misses(api))
        cluster.mariadb.start()
        cluster.stack.until("its return", lambda: not cluster.misses(api))


def test_there_is_one_decision_for_each_worker_that_was_killed(cluster, job, one_incident) -> None:
    with one_incident():
        kill_worker(job, rank=0)
    everything: list[dict[str, Any]] = cluster.stack.api.items("/v1/decisions", job=job.name)
    decided = [d["kind"] for d in everything if d["kind"] != "hold"]  # the other rank's error may come first
    assert decided == ["start_job"] + len(job.incidents()) * ["restart_in_place"]


# By hand: pytest -m slow tests/integration/recovery


@pytest.mark.slow
@pytest.mark.parametrize("what", ["database", "redis", *KINDS])
def test_a_part_is_stopped_for_a_minute(cluster, job, one_incident, what: str) -> None:
    """All of a kind, first while training goes on, then during an incident."""
    parts = {"database": [cluster.mariadb.process], "redis": [cluster.redis.process]}.get(what)
    processes = parts or [part.process for part in cluster.of(what)]
    spawned = job.spawns()
    with stopped_for_a_minute(processes):
        job.train_on(200)
    assert job.spawns() == spawned
    with one_incident(), stopped_for_a_minute(processes):
        kill_worker(job)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["mariadb", "redis"])
def test_a_server_is_gone_for_a_minute(cluster, job, one_incident, what: str) -> None:
    server = getattr(cluster, what)
    spawned = job.spawns()
    server.kill()
    job.train_on(200)
    pause(60.0)
    server.start()
    assert job.spawns() == spawned
    with one_incident():
        server.kill()
        kill_worker(job)
        pause(60.0)
        server.start()


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


@contextmanager
def stopped_for_a_minute(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
        pause(60.0)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
