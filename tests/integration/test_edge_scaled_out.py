"""The control plane as on several machines: two processes of each kind, with Redis and MariaDB between them.

Redis is killed and comes back empty; one process of each kind is killed. Every incident is decided, once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.clocks.waits import until
from support.hosts.played import CLOCK, PlayedHost
from support.servers.own_servers import OwnRedis
from support.servers.stack import Stack

from flyball.contracts.cluster import JobSpec, Phase, RankStatus
from flyball.contracts.decisions import (
    Command,
    StartWorkers,
    StopWorkers,
)
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.signals import Signal, WorkerExited
from flyball.contracts.wire import encode

TOKEN = "the-secret-of-a-cluster-of-tests"
PARTS = {"sensor": 2, "controller": 2, "actuator": 2, "api": 1}


class TrainingDaemon(PlayedHost):
    """It sends a signal until it is committed, obeys a command once, and trains a step between two reports."""

    def __init__(self, sensors: list[str], actuators: list[str]) -> None:
        super().__init__("host-a", TOKEN, sensors, actuators)
        self._seq = 0
        self.spool: list[Signal] = []
        self.obeyed: list[Command] = []
        self.generation = 0
        self.trains = False
        self.step = 0

    def die(self) -> None:
        """Kill the worker."""
        self._seq += 1
        self.trains = False
        exited = WorkerExited("demo", self.generation, 0, 9, None, 9, self.step)
        self.spool.append(Signal("host-a", "i1", self._seq, CLOCK.wall_s(), exited))

    def turn(self) -> None:
        self.step += self.trains
        rank = RankStatus("demo", self.generation, 0, 9, Phase.STEP, self.step, 0.0)
        try:
            reply = self.report(interval_s=10.0, signals=tuple(self.spool), ranks=[rank] if self.trains else [])
            self.spool = [one for one in self.spool if one.seq > reply.committed.get("i1", 0)]
            self.obey(0.1)
        except FlyballError:
            threading.Event().wait(0.05)  # no reply; retry, like a daemon

    def carry_out(self, command: Command) -> None:
        if command.command_id in {one.command_id for one in self.obeyed}:
            return
        self.obeyed.append(command)
        if isinstance(command.body, StopWorkers):
            self.trains = False
        elif isinstance(command.body, StartWorkers):
            assert command.body.placement.generation > self.generation, "nothing stale acts"
            self.generation = command.body.placement.generation
            self.trains = True


@pytest.fixture
def redis(own_redis) -> OwnRedis:
    return own_redis()


@pytest.fixture
def stack(redis: OwnRedis, mariadb_url: str) -> Iterator[Stack]:
    urls = {"FLYBALL_DATABASE_URL": mariadb_url, "FLYBALL_REDIS_URL": redis.url}
    stack = Stack(FLYBALL_TOKEN=TOKEN, FLYBALL_LEASE_TTL_S="2", **urls)
    for kind, count in PARTS.items():
        for number in range(count):
            stack.add_part(kind, f"{kind}-{number}", folder=f"{kind}-{number}")
    try:
        stack.start_parts()
        yield stack
    finally:
        stack.end()


def test_every_incident_is_decided_once_whatever_is_killed(redis: OwnRedis, stack: Stack) -> None:
    with stack.front.client() as api, TrainingDaemon(stack.urls("sensor"), stack.urls("actuator")) as daemon:

        def items(path: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = api.get(path, params={"job": "demo"}).json()["items"]
            return found

        def recovered(generation: int) -> bool:
            daemon.turn()
            is_resolved = all(incident["resolved_at"] for incident in items("/v1/incidents"))
            return daemon.generation == generation and not daemon.spool and is_resolved

        def recover(generation: int, what: str) -> None:
            daemon.die()
            daemon.turn()
            until(lambda: recovered(generation), what)

        until(lambda: api.get("/readyz").json()["ok"], "a controller leads")
        daemon.turn()
        until(lambda: api.get("/v1/hosts").json()["items"], "the host is known")
        spec = JobSpec(job="demo", argv=("train.py",), workdir="/tmp", nnodes=1, nproc_per_node=1, max_restarts=9)
        assert api.post("/v1/jobs", content=encode(spec)).status_code == 201
        until(lambda: recovered(1), "the job trains")

        recover(2, "the first incident, with everything there")
        assert redis.client.exists("flyball:signals")
        first_stream = redis.client.xinfo_stream("flyball:signals")["last-generated-id"]

        redis.kill()
        daemon.die()
        daemon.turn()  # a sensor has the signal, and cannot publish it
        until(lambda: not api.get("/readyz").json()["ok"], "the API misses it")
        redis.start()
        until(lambda: recovered(3), "the incident that came while Redis was away")
        assert redis.client.xinfo_stream("flyball:signals")["last-generated-id"] > first_stream
        recover(4, "the incident after it")

        for victim in (stack.leader(), stack.of("sensor")[0], stack.of("actuator")[0]):
            victim.kill()
        recover(5, "the incident after one process of each kind was killed")

        assert [d["kind"] for d in items("/v1/decisions")] == ["start_job"] + 4 * ["restart_in_place"]
        assert [i["cause"] for i in items("/v1/incidents")] == 4 * ["worker_killed"]
        starts = [c.body.placement.generation for c in daemon.obeyed if isinstance(c.body, StartWorkers)]
        assert starts == [1, 2, 3, 4, 5]
        epochs = [c.fence.epoch for c in daemon.obeyed]
        assert epochs == sorted(epochs) and epochs[-1] > epochs[0]
        assert TOKEN not in "".join(part.log() for part in stack.parts.values())
