"""The controller's loop and the executor, with the real policy and playbook, on real databases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.clocks.waits import until
from support.stores.job_stores import SEALS

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobState, Phase, RankStatus
from flyball.contracts.decisions import (
    ActionState,
    Command,
    CommandResult,
    CommandUpdate,
    DecisionKind,
    IncidentState,
    RankPosition,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.errors import Unreachable
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.controller.round.view import PolicySettings
from services.rules.stream import Cursor, Delivered
from services.runtime.wakeup import LocalWakeup
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.read.read_models import SqlReadModels

DEADLINE_S = 120.0
A = ("host-a", "inc-a")  # the default sender
LEASE_S = 3600.0  # it must not run out between two steps of a test, or within one
SETTINGS = PolicySettings(spare_fresh_s=3600.0)  # hosts report only once here

# One process of the control plane, composed as in `services.main`, without HTTP.
PROCESS = """
import sys, threading
from flyball.contracts.clock import SystemClock
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.rules.stream import Cursor, Delivered
from services.controller.round.view import PolicySettings
from services.rules.grant_seals import GrantSeals
from services.runtime.wakeup import LocalWakeup
from services.store.actions.action_store import SqlActionStore
from services.store.sql.database import Database
from services.store.decisions.decision_store import SqlDecisionStore

