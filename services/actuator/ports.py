"""The playbook's input and output, and what the executor needs from the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from flyball.contracts.checkpoints import RestorePlan, ShardCopy
from flyball.contracts.cluster import Placement
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    CommandBody,
    CommandUpdate,
    DecisionKind,
    UpdateState,
)
from flyball.contracts.events import Event
from flyball.contracts.reports.standings import HostStanding, LastObeyed

ASK_AGAIN_S = 30.0  # a host whose word is needed
AHEAD_AGAIN_S = 30.0  # a host whose standing was settled is ahead again no sooner: none ends epochs at will
ANSWER_SLACK_S = 2.0  # beyond the daemon's own deadline, for its answer to arrive


class OutboxCommand(msgspec.Struct, frozen=True):
    """A command in the outbox, and its host's last answer (None: none yet)."""

    command: Command
    phase: str
    created_at: float
    update: CommandUpdate | None

    @property
    def state(self) -> UpdateState | None:
        return self.update.state if self.update else None


class ActionProgress(msgspec.Struct, frozen=True):
    """One open action, with everything that has happened to it so far."""

    action_id: str
    decision_id: str
    incident_id: str
    plan: ActionPlan
    state: ActionState
    phase: str  # '' before the first
    version: int  # compare-and-set
    started_at: float
    commands: tuple[OutboxCommand, ...]
    persistent_copies: tuple[ShardCopy, ...] = ()  # copies on the persistent tier, which no host owns
    engine_addresses: Mapping[str, str] = {}  # host -> "ip:port"
    attempt: int = 1  # of the current phase; an emergency save that came too late gets another step
    watched_since: float = 0.0  # wall clock; before that this actuator was away, and hosts could not answer

    @property
    def deadline_at(self) -> float:
        """Time in which hosts could not answer does not count, except in an emergency: its host will be gone."""
        is_urgent = self.plan.kind is DecisionKind.EMERGENCY_CHECKPOINT
        since = self.started_at if is_urgent else max(self.started_at, self.watched_since)
        return since + self.plan.deadline_s

    def answer_due(self, record: OutboxCommand) -> float:
        """When to give up a host that has not answered."""
        return max(record.created_at, self.watched_since) + record.command.deadline_s + ANSWER_SLACK_S

    def remaining_s(self, now: float) -> float:
        """The time for a command that is sent now; never zero."""
        return max(0.1, self.deadline_at - now)


class CommandDraft(msgspec.Struct, frozen=True):
    """A command before the store stamps it with the fence of the current lease."""

    command_id: str
    host_id: str
    body: CommandBody
    deadline_s: float


class PlaybookStep(msgspec.Struct, frozen=True):
    """The next move of an action. An empty one (no commands, same phase and state) means: wait."""

    phase: str
    state: ActionState
    commands: tuple[CommandDraft, ...] = ()
    message: str = ""
    attempt: int = 1
    placement: Placement | None = None  # set once the restore step is chosen; stored with the generation
    restore: RestorePlan | None = None
    events: tuple[Event, ...] = ()
    wake_at: float = 0.0
    job_message: str = ""  # replaces the job's, if the action finds that the decision's was not the whole truth


class ActionStore(Protocol):
    """The executor's side of the database. Any number of actuators share it."""

    def open_actions(self) -> list[ActionProgress]: ...

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        """Store a step with its commands, stamped with the current lease epoch, in one transaction. False if another
        actuator was first (the version changed) or the action was superseded."""
        ...

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        """The unanswered commands of open actions for a host, oldest first. Marks them as dispatched."""
        ...

    def record(self, update: CommandUpdate) -> None:
        """Store a host's answer. Idempotent, and never backwards: succeeded stays succeeded."""
        ...


class Judgement(msgspec.Struct, frozen=True):
    """The identity of the database that gives commands, which of the asking hosts are ahead of it, and which of them
    should report their standing all the same."""

    cluster: str
    incarnation: str
    ahead: frozenset[str]
    asked: frozenset[str] = frozenset()


class Standings(Protocol):
    """Compares the last command that hosts obeyed with the database."""

    def judge(self, obeyed: Mapping[str, LastObeyed]) -> Judgement: ...

    def record(self, standing: HostStanding) -> None:
        """Store the standing of a host that is ahead of the database."""
        ...


class CommandOutbox(Protocol):
    """The outbox for handing out commands. Any number of actuators share it."""

    def unanswered(self) -> dict[str, tuple[int, int]]:
        """host with unanswered commands of open actions -> a pair that changes whenever these change."""
        ...

    def daemons_of(self, host_ids: Sequence[str]) -> dict[str, str]:
        """host -> the incarnation of its newest stored report; without hosts that never reported."""
        ...

    def commands_for_hosts(self, host_ids: Sequence[str], now: float) -> dict[str, list[Command]]:
        """As `ActionStore.commands_for`, for several hosts at once; without hosts that have no commands."""
        ...

    def record(self, update: CommandUpdate) -> None:
        """Store a host's answer. Idempotent, and never backwards: succeeded stays succeeded."""
        ...
