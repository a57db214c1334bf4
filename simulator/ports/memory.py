"""The database of a simulation: tables as plain values, one lock as the transaction.

Rules (who may lead, which report counts, a command's fence, what is logged) are not repeated here: the code of
`services` is used. This module stores and finds.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from itertools import count
from typing import Any

import msgspec

from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.clock import Clock
from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    CommandUpdate,
    Decision,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.errors import Unreachable
from flyball.contracts.events import Event
from flyball.contracts.reports.conditions import ConditionKey
from flyball.contracts.reports.host_checks import HostCheck
from flyball.contracts.reports.signals import Sender, Signal, WorkerExited
from flyball.contracts.reports.standings import HostStanding
from services.controller.replay import StoredRound
from services.controller.round.view import DrainView, PastFailure, StandingCondition
from services.record.lease_terms import Held
from services.record.report_events import RankKey, RankRow
from services.record.signal_events import SignalKey
from services.rules.stream import Cursor
from services.sensor.detector.watched_job import LearnedJob
from simulator.checks.record import (
    ActionRecord,
    CommandRecord,
    DecisionRecord,
    GenerationRecord,
    IncidentRecord,
    Record,
)


class HostRow(msgspec.Struct):
    """The columns of `hosts` that a view or a rule reads."""

    host_id: str
    state: HostState
    since: float
    reason: str
    address: str
    failure_domain: str
    engine_address: str
    free_port: int
    incarnation: str
    sent_at: float
    last_report_at: float
    workers: dict[str, int]
    copies: tuple[ShardCopy, ...]
    preempt_deadline_at: float = 0.0
    left_at: float = 0.0
    fabric: str = ""
    memory_bytes: int = 0


class ExitRow(msgspec.Struct, frozen=True):
    """How and when a rank's worker ended."""

    body: WorkerExited
    at: float


class JobRow(msgspec.Struct):
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.SUBMITTED
    message: str = "waits for hosts"
    ended_at: float = 0.0
    stop_requested: bool = False
    newest_step: int = -1
    generation: int = -1
    failures: tuple[PastFailure, ...] = ()


class GenerationRow(msgspec.Struct):
    plan: GenerationPlan
    decision: int
    started_at: float = 0.0
    restore_step: int | None = None
    lineage: Lineage | None = None


class CommandRow(msgspec.Struct):
    command: Command
    action: int
    phase: str
    created_at: float
    dispatched_at: float = 0.0
    is_open: bool = True
    progress: int = 0
    update: CommandUpdate | None = None


class ActionRow(msgspec.Struct):
    number: int
    incident_id: str
    plan: ActionPlan
    started_at: float
    state: ActionState = ActionState.QUEUED
    phase: str = ""
    attempt: int = 1
    version: int = 0
    message: str = ""
    ended_at: float = 0.0
    commands: list[CommandRow] = msgspec.field(default_factory=list)


class StandingRow(msgspec.Struct):
    """A host's standing that was ahead of this database, or whose word is needed. None: it has not given it."""

    standing: HostStanding | None
    received_at: float
    first_received_at: float
    is_settled: bool = False
    is_needed: bool = False


class StateChange(msgspec.Struct, frozen=True):
    """One entry in the history of an incident or an action."""

    number: int  # of the incident or action
    at: float
    state: IncidentState | ActionState
    text: str = ""  # an incident's message, an action's phase


_NOT_STORED = ("clock", "is_away", "lock", "_names")