url, incarnation = sys.argv[1:]
db, clock, wakeup, stop = Database(url), SystemClock(), LocalWakeup(), threading.Event()
seals = GrantSeals("the secret of a cluster")
loop = ControllerLoop(
    store=SqlDecisionStore(db, clock, seals), bus=EmbeddedBus(db), wakeup=wakeup, clock=clock,
    settings=PolicySettings(spare_fresh_s=3600.0), holder="controller#" + incarnation,
)
executor = Executor(store=SqlActionStore(db, clock, seals), wakeup=wakeup, clock=clock)
threading.Thread(target=executor.run, args=(stop,)).start()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
loop.run(stop)
"""


class PlayedDaemons:
    """Two hosts that report and answer like daemons, in real time."""

    def __init__(self, stores, make) -> None:
        self.stores, self.make = stores, make
        self.bus = EmbeddedBus(stores.db)
        self.reads = SqlReadModels(stores.db)
        self.clock = SystemClock()
        self.seq = 0
        self.generation = 0
        self.step = -1
        self.obeyed: list[Command] = []

    def submit(self) -> None:
        now = self.clock.wall_s()
        self.stores.status.record_reports([(self.make.report(h, sent_at=now), now) for h in ("host-a", "host-b")])
        self.stores.jobs.submit(self.make.spec(), now)

    def answer(self) -> None:
        """Obey every command once, as seen from outside."""
        for host_id, ranks in (("host-a", (0, 1)), ("host-b", (2, 3))):
            for command in self.stores.actions.commands_for(host_id, self.clock.wall_s()):
                assert command.command_id not in {c.command_id for c in self.obeyed}
                self.obeyed.append(command)
                result = CommandResult()
                if isinstance(command.body, StopWorkers):
                    copies = tuple(
                        ShardCopy("job", self.generation, self.step, r, Tier.MEMORY, host_id, 10, "d") for r in ranks
                    )
                    positions = tuple(RankPosition(rank, self.step) for rank in ranks)
                    result = CommandResult(positions=positions, copies=copies, free_port=29501)
                elif isinstance(command.body, StartWorkers):
                    self.generation = command.body.placement.generation
                self.stores.actions.record(
                    CommandUpdate(
                        command.command_id, host_id, "i", UpdateState.SUCCEEDED, self.clock.wall_s(), result=result
                    )
                )

    def train(self, step: int) -> None:
        """Every rank has completed `step`."""
        self.step = step
        now = self.clock.wall_s()
        reports = [
            self.make.report(
                host_id,
                sent_at=now,
                ranks=tuple(RankStatus("job", self.generation, r, 100 + r, Phase.STEP, step, 0.0) for r in ranks),
            )
            for host_id, ranks in (("host-a", (0, 1)), ("host-b", (2, 3)))
        ]
        self.stores.status.record_reports([(report, now) for report in reports])

    def kill(self, rank: int = 0, times: int = 1) -> None:
        """Kill a worker; its daemon reports it, repeatedly until it is confirmed."""
        self.seq += 1
        body = self.make.exited(rank, generation=self.generation, last_step=self.step)
        exited = self.make.signal(self.seq, body, at=self.clock.wall_s())
        self.bus.publish([exited] * times)

    def decisions(self) -> list[str]:
        return [d["kind"] for d in self.reads.decisions("job")]

    def job_state(self) -> str:
        return str(self.reads.job("job")["state"])

    def open_action(self) -> bool:
        return bool(self.stores.actions.open_actions())


@pytest.fixture
def cluster(stores, make) -> PlayedDaemons:
    return PlayedDaemons(stores, make)


def controller(stores, holder: str = "controller#1", wakeup: LocalWakeup | None = None) -> ControllerLoop:
    clock = SystemClock()
    return ControllerLoop(
        store=SqlDecisionStore(stores.db, clock, SEALS),
        bus=EmbeddedBus(stores.db),
        wakeup=wakeup or LocalWakeup(),
        clock=clock,
        settings=SETTINGS,
        holder=holder,
        lease_ttl_s=LEASE_S,
    )


@pytest.fixture
def running(cluster: PlayedDaemons, stores):
    """A controller and an executor, stepped by hand until the job trains."""
    loop = controller(stores)
    executor = Executor(store=stores.actions, wakeup=LocalWakeup(), clock=SystemClock())

    def turn() -> None:
        loop.run_once()
        cluster.answer()
        executor.run_once()

    cluster.submit()
    until(lambda: (turn(), cluster.generation == 1 and not cluster.open_action())[1], "the job started")
    cluster.train(10)
    return turn


def test_a_killed_worker_is_recovered_from_once(running, cluster: PlayedDaemons, stores) -> None:
    cluster.kill(times=3)
    until(lambda: (running(), cluster.generation == 2 and not cluster.open_action())[1], "the job restarted")
    cluster.train(11)
    until(lambda: (running(), cluster.reads.incidents("job")[0]["resolved_at"])[1], "the incident was resolved")
    (incident,) = cluster.reads.incidents("job")
    assert (incident["state"], incident["cause"], incident["lost_steps"]) == ("resolved", "worker_killed", 0)
    assert cluster.decisions() == ["start_job", "restart_in_place"]
    assert [c.command_id for c in cluster.obeyed] == [
        "act-1.start.host-a.1",
        "act-1.start.host-b.1",
        "act-2.stop.host-a.1",
        "act-2.stop.host-b.1",
        "act-2.start.host-a.1",
        "act-2.start.host-b.1",
    ]
    started = cluster.obeyed[-1].body
    assert isinstance(started, StartWorkers)
    assert started.placement.restore is not None
    assert (started.placement.restore.step, started.placement.master_port) == (10, 29501)
    assert stores.status.committed([A]) == {A: 1}
    assert cluster.bus.read(None, limit=10) == []  # the stream keeps nothing before the stored cursor


def test_idle_rounds_load_no_view_and_write_nothing(running, cluster: PlayedDaemons, stores) -> None:
    for _ in range(5):
        running()  # until the reports of training are processed
    loop = controller(stores, "controller#2")
    loop.run_once()
    before = stores.decisions.revision(), stores.log.last()
    waits = [loop.run_once() for _ in range(5)]
    assert (stores.decisions.revision(), stores.log.last()) == before
    assert all(0.0 < wait <= 0.05 for wait in waits)


def test_only_the_leader_decides_and_its_successor_goes_on(running, cluster: PlayedDaemons, stores) -> None:
    stranger = controller(stores, "stranger#1")
    cluster.kill()
    assert stranger.run_once() > 0.5  # it waits for the lease
    assert cluster.decisions() == ["start_job"]
    successor = controller(stores, "controller#2")
    until(lambda: (successor.run_once(), len(cluster.decisions()) == 2)[1], "the successor decided")
    running()  # the predecessor notices that it no longer leads, and stores nothing
    assert cluster.decisions() == ["start_job", "restart_in_place"]
    assert {c.fence.epoch for c in stores.actions.commands_for("host-a", 0.0)} <= {2}


def test_a_stop_ends_the_job_everywhere(running, cluster: PlayedDaemons, stores) -> None:
    stores.jobs.request_stop("job", cluster.clock.wall_s())
    until(
        lambda: (running(), cluster.job_state() == JobState.STOPPED.value and not cluster.open_action())[1],
        "the job stopped",
    )
    assert cluster.decisions()[-1] == DecisionKind.STOP_JOB.value


def test_an_outage_is_waited_out(running, cluster: PlayedDaemons, stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is away for some rounds; the loop's thread survives and finishes its work afterwards."""
    away = threading.Event()
    refused = threading.Event()
    store = SqlDecisionStore(stores.db, SystemClock(), SEALS)
    really = store.revision

    def revision() -> int:
        if away.is_set():
            refused.set()
            raise Unreachable("The database does not answer.", hint="wait")
        return really()

    monkeypatch.setattr(store, "revision", revision)
    stop, wakeup = threading.Event(), LocalWakeup()
    loop = ControllerLoop(
        store=store,
        bus=EmbeddedBus(stores.db),
        wakeup=wakeup,
        clock=SystemClock(),
        settings=SETTINGS,
        holder="controller#2",
    )
    away.set()
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    assert refused.wait(DEADLINE_S)
    cluster.kill()
    away.clear()
    until(lambda: "restart_in_place" in cluster.decisions(), "the loop decided after the outage")
    stop.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


