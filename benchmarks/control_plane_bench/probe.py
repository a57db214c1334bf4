"""Plays hosts that fail repeatedly, in a separate process. Measures the time from a failure to its decision, and from
there to the command at the host.

    python -m control_plane_bench.probe '{"sensor_port": ..., ...}'     one JSON object on stdout
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import msgspec
from sqlalchemy import func, select

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostFacts, JobSpec, Phase
from flyball.contracts.credentials import host_credential
from flyball.contracts.decisions import (
    Command,
    CommandBatch,
    CommandResult,
    CommandUpdate,
    RankPosition,
    StartWorkers,
    UpdateState,
)
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, Workers
from flyball.contracts.reports.signals import EngineStatus, RankMarks, Report, Signal, WorkerExited
from flyball.contracts.wire import WIRE_VERSION, decode, encode
from services.store.decisions.job_store import SqlJobStore
from services.store.sql.database import Database
from services.store.sql.tables import decisions, incidents

LOOK_EVERY_S = 0.002  # while waiting for a decision
WAIT_LOOK_S = 0.02  # in waits that are not measured
WAIT_S = 60.0
REPORT_EVERY_S = 0.2  # while waiting: reports resolve an incident
_CLOCK = SystemClock()


class Order(msgspec.Struct, frozen=True):
    """The probe's parameters. Names of jobs begin with `name`; each job has one host."""

    name: str
    sensor_port: int
    actuator_port: int
    secret: str
    database_url: str
    failures: int  # over all hosts
    seconds: float  # at most
    hosts: int = 1
    delay_s: float = 0.0  # before the first report, after which its job is submitted at once
    fails_after_s: float = 0.0  # from the start of the probe on


class Samples(msgspec.Struct):
    """Times in seconds: of each job's start, and one each per decided failure."""

    start_s: list[float] = []  # from a submitted job to the command that starts its worker
    decision_s: list[float] = []  # from the report to the decision in the database
    command_s: list[float] = []  # from there to the command at the host


