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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest
from support.clocks.waits import until
from support.jobs.recovered import RecordedJob
from support.servers.own_servers import OwnMariaDb, OwnRedis
from support.servers.stack import DEPOSED, PATIENT, Stack

from flyball.contracts.clock import SystemClock
from services.store.sql.database import Database
from simulator.database_check import check_database

LEASE_TTL_S = 1.5
BOUND_S = 60.0  # for an incident to be closed
KINDS = ("sensor", "controller", "actuator")


@pytest.fixture(scope="module")
def redis(redis_of_module) -> OwnRedis:
    return redis_of_module()


@pytest.fixture(scope="module")
def mariadb(own_mariadb) -> OwnMariaDb:
    return own_mariadb()


@pytest.fixture(scope="module")
def stack(make_stack, redis: OwnRedis, mariadb: OwnMariaDb) -> Stack:
    stack = make_stack(
        FLYBALL_DATABASE_URL=mariadb.url,
        FLYBALL_REDIS_URL=redis.url,
        FLYBALL_LEASE_TTL_S=str(LEASE_TTL_S),
        FLYBALL_TOKEN=secrets.token_hex(16),
        **PATIENT,
    )
    stack.daemons_url = stack.add_part("api").url
    for kind in KINDS:
        for number in (1, 2):
            stack.add_part(kind, f"{kind}-{number}", folder=f"{kind}-{number}")
    stack.environment |= {f"FLYBALL_{kind.upper()}_URLS": ",".join(stack.urls(kind)) for kind in ("sensor", "actuator")}
    stack.start_parts()
    stack.add_hosts("host-a", "host-b")
    return stack


@pytest.fixture(scope="module")
def job(stack: Stack) -> RecordedJob:
    return stack.train("served", nnodes=2, nproc_per_node=1)


@pytest.fixture(scope="module")
def check_incidents(mariadb: OwnMariaDb, stack: Stack) -> Iterator[Callable[[], None]]:
    """What must hold in the database between two incidents."""

    def check() -> None:
        assert check_database(db, now=SystemClock().wall_s(), bound_s=BOUND_S) == []

    with closing(Database(mariadb.url)) as db:
        yield check


@pytest.fixture
def one_incident(check_incidents, job):
    """Whatever happens in its block: a worker is killed, that is decided once, and training is back."""

    @contextmanager
    def one_incident() -> Iterator[None]:
        with job.next_incident() as incident:
            yield
        assert (incident["state"], incident["cause"]) == ("resolved", "worker_killed"), incident
        assert [d["kind"] for d in job.decisions(incident)] == ["restart_in_place"]
        assert incident["lost_steps"] <= 1
        job.train_on()
        check_incidents()

    return one_incident


def kill_worker(job, rank: int = 1) -> None:
    os.kill(job.pid_of(rank), signal.SIGKILL)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_kind_are_killed_and_started_again_during_an_incident(stack, job, one_incident, kind: str) -> None:
    with one_incident():
        for part in stack.of(kind):
            part.kill()
        kill_worker(job)
        stack.start_parts(*stack.of(kind))


def test_one_of_each_kind_is_stopped_for_longer_than_the_lease(stack, job, one_incident) -> None:
    others = [stack.of("sensor")[0], stack.of("actuator")[1]]
    with one_incident():
        leader = stack.stop_leader()
        for part in others:
            part.send(signal.SIGSTOP)
        known = len(leader.logged("leading")), len(leader.logged(DEPOSED))
        decided = len(stack.api.items("/v1/decisions", job=job.name))
        kill_worker(job)
        until(
            lambda: len(stack.api.items("/v1/decisions", job=job.name)) > decided,
            "the decision of the other controller, which has waited for the lease",
        )
        assert stack.leader() is not leader
        for part in (leader, *others):
            part.send(signal.SIGCONT)

    def has_seen_it() -> bool:
        """It is told so, or elected again, if the other one was held up meanwhile."""
        return (len(leader.logged("leading")), len(leader.logged(DEPOSED))) != known

    until(has_seen_it, "that the stopped one sees it")


def test_a_leader_that_comes_back_in_the_middle_of_a_commit_is_refused(
    stack, check_incidents, job, one_incident
) -> None:
    stale, other = stack.of("controller")
    for controller in (other, stale):
        controller.kill()
    known = len(stale.logged(DEPOSED))
    stale.start("controller.before_commit:1:SIGSTOP")
    until(lambda: stack.leader() is stale, "that it leads")
    process = psutil.Process(stale.process.pid)
    with one_incident():
        kill_worker(job)
        until(lambda: process.status() == psutil.STATUS_STOPPED, "its stop")
        stack.start_parts(other)
    stale.send(signal.SIGCONT)
    refused = until(
        lambda: [line for line in stale.logged(DEPOSED)[known:] if "has begun" in line["why"]], "the refusal"
    )[0]
    begun = re.search(r"epoch is (\d+), but (\d+) has begun", refused["why"])
    assert begun is not None and int(begun[1]) == refused["epoch"] < int(begun[2]), refused
    job.train_on()
    check_incidents()


def test_redis_is_killed_and_comes_back_empty_during_an_incident(redis, job, one_incident) -> None:
    with one_incident():
        redis.kill()
        kill_worker(job)
        redis.start()


def test_redis_is_flushed_while_it_has_a_signal_that_nobody_has_read(stack, redis, job, one_incident) -> None:
    with one_incident():
        for controller in stack.of("controller"):
            controller.send(signal.SIGSTOP)
        kill_worker(job)
        until(lambda: redis.client.xlen("flyball:signals"), "the signal")
        redis.client.flushall()
        for controller in stack.of("controller"):
            controller.send(signal.SIGCONT)


def test_the_database_is_stopped_and_then_killed_during_an_incident(stack, mariadb, job, one_incident) -> None:
    api = stack.parts["api"]
    with one_incident():
        mariadb.process.send_signal(signal.SIGSTOP)
        kill_worker(job)
        until(lambda: "database" in api.misses(), "its absence")
        mariadb.process.send_signal(signal.SIGCONT)
    with one_incident():
        mariadb.kill()
        kill_worker(job)
        until(lambda: "database" in api.misses(), "its absence")
        mariadb.start()
        until(lambda: not api.misses(), "its return")


def test_there_is_one_decision_for_each_worker_that_was_killed(stack, job, one_incident) -> None:
    with one_incident():
        kill_worker(job, rank=0)
    everything: list[dict[str, Any]] = stack.api.items("/v1/decisions", job=job.name)
    decided = [d["kind"] for d in everything if d["kind"] != "hold"]  # the other rank's error may come first
    assert decided == ["start_job"] + len(job.incidents()) * ["restart_in_place"]


# By hand: pytest -m slow tests/integration/recovery


@pytest.mark.slow
@pytest.mark.parametrize("what", ["database", "redis", *KINDS])
def test_a_part_is_stopped_for_a_minute(stack, redis, mariadb, job, one_incident, what: str) -> None:
    """All of a kind, first while training goes on, then during an incident."""
    parts = {"database": [mariadb.process], "redis": [redis.process]}.get(what)
    processes = parts or [part.process for part in stack.of(what)]
    spawned = job.spawns()
    with stopped_for_a_minute(processes):
        job.train_on(200)
    assert job.spawns() == spawned
    with one_incident(), stopped_for_a_minute(processes):
        kill_worker(job)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["mariadb", "redis"])
def test_a_server_is_gone_for_a_minute(redis, mariadb, job, one_incident, what: str) -> None:
    server = {"mariadb": mariadb, "redis": redis}[what]
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