class BusAtTimes(EmbeddedBus):
    """A bus with a switchable outage, like one on another server than the database."""

    away: tuple[str, ...] = ()

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        self._check("read")
        return super().read(after, limit=limit)

    def trim(self, upto: Cursor) -> None:
        self._check("trim")
        super().trim(upto)

    def _check(self, what: str) -> None:
        if what in self.away:
            raise Unreachable("The bus does not answer.")


def with_bus(stores, bus: BusAtTimes) -> ControllerLoop:
    return ControllerLoop(
        store=SqlDecisionStore(stores.db, SystemClock(), SEALS),
        bus=bus,
        wakeup=LocalWakeup(),
        clock=SystemClock(),
        settings=SETTINGS,
        holder="controller#2",
        lease_ttl_s=LEASE_S,
    )


def test_without_the_bus_signals_wait_and_other_decisions_are_made(running, cluster: PlayedDaemons, stores) -> None:
    bus = BusAtTimes(stores.db)
    bus.away = ("read", "trim")
    loop = with_bus(stores, bus)
    cluster.kill()
    stores.jobs.request_stop("job", cluster.clock.wall_s())
    until(lambda: (loop.run_once(), DecisionKind.STOP_JOB.value in cluster.decisions())[1], "the stop was decided")
    assert stores.status.committed([A]) == {}
    bus.away = ()
    until(lambda: (loop.run_once(), stores.status.committed([A]))[1], "the signal was committed")


def test_what_could_not_be_trimmed_is_trimmed_later_by_whoever_leads(running, cluster: PlayedDaemons, stores) -> None:
    bus = BusAtTimes(stores.db)
    bus.away = ("trim",)
    cluster.kill()
    while not stores.status.committed([A]):
        with_bus(stores, bus).run_once()
    assert len(bus.read(None, limit=10)) == 1
    bus.away = ()
    with_bus(stores, bus).run_once()
    assert bus.read(None, limit=10) == []


@pytest.mark.processes
@pytest.mark.parametrize("point", ["controller.after_consume", "controller.after_commit"])
def test_a_controller_killed_in_the_middle_finishes_after_its_restart_and_acts_once(
    running, cluster: PlayedDaemons, stores, ready_url: str, point: str
) -> None:
    def start(incarnation: str, fault_point: str = "") -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", PROCESS, ready_url, incarnation],
            env=os.environ | {"FLYBALL_FAULT_POINT": fault_point},
            stdin=subprocess.PIPE,
        )

    cluster.kill(times=2)
    victim = start("victim", point)
    assert victim.wait(DEADLINE_S) == -signal.SIGKILL
    decided = point == "controller.after_commit"
    assert (len(cluster.decisions()) == 2) is decided
    assert bool(stores.status.committed([A])) is decided
    heir = start("heir")
    try:
        until(lambda: (cluster.answer(), cluster.generation == 2)[1], "the restart was carried out")
        until(lambda: (cluster.answer(), not cluster.open_action())[1], "the action ended")
        cluster.train(11)
        until(lambda: cluster.reads.incidents("job")[0]["resolved_at"], "the incident was resolved")
    finally:
        heir.stdin.close()
        heir.wait(DEADLINE_S)
    assert heir.returncode == 0
    (incident,) = cluster.reads.incidents("job")
    assert incident["state"] == IncidentState.RESOLVED.value
    assert cluster.decisions() == ["start_job", "restart_in_place"]
    assert len([c for c in cluster.obeyed if isinstance(c.body, StartWorkers)]) == 4
    action = cluster.reads.decision("dec-2")["action"]
    assert action["state"] == ActionState.SUCCEEDED.value
    assert stores.status.committed([A]) == {A: 1}
