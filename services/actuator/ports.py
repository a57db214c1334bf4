"""What the playbook sees and answers, and what the executor needs of the database."""

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

ANSWER_SLACK_S = 2.0  # for the answer to travel, after the daemon's own deadline


class OutboxCommand(msgspec.Struct, frozen=True):
    """An outbox row and what its host answered last (None: nothing yet)."""

    command: Command
    phase: str
    created_at: float
    update: CommandUpdate | None

    @property
    def state(self) -> UpdateState | None:
        return self.update.state if self.update else None


class ActionProgress(msgspec.Struct, frozen=True):
    """One open action with everything that happened to it so far."""

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
    attempt: int = 1  # of the present phase; an emergency save that came too late is named anew
    watched_since: float = 0.0  # wall clock; before it this actuator was away, and no host could answer it

    @property
    def deadline_at(self) -> float:
        """Time in which no host could answer does not count, but for a host that is about to be taken away."""
        is_urgent = self.plan.kind is DecisionKind.EMERGENCY_CHECKPOINT
        since = self.started_at if is_urgent else max(self.started_at, self.watched_since)
        return since + self.plan.deadline_s

    def answer_due(self, record: OutboxCommand) -> float:
        """When a host that has not answered by then is given up."""
        return max(record.created_at, self.watched_since) + record.command.deadline_s + ANSWER_SLACK_S

    def remaining_s(self, now: float) -> float:
        """For what is begun now; never nothing."""
        return max(0.1, self.deadline_at - now)


class CommandDraft(msgspec.Struct, frozen=True):
    """A command before the store gives it the fence of the present lease."""

    command_id: str
    host_id: str
    body: CommandBody
    deadline_s: float


class PlaybookStep(msgspec.Struct, frozen=True):
    """The next move of an action. An empty step (no commands, same phase and state) means: wait."""

    phase: str
    state: ActionState
    commands: tuple[CommandDraft, ...] = ()
    message: str = ""
    attempt: int = 1
    placement: Placement | None = None  # set when the restore step was fixed: stored with the generation
    restore: RestorePlan | None = None
    events: tuple[Event, ...] = ()
    wake_at: float = 0.0


class ActionStore(Protocol):
    """The executor's side of the database. Any number of actuators share it."""

    def open_actions(self) -> list[ActionProgress]: ...

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        """Store a step in one transaction with its commands, stamped with the present lease epoch; False if another
        actuator was first (the version moved) or the action was superseded."""
        ...

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        """Unanswered commands of open actions for a host, oldest first; marks them dispatched."""
        ...

    def record(self, update: CommandUpdate) -> None:
        """Keep a host's answer; idempotent, and never backwards (succeeded stays succeeded)."""
        ...


class Judgement(msgspec.Struct, frozen=True):
    """Whose commands a database gives, and which of the hosts that ask know more than it does."""

    cluster: str
    incarnation: str
    ahead: frozenset[str]


class Standings(Protocol):
    """What hosts obeyed, compared with what the database knows."""

    def judge(self, obeyed: Mapping[str, LastObeyed]) -> Judgement: ...

    def tell(self, standing: HostStanding) -> None:
        """Keep what a host tells that is ahead of the database."""
        ...


class CommandOutbox(Protocol):
    """The commands, as those see them who hand them out. Any number of actuators share it."""

    def unanswered(self) -> dict[str, tuple[int, int]]:
        """Each host with unanswered commands of open actions -> a pair that is another whenever they changed."""
        ...

    def daemons_of(self, host_ids: Sequence[str]) -> dict[str, str]:
        """Host -> the incarnation whose report is the newest stored; without those that never reported."""
        ...

    def commands_for_hosts(self, host_ids: Sequence[str], now: float) -> dict[str, list[Command]]:
        """As `ActionStore.commands_for`, for several hosts at once; those without any are left out."""
        ...

    def record(self, update: CommandUpdate) -> None:
        """Keep a host's answer; idempotent, and never backwards (succeeded stays succeeded)."""
        ...
