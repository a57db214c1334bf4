"""The control plane as on several machines: two processes of each kind, with Redis and MariaDB between them.

Redis is killed and comes back empty; one process of each kind is killed. Every incident is decided, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostFacts, JobSpec, Phase
from flyball.contracts.credentials import host_credential
from flyball.contracts.decisions import (
    Command,
    CommandResult,
    CommandUpdate,
    RankPosition,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.rank_columns import RankProgress, Workers
from flyball.contracts.reports.signals import EngineStatus, Report, Signal, WorkerExited
from flyball.contracts.wire import WIRE_VERSION, encode
from host_daemon.link.http_client import Endpoints, SupervisorClient

CLOCK = SystemClock()
DEADLINE_S = 300.0
ROOT = Path(__file__).parents[2]
TOKEN = "the-secret-of-a-cluster-of-tests"
PARTS = ("sensor", "sensor", "controller", "controller", "actuator", "actuator", "api")


class Part:
    """One process with its own state folder, as on its own machine."""

    def __init__(self, part: str, folder: Path, settings: dict[str, str]) -> None:
        self.part = part
        self._folder = folder
        folder.mkdir()
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.main", part, "--state-dir", folder / "state", "--port", "0"],
            cwd=ROOT,
            env=os.environ | settings,
            stderr=self._log,
        )

    def log(self) -> str:
        return (self._folder / "log").read_text()

    @property
    def url(self) -> str | None:
        """Once it serves."""
        assert self.process.poll() is None, self.log()
        record = self._folder / "state" / ("supervisor.json" if self.part == "api" else f"{self.part}.json")
        return json.loads(record.read_text())["url"] if record.exists() else None

    def end(self, number: signal.Signals) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self._log.close()
        return code


class Daemon:
    """A host with one rank, played like its daemon: it sends a signal until it is committed, obeys a command once, and
    trains a step between two reports."""

    def __init__(self, sensors: list[str], actuators: list[str]) -> None:
        credential = host_credential(TOKEN, "host-a")
        servers = (Endpoints(urls, "host-a", CLOCK) for urls in (sensors, actuators))
        self._client = SupervisorClient(*servers, lambda: credential.token)
        self._runner = asyncio.Runner()
        self._seq = 0
        self.spool: list[Signal] = []
        self.obeyed: list[Command] = []
        self.generation = 0
        self.trains = False
        self.step = 0

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def die(self) -> None:
        """Kill the worker."""
        self._seq += 1
        self.trains = False
        exited = WorkerExited("demo", self.generation, 0, 9, None, 9, self.step)
        self.spool.append(Signal("host-a", "inc-a", self._seq, CLOCK.wall_s(), exited))

    def turn(self) -> None:
        try:
            self._runner.run(self._turn())
        except FlyballError:
            threading.Event().wait(0.05)  # no reply; retry, like a daemon

    async def _turn(self) -> None:
        self.step += self.trains
        report = Report(
            version=WIRE_VERSION,
            incarnation="inc-a",
            sent_at=CLOCK.wall_s(),
            interval_s=10.0,
            facts=HostFacts("host-a", "127.0.0.1", "rack-1", "127.0.0.1:1", 29_500, "0.1.0", 1),
            engine=EngineStatus(alive=True),
            signals=tuple(self.spool),
            workers=(Workers("demo", self.generation, (0,), (9,)),) if self.trains else (),
            progress=(RankProgress((Phase.STEP,), (self.step,), (0.0,)),) if self.trains else (),
        )
        committed = (await self._client.report(report)).committed.get("inc-a", 0)
        self.spool = [one for one in self.spool if one.seq > committed]
        for command in (await self._client.commands("host-a", "inc-a", wait_s=0.1)).commands:
            if command.command_id not in {one.command_id for one in self.obeyed}:
                self._obey(command)
            result = CommandResult(positions=(RankPosition(0, self.step),), free_port=29_501)
            await self._client.update(
                CommandUpdate(
                    command.command_id, "host-a", "inc-a", UpdateState.SUCCEEDED, CLOCK.wall_s(), result=result
                )
            )

    def _obey(self, command: Command) -> None:
        self.obeyed.append(command)
        if isinstance(command.body, StopWorkers):
            self.trains = False
        elif isinstance(command.body, StartWorkers):
            assert command.body.placement.generation > self.generation, "nothing stale acts"
            self.generation = command.body.placement.generation
            self.trains = True


class Cluster:
    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        settings = {
            "FLYBALL_TOKEN": TOKEN,
            "FLYBALL_DATABASE_URL": database_url,
            "FLYBALL_REDIS_URL": redis_url,
            "FLYBALL_LEASE_TTL_S": "2",
        }
        self.parts = [Part(part, folder / f"{number}-{part}", settings) for number, part in enumerate(PARTS)]

    def of(self, part: str) -> list[Part]:
        return [one for one in self.parts if one.part == part]

    def leader(self) -> Part:
        """The controller that was elected last."""
        return max(self.of("controller"), key=_newest_epoch)


def _newest_epoch(controller: Part) -> int:
    whole = controller.log().rpartition("\n")[0]  # the last line may be incomplete
    lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return max((line["epoch"] for line in lines if line.get("event") == "leading"), default=0)


def test_every_incident_is_decided_once_whatever_is_killed(own_redis, mariadb_url: str, tmp_path: Path) -> None:
    redis = own_redis()
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, mariadb_url, redis.url)
        for part in cluster.parts:
            stack.callback(part.end, signal.SIGKILL)
        urls = {kind: [until(lambda one=one: one.url, "it serves") for one in cluster.of(kind)] for kind in set(PARTS)}
        api = stack.enter_context(
            httpx.Client(base_url=urls["api"][0], headers={"Authorization": f"Bearer {TOKEN}"}, timeout=DEADLINE_S)
        )
        daemon = Daemon(urls["sensor"], urls["actuator"])
        stack.callback(daemon.close)

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

        for victim in (cluster.leader(), cluster.of("sensor")[0], cluster.of("actuator")[0]):
            victim.end(signal.SIGKILL)
        recover(5, "the incident after one process of each kind was killed")

        assert [d["kind"] for d in items("/v1/decisions")] == ["start_job"] + 4 * ["restart_in_place"]
        assert [i["cause"] for i in items("/v1/incidents")] == 4 * ["worker_killed"]
        starts = [c.body.placement.generation for c in daemon.obeyed if isinstance(c.body, StartWorkers)]
        assert starts == [1, 2, 3, 4, 5]
        epochs = [c.fence.epoch for c in daemon.obeyed]
        assert epochs == sorted(epochs) and epochs[-1] > epochs[0]
        assert TOKEN not in "".join(part.log() for part in cluster.parts)