class Memory:
    """One database. `clock` is its machine's: the time of leases."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_away = False  # every transaction fails, as with a server that does not answer
        self.lock = threading.RLock()
        self._names = count(1)  # randomness that no backup brings back
        self._make()

    def _make(self) -> None:
        """Make an empty database."""
        self.revision = 0
        self.cluster_id = f"cluster-{next(self._names)}"
        self.incarnation = ""
        self.decision_floor = 0
        self.standings: dict[str, StandingRow] = {}
        self.held = Held()
        self.cursor: Cursor | None = None
        self.signals: dict[SignalKey, Signal] = {}  # in the order in which they were stored
        self.watermarks: dict[Sender, int] = {}
        self.hosts: dict[str, HostRow] = {}
        self.learned: dict[str, LearnedJob] = {}  # by job, from sensors
        self.drains: dict[str, DrainView] = {}  # by host
        self.conditions: dict[str, dict[ConditionKey, StandingCondition]] = {}  # by host
        self.checks: dict[str, HostCheck] = {}  # by host
        self.ranks: defaultdict[tuple[str, int], dict[int, RankRow]] = defaultdict(dict)
        self.exits: dict[RankKey, ExitRow] = {}
        self.persistent_copies: dict[tuple[str, int, int, int], ShardCopy] = {}
        self.jobs: dict[str, JobRow] = {}
        self.generations: dict[tuple[str, int], GenerationRow] = {}
        self.incidents: dict[int, Incident] = {}
        self.incident_changes: list[StateChange] = []
        self.decisions: dict[int, tuple[Decision, int]] = {}  # with the epoch
        self.rounds: list[StoredRound] = []
        self.actions: dict[int, ActionRow] = {}
        self.action_changes: list[StateChange] = []
        self.commands: dict[str, CommandRow] = {}
        self.open_commands: defaultdict[str, dict[str, CommandRow]] = defaultdict(dict)  # by host
        self.events: list[Event] = []

    def begin_epoch(self, held: Held) -> None:
        """A new leader, or the same one under a new epoch."""
        self.held, self.incarnation = held, self.new_incarnation()

    def new_incarnation(self) -> str:
        """A name that no copy of this database uses."""
        return f"i{next(self._names)}"

    def back_up(self) -> dict[str, Any]:
        """The content of a backup."""
        return deepcopy(
            {name: value for name, value in vars(self).items() if name not in _NOT_STORED}, _immutable_values(self)
        )

    def restore(self, backup: Mapping[str, Any] | None) -> None:
        """Replace this database with a backup, or an empty one."""
        self._make()
        vars(self).update(backup or {})

    def transaction(self) -> AbstractContextManager[bool]:
        """The lock, to be entered. Raises Unreachable while the database is away."""
        if self.is_away:
            raise Unreachable("The simulated database does not answer.", hint="wait until the fault is over")
        return self.lock

    def raise_watermark(self, sender: Sender, at_least: int = 0) -> None:
        """Advance a sender's watermark over all signals stored without a gap behind it."""
        mark = max(at_least, self.watermarks.get(sender, 0))
        while (*sender, mark + 1) in self.signals:
            mark += 1
        if mark:
            self.watermarks[sender] = mark

    def changed(self, news: Sequence[Event] = ()) -> None:
        """End a transaction that wrote."""
        self.revision += 1
        self.events += news

    def raise_newest_step(self, job: str, step: int) -> None:
        """Record that a rank completed `step`, unless a newer one is known."""
        row = self.jobs.get(job)
        if row is not None:
            row.newest_step = max(row.newest_step, step)

    def close_command(self, row: CommandRow) -> None:
        """Stop handing it out."""
        row.is_open = False
        self.open_commands[row.command.host_id].pop(row.command.command_id, None)


def _immutable_values(memory: Memory) -> dict[int, Any]:
    """Values that never change, so that `deepcopy` need not copy them."""
    frozen = (
        *memory.rounds,
        *memory.events,
        *memory.signals.values(),
        *memory.decisions.values(),
        *memory.incidents.values(),
        *(action.plan for action in memory.actions.values()),
        *(generation.plan for generation in memory.generations.values()),
        *(row.command for row in memory.commands.values()),
    )
    return {id(value): value for value in frozen}


def record_of(memory: Memory) -> Record:
    """The history in a simulated database."""
    states: dict[int, list[tuple[int, IncidentState]]] = {}
    for place, change in enumerate(memory.incident_changes, 1):
        states.setdefault(change.number, []).append((place, IncidentState(change.state)))
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    for place, change in enumerate(memory.action_changes, 1):
        began.setdefault(change.number, place)
        if ActionState(change.state).ended:
            ended.setdefault(change.number, place)
    return Record(
        epoch=memory.held.epoch,
        incidents=tuple(IncidentRecord(i, tuple(states.get(n, ()))) for n, i in sorted(memory.incidents.items())),
        decisions=tuple(DecisionRecord(n, epoch, d) for n, (d, epoch) in sorted(memory.decisions.items())),
        actions=tuple(
            ActionRecord(n, row.plan, row.incident_id, row.state, began[n], ended.get(n, -1))
            for n, row in sorted(memory.actions.items())
        ),
        commands=tuple(
            CommandRecord(row.command, row.action, row.phase, row.update.state if row.update is not None else None)
            for row in memory.commands.values()
        ),
        generations=tuple(
            GenerationRecord(row.plan, row.decision, row.started_at, row.restore_step, row.lineage)
            for _, row in sorted(memory.generations.items())
        ),
    )
