"""The stores of one database, or of the simulator's memory, and how tests bring them into a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import insert, update
from support.clocks.manual import ManualClock
from support.stores.made_values import Make

from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import (
    ActionState,
    Decision,
)
from flyball.contracts.events import EventKind
from flyball.contracts.reports.signals import Signal
from services.actuator.ports import ActionStore, PlaybookStep
from services.controller.ports import DecisionStore
from services.controller.round.view import JobChange, Outcome
from services.record.codec import dump
from services.rules.grant_seals import GrantSeals
from services.rules.stream import Cursor
from services.store.actions.action_store import SqlActionStore
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.decisions.job_store import SqlJobStore
from services.store.reports.status_store import SqlStatusStore
from services.store.sql import tables
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog
from simulator.ports.action_store import MemoryActionStore
from simulator.ports.bus import MemoryEventLog
from simulator.ports.decision_store import MemoryDecisionStore
from simulator.ports.memory import Memory
from simulator.ports.status_store import MemoryJobStore, MemoryStatusStore

SEALS = GrantSeals("the secret of a test's cluster")


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
        return SqlDecisionStore(self.db, self.clock, SEALS)

    def other_actions(self) -> ActionStore:
        """As another actuator has it."""
        return SqlActionStore(self.db, self.clock, SEALS)

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
