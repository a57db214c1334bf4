"""Databases for the conformance suites: each test runs on SQLite and on a MariaDB or MySQL server, and shares its
database with no other test that runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pymysql
import pytest
from sqlalchemy import event, insert, update
from support.clocks.manual import ManualClock
from support.stores.ready_databases import SERVER, ReadyDatabases, mariadb_url

from flyball.contracts.checkpoints import LineageEntry, RestorePlan, branch
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostFacts, HostRanks, JobSpec, JobState, Placement, RankStatus
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    CommandUpdate,
    Decision,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.events import EventKind
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.signals import EngineStatus, Report, Signal, SignalBody, WorkerExited
from flyball.contracts.wire import WIRE_VERSION
from services.actuator.ports import ActionStore, CommandDraft, PlaybookStep
from services.bus import redis_client
from services.controller.ports import DecisionStore
from services.controller.round.view import JobChange, Outcome
from services.record.codec import dump
from services.rules.stream import Cursor
from services.store.actions.action_store import SqlActionStore
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.decisions.job_store import SqlJobStore
from services.store.reports.status_store import SqlStatusStore
from services.store.sql import database as database_module
from services.store.sql import lease, tables
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog
from simulator.ports.action_store import MemoryActionStore
from simulator.ports.bus import MemoryEventLog
from simulator.ports.decision_store import MemoryDecisionStore
from simulator.ports.memory import Memory
from simulator.ports.status_store import MemoryJobStore, MemoryStatusStore


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a busy machine holds up for seconds is not away. Tests of what clients do then set their own."""
    monkeypatch.setattr(redis_client, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(database_module, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(database_module, "ANSWER_TIMEOUT_S", 120.0)


@pytest.fixture(autouse=True)
def plain_command_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are called what their drafts are."""
    monkeypatch.setattr(lease, "new_incarnation", lambda: "")
    monkeypatch.setattr(Memory, "new_incarnation", lambda _: "")


@pytest.fixture
def new_database_url(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Makes an empty database of a kind, "sqlite" or "mariadb", at every call; its URL."""
    with ExitStack() as stack:

        def new(kind: str) -> str:
            name = f"flyball_test_{uuid.uuid4().hex[:12]}"
            if kind == "sqlite":
                return f"sqlite:///{tmp_path / name}.sqlite"
            try:
                server = pymysql.connect(**SERVER)
            except pymysql.err.OperationalError as error:
                pytest.skip(f"no MySQL or MariaDB server at 127.0.0.1:3306 ({error})")
            cursor = stack.enter_context(stack.enter_context(server).cursor())
            cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
            stack.callback(cursor.execute, f"DROP DATABASE {name}")
            return mariadb_url(name)

        yield new


@pytest.fixture(scope="session")
def ready_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyDatabases]:
    databases = ReadyDatabases(tmp_path_factory.mktemp("databases"))
    yield databases
    databases.close()


@pytest.fixture
def new_ready_url(tmp_path: Path, ready_databases: ReadyDatabases) -> Iterator[Callable[[str], str]]:
    """At every call, the URL of another database of a kind, "sqlite" or "mariadb", with its schema and no rows."""
    with ExitStack() as stack:

        def new(kind: str) -> str:
            if kind == "sqlite":
                return ready_databases.sqlite(tmp_path / f"{uuid.uuid4().hex[:12]}.sqlite")
            try:
                name = ready_databases.mariadb()
            except pymysql.err.OperationalError as error:
                pytest.skip(f"no MySQL or MariaDB server at 127.0.0.1:3306 ({error})")
            stack.callback(ready_databases.give_back, name)
            return mariadb_url(name)

        yield new


@pytest.fixture(params=["sqlite", "mariadb"])
def database_url(request: pytest.FixtureRequest, new_database_url: Callable[[str], str]) -> str:
    """The URL of an empty database."""
    return new_database_url(request.param)


@pytest.fixture(params=["sqlite", "mariadb"])
def ready_url(request: pytest.FixtureRequest, new_ready_url: Callable[[str], str]) -> str:
    """The URL of `db`."""
    return new_ready_url(request.param)


@pytest.fixture
def db(ready_url: str) -> Iterator[Database]:
    """A database with its schema, and no rows."""
    database = Database(ready_url)
    yield database
    database.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Make:
    """Contract values with everything that a test does not care about filled in. Job "job", two ranks per host."""

    T = 1_000.0

    def spec(self, **changes: object) -> JobSpec:
        fields = {"job": "job", "argv": ("train.py",), "workdir": "/tmp", "nnodes": 2, "nproc_per_node": 2}
        return JobSpec(**(fields | changes))

    def exited(self, rank: int = 0, *, generation: int = 1, last_step: int = 7, **changes: object) -> WorkerExited:
        fields = {
            "job": "job",
            "generation": generation,
            "rank": rank,
            "pid": 100 + rank,
            "exit_code": None,
            "signal_number": 9,
            "last_step": last_step,
        }
        return WorkerExited(**(fields | changes))

    def signal(self, seq: int = 1, body: SignalBody | None = None, **changes: object) -> Signal:
        fields = {"source": "host-a", "incarnation": "inc-a", "seq": seq, "at": self.T, "body": body or self.exited()}
        return Signal(**(fields | changes))

    def facts(self, host_id: str = "host-a") -> HostFacts:
        return HostFacts(host_id, "10.0.0.1", "rack-1", f"{host_id}:7000", 29500, "0.1.0", 42)

    def report(
        self,
        host_id: str = "host-a",
        *,
        sent_at: float = T,
        ranks: Sequence[RankStatus] = (),
        steps: Sequence[RankSteps] = (),
        **changes: object,
    ) -> Report:
        workers, progress = in_columns(ranks)
        fields = {
            "version": WIRE_VERSION,
            "incarnation": f"daemon-{host_id}",
            "sent_at": sent_at,
            "interval_s": 1.0,
            "facts": self.facts(host_id),
            "engine": EngineStatus(alive=True),
            "workers": workers,
            "progress": progress,
            "completed": steps_together(steps),
        }
        return Report(**(fields | changes))

    def hosts(self, *host_ids: str) -> tuple[HostRanks, ...]:
        return tuple(
            HostRanks(host_id, "10.0.0.1", f"{host_id}:7000", (2 * n, 2 * n + 1)) for n, host_id in enumerate(host_ids)
        )

    def grant(self, generation: int = 1, *host_ids: str) -> GenerationPlan:
        return GenerationPlan(
            job="job",
            generation=generation,
            parent=generation - 1 if generation > 1 else None,
            hosts=self.hosts(*(host_ids or ("host-a", "host-b"))),
            peers={},
            parent_lineage=tuple(LineageEntry(g) for g in range(1, generation)),
            restart_count=generation - 1,
        )

    def placement(self, grant: GenerationPlan, restore_step: int | None = None) -> Placement:
        restore = None if restore_step is None else RestorePlan(restore_step, {})
        return Placement(
            job="job",
            generation=grant.generation,
            world_size=4,
            hosts=grant.hosts,
            master_address="10.0.0.1",
            master_port=29500,
            peers={},
            lineage=branch(grant.parent_lineage, restored_step=restore_step, generation=grant.generation),
            restore=restore,
            restart_count=grant.restart_count,
        )

    def incident(self, number: int = 1, state: str = "acting", **changes: object) -> Incident:
        fields = {
            "incident_id": f"inc-{number}",
            "job": "job",
            "host_id": "host-a",
            "cause": "worker_killed",
            "state": IncidentState(state),
            "opened_at": self.T,
            "since": self.T,
            "message": "Rank 0 was killed.",
            "generation": 1,
            "observed_at": self.T,
        }
        return Incident(**(fields | changes))

    def start(self, number: int = 1, generation: int = 1) -> Decision:
        """A decision to start the job."""
        grant = self.grant(generation)
        plan = ActionPlan(DecisionKind.START_JOB, "job", self.spec(), generation, next=grant)
        return Decision(
            f"dec-{number}", "", "job", DecisionKind.START_JOB, "Hosts are there.", "start", self.T, {}, plan
        )

    def restart(self, number: int = 2, *, incident: str = "inc-1", generation: int = 1, **changes: object) -> Decision:
        """A decision to restart `generation` in place."""
        fields = {
            "kind": DecisionKind.RESTART_IN_PLACE,
            "job": "job",
            "spec": self.spec(),
            "generation": generation,
            "stop_hosts": ("host-a", "host-b"),
            "next": self.grant(generation + 1),
        }
        plan = ActionPlan(**(fields | changes))
        return Decision(
            f"dec-{number}", incident, "job", plan.kind, "Rank 0 was killed.", "restart_in_place", self.T, {}, plan
        )

    def stop_step(self, decision: Decision) -> PlaybookStep:
        """The first move of a restart."""
        plan = decision.action
        assert plan is not None
        action_id = decision.decision_id.replace("dec", "act")
        drafts = tuple(
            CommandDraft(f"{action_id}.stop.{host}.1", host, StopWorkers("job", plan.generation, 0.0), 15.0)
            for host in plan.stop_hosts
        )
        return PlaybookStep("stop", ActionState.DISPATCHED, drafts, message="stopping")

    def start_step(self, decision: Decision, restore_step: int | None = None) -> PlaybookStep:
        """The move that starts the granted generation."""
        plan = decision.action
        assert plan is not None and plan.next is not None
        placement = self.placement(plan.next, restore_step)
        action_id = decision.decision_id.replace("dec", "act")
        drafts = tuple(
            CommandDraft(
                f"{action_id}.start.{h.host_id}.1", h.host_id, StartWorkers(spec=plan.spec, placement=placement), 30.0
            )
            for h in placement.hosts
        )
        return PlaybookStep(
            "start", ActionState.DISPATCHED, drafts, "starting", placement=placement, restore=placement.restore
        )

    def update(self, command_id: str, state: str = "succeeded", **changes: object) -> CommandUpdate:
        fields = {
            "command_id": command_id,
            "host_id": command_id.split(".")[2],
            "incarnation": "daemon",
            "state": UpdateState(state),
            "at": self.T,
        }
        return CommandUpdate(**(fields | changes))


@pytest.fixture
def make() -> Make:
    return Make()


class Stores:
    """The stores of one database, and shortcuts for bringing it into a state."""

    def __init__(self, db: Database, clock: ManualClock, make: Make) -> None:
        self.db, self.clock, self.make = db, clock, make
        self.decisions: DecisionStore = self.other_decisions()
        self.actions: ActionStore = self.other_actions()
        self.status = SqlStatusStore(db)
        self.jobs = SqlJobStore(db)
        self.log = SqlEventLog(db)
        self.epoch = 0

    def other_decisions(self) -> DecisionStore:
        """As another controller has it."""
        return SqlDecisionStore(self.db, self.clock)

    def other_actions(self) -> ActionStore:
        """As another actuator has it."""
        return SqlActionStore(self.db, self.clock)

    def lead(self, holder: str = "controller#1") -> int:
        grant = self.decisions.acquire_lease(holder, 1000.0)
        assert grant is not None
        self.epoch = grant.epoch
        return self.epoch

    def commit(
        self,
        *,
        signals: Sequence[Signal] = (),
        cursor: Cursor | None = None,
        steps: Mapping[str, PlaybookStep] | None = None,
        epoch: int | None = None,
        **outcome: object,
    ) -> None:
        self.decisions.commit(
            epoch=epoch or self.epoch or self.lead(),
            now=self.clock.wall_s(),
            signals=signals,
            cursor=cursor,
            outcome=Outcome(**outcome),
            first_steps=steps or {},
        )

    def run_job(self) -> None:
        """The job runs its first generation on host-a and host-b."""
        make = self.make
        self.jobs.submit(make.spec(), make.T)
        self.status.record_reports([(make.report("host-a"), make.T), (make.report("host-b"), make.T)])
        start = make.start()
        self.commit(
            decisions=(start,),
            steps={"act-1": make.start_step(start)},
            jobs=(JobChange("job", JobState.RUNNING, "training"),),
        )
        for host in ("host-a", "host-b"):
            self.actions.record(make.update(f"act-1.start.{host}.1"))
        (action,) = self.actions.open_actions()
        assert self.actions.apply(action, PlaybookStep("start", ActionState.SUCCEEDED), make.T)

    def place(self, job: str, generation: int, *hosts: str) -> None:
        """A generation of a job runs on these hosts; its first one is submitted here."""
        if generation == 1:
            self.jobs.submit(self.make.spec(job=job), self.make.T + 1.0)
        plan = msgspec.structs.replace(self.make.grant(generation, *hosts), job=job)
        with self.db.write() as connection:
            connection.execute(
                update(tables.jobs)
                .where(tables.jobs.c.job == job)
                .values(state=JobState.RUNNING.value, generation=generation)
            )
            connection.execute(
                insert(tables.generations).values(
                    job=job,
                    generation=generation,
                    decision=0,
                    plan=dump(plan),
                    granted_at=self.make.T,
                    started_at=self.make.T,
                    restore_step=None,
                    lineage=dump((*plan.parent_lineage, LineageEntry(generation))),
                    placement=None,
                )
            )

    def begin_restart(self) -> Decision:
        """Rank 0 was killed; a restart has sent its stop commands."""
        make = self.make
        restart = make.restart()
        self.commit(
            signals=(make.signal(),),
            incidents=(make.incident(action_id="act-2"),),
            decisions=(restart,),
            steps={"act-2": make.stop_step(restart)},
        )
        return restart

    def kinds(self) -> list[EventKind]:
        return [event.kind for _, event in self.log.read(None, 0, 1000)]


class MemoryStores(Stores):
    """The same of the simulator's memory."""

    def __init__(self, clock: ManualClock, make: Make) -> None:
        self.clock, self.make = clock, make
        self.memory = Memory(SystemClock())  # a lease runs out by the database's clock, not by the controller's
        self.decisions = self.other_decisions()
        self.actions = self.other_actions()
        self.status = MemoryStatusStore(self.memory)
        self.jobs = MemoryJobStore(self.memory)
        self.log = MemoryEventLog(self.memory)
        self.epoch = 0

    def other_decisions(self) -> DecisionStore:
        return MemoryDecisionStore(self.memory, self.clock)

    def other_actions(self) -> ActionStore:
        return MemoryActionStore(self.memory)


@pytest.fixture
def sql_stores(db: Database, clock: ManualClock, make: Make) -> Stores:
    return Stores(db, clock, make)


@pytest.fixture
def stores(sql_stores: Stores) -> Stores:
    """A suite of the ports takes `port_stores` instead."""
    return sql_stores


@pytest.fixture
def statements(sql_stores) -> Iterator[list[str]]:
    """The statements that the database received, in order."""
    found: list[str] = []

    def note(_connection, _cursor, statement: str, *_more) -> None:
        found.append(statement)

    with sql_stores.db.write() as writing, sql_stores.db.read() as reading:
        engines = {writing.engine, reading.engine}
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    yield found
    for engine in engines:
        event.remove(engine, "before_cursor_execute", note)


@pytest.fixture(params=["sqlite", "mariadb", "memory"])
def port_stores(
    request: pytest.FixtureRequest, new_ready_url: Callable[[str], str], clock: ManualClock, make: Make
) -> Iterator[Stores]:
    """Of every implementation of the ports."""
    if request.param == "memory":
        yield MemoryStores(clock, make)
        return
    database = Database(new_ready_url(request.param))
    yield Stores(database, clock, make)
    database.close()


@pytest.fixture
def new_stores(new_ready_url: Callable[[str], str], make: Make) -> Iterator[Callable[[], Stores]]:
    """Makes stores of a new SQLite database at every call, for properties that are tried many times."""
    opened: list[Database] = []

    def new() -> Stores:
        opened.append(Database(new_ready_url("sqlite")))
        return Stores(opened[-1], ManualClock(), make)

    yield new
    for database in opened:
        database.close()