class Probe:
    def __init__(self, order: Order, number: int) -> None:
        self._order = order
        self._failures = -(-order.failures // order.hosts)
        self._job = self._host = f"{order.name}-{number}"
        self._database = Database(order.database_url)
        token = host_credential(order.secret, self._host).token
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._sensor = http.client.HTTPConnection("127.0.0.1", order.sensor_port, timeout=WAIT_S)
        self._incarnation = f"{self._host}-{int(_CLOCK.wall_s())}"  # its signals count from 1
        self._reports = 0
        self._signals = 0
        self._generation = 0
        self._marked = 0  # the generation whose marks were reported
        self._step = 0
        self._arrived: Queue[tuple[float, Command]] = Queue()
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)

    def run(self) -> Samples:
        samples, began_s = Samples(), time.monotonic()
        deadline_s = began_s + self._order.fails_after_s + self._order.seconds
        time.sleep(self._order.delay_s)
        self._report()
        jobs = SqlJobStore(self._database)
        submitted_s = time.monotonic()
        jobs.submit(
            JobSpec(self._job, ("train.py",), "/", hosts=(self._host,), max_restarts=1_000_000), _CLOCK.wall_s()
        )
        self._poller.start()
        self._until(lambda: self._generation > 0, "start of the probe's job")
        samples.start_s.append(time.monotonic() - submitted_s)
        while time.monotonic() < began_s + self._order.fails_after_s:
            self._train()
            time.sleep(REPORT_EVERY_S)
        while True:
            self._train()
            self._fail(samples)
            if len(samples.decision_s) >= self._failures or time.monotonic() >= deadline_s:
                break
        self._stop.set()
        return samples

    def _train(self) -> None:
        """Report steps until the incident is resolved."""
        while True:
            self._step += 5
            self._report()
            if self._open_incidents() == 0:
                return
            self._until(lambda: self._open_incidents() == 0, "end of the incident", give_up_s=REPORT_EVERY_S)

    def _fail(self, samples: Samples) -> None:
        newest = self._newest_decision()
        while not self._arrived.empty():
            self._arrived.get()
        self._signals += 1
        generation = self._generation
        body = WorkerExited(self._job, generation, 0, 4_242, None, 9, self._step)
        began_s = time.monotonic()
        self._report(Signal(self._host, self._incarnation, self._signals, _CLOCK.wall_s(), body))
        deadline_s = began_s + WAIT_S
        while self._newest_decision() <= newest:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no decision within {WAIT_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
        decided_s = time.monotonic()
        samples.decision_s.append(decided_s - began_s)
        self._until(
            lambda: not self._arrived.empty(), "command for the host"
        )  # reports meanwhile: a silent host gets none
        arrived_s, _ = self._arrived.get()
        samples.command_s.append(max(0.0, arrived_s - decided_s))
        self._until(lambda: self._generation > generation, "start of the next generation")

    def _report(self, *signals: Signal) -> None:
        self._reports += 1
        now = _CLOCK.wall_s()
        running = self._generation > 0 and not signals
        report = Report(
            version=WIRE_VERSION,
            incarnation=self._incarnation,
            sent_at=now,
            interval_s=1.0,
            facts=HostFacts(self._host, "127.0.0.1", "probe", "127.0.0.1:7000", 29_500, "0.1.0", 4_242),
            engine=EngineStatus(alive=True),
            signals=signals,
            workers=(Workers(self._job, self._generation, (0,), (4_242,)),) if running else (),
            progress=(RankProgress((Phase.STEP,), (self._step,), (0.0,)),) if running else (),
            completed=(CompletedSteps(self._job, self._generation, (0,), self._step, ((now,),)),) if running else (),
            marks=(RankMarks(self._job, self._generation, 0, now, now, now, now, now, 0.0),)
            if running and self._marked < self._generation
            else (),
            seq=self._reports,
        )
        self._sensor.request("POST", "/v1/reports", encode(report), self._headers)
        answer = self._sensor.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the sensor answered {answer.status}: {text.decode()}")
        self._marked = max(self._marked, self._generation) if running else self._marked

    def _poll(self) -> None:
        """Receive commands and report them as succeeded."""
        connection = http.client.HTTPConnection("127.0.0.1", self._order.actuator_port, timeout=WAIT_S)
        query = f"/v1/hosts/{self._host}/commands?incarnation={self._incarnation}&wait_s=20"
        while not self._stop.is_set():
            connection.request("GET", query, headers=self._headers)
            answer = connection.getresponse()
            batch = decode(answer.read(), CommandBatch)  # in several threads at once
            arrived_s = time.monotonic()
            for command in batch.commands:
                self._arrived.put((arrived_s, command))
                result = CommandResult(positions=(RankPosition(0, self._step),), free_port=29_500)
                update = CommandUpdate(
                    command.command_id,
                    self._host,
                    self._incarnation,
                    UpdateState.SUCCEEDED,
                    _CLOCK.wall_s(),
                    result=result,
                )
                connection.request("POST", f"/v1/hosts/{self._host}/updates", encode(update), self._headers)
                connection.getresponse().read()
                if isinstance(command.body, StartWorkers):
                    self._generation = command.body.placement.generation

    def _newest_decision(self) -> int:
        with self._database.read() as connection:
            query = select(func.max(decisions.c.number)).where(decisions.c.job == self._job)
            return int(connection.scalar(query) or 0)

    def _open_incidents(self) -> int:
        with self._database.read() as connection:
            mine = (incidents.c.job == self._job, incidents.c.closed.is_(False))
            return int(connection.scalar(select(func.count()).select_from(incidents).where(*mine)) or 0)

    def _until(self, condition: Callable[[], bool], what: str, give_up_s: float = 0.0) -> None:
        """Wait for the condition, and report meanwhile. Return after `give_up_s`, if given; otherwise raise
        TimeoutError after `WAIT_S`."""
        deadline_s = time.monotonic() + (give_up_s or WAIT_S)
        report_s = time.monotonic() + REPORT_EVERY_S
        while not condition():
            now_s = time.monotonic()
            if now_s > deadline_s:
                if give_up_s:
                    return
                raise TimeoutError(f"no {what} within {WAIT_S:.0f} s")
            if now_s > report_s:
                self._report()
                report_s = now_s + REPORT_EVERY_S
            time.sleep(WAIT_LOOK_S)


def main() -> None:
    order = decode(sys.argv[1], Order)
    with ThreadPoolExecutor(order.hosts) as pool:
        found = list(pool.map(lambda number: Probe(order, number).run(), range(order.hosts)))
    names = Samples.__struct_fields__
    joined = Samples(**{name: [seconds for one in found for seconds in getattr(one, name)] for name in names})
    print(msgspec.json.encode(joined).decode())


if __name__ == "__main__":
    main()
