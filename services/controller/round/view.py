"""The policy's input and output. Plain values: no clock, no I/O.

Identifiers come from counters in the view, so that the same view and signals give identical decisions (replay,
simulation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec

from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase, Placement
from flyball.contracts.decisions import ActionPlan, ActionState, Decision, DecisionKind, GenerationPlan, Incident
from flyball.contracts.events import Event
from flyball.contracts.identity import run_id
from flyball.contracts.orders import DOMAIN, Order, OrderState
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.host_checks import CheckMeasure, HostCheck
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import WorkerExited
from flyball.contracts.reports.standings import HostStanding

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Percent: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy's settings: the cluster's, or those that a job has instead (`job_policy`)."""

    root_cause_window_s: Seconds = 2.0  # secondary failures (a lost connection) wait this long for their cause
    action_deadline_s: Seconds = 60.0  # for each step of an action
    verify_deadline_s: Seconds = 300.0  # from the start of the workers to steps that advance again
    emergency_margin_steps: Count = 3  # an emergency save names the newest step in beacons plus this margin
    emergency_reserve_s: Seconds = 5.0  # of a notice's time, reserved for the migration itself
    identical_exception_limit: Count = 2  # so often the same exception at the same step is a bug in the job
    # About one fault without a new step, or four times as many about independent ones; then the job fails.
    max_decisions_per_incident: Count = 8
    unwatched_verify_s: Seconds = 10.0  # a script that never attaches reports no steps: if it runs this long, it works
    start_patience_s: Seconds = 120.0  # for a file that no host has, or full disks everywhere; then the job fails
    spare_fresh_s: Seconds = 15.0  # a host without a report for this long gets no work
    rollback_free_s: Seconds = 10.0  # steps that can be recomputed in less time are given up without a wait
    rollback_wait_s: Seconds = 900.0  # the longest wait for hosts that hold newer steps; 0: none
    refill_steps: Count = 10  # new steps of a generation that refill the restart budget
    refill_slow_steps_s: Seconds = 60.0  # a generation that ran this long refills it with one new step
    refill_unwatched_s: Seconds = 600.0  # a script that reports no steps refills it by running this long
    dry_run: bool = False  # decide about incidents and record it, but do not act
    approve: tuple[DecisionKind, ...] = ()  # kinds of actions that an operator must approve first
    max_actions_per_hour: Count = 60  # about a job's incidents; starts that are tried again do not count
    cordoned_percent_per_hour: Percent = 20.0  # of all hosts, at least one, and no more than the largest rack has
    host_failures_allowed: Count = 2  # within the window; one more, and the host stays out until it is uncordoned
    host_failure_window_s: Seconds = 604_800.0  # a week
    host_check_timeout_s: Seconds = 60.0  # of each round of a check, for torch to be imported, too
    restart_decay_s: Seconds = 86_400.0  # a generation that ran this long gives one used restart back
    straggler_horizon_s: Seconds = 3600.0  # how much longer a straggler is assumed to hold up its job
    shrink_after_s: Seconds = 20.0  # wait for a host this long; then go on with fewer, if the job allows it
    grow: bool = True  # go back to as many hosts as the job asked for, when they are free
    grow_after_s: Seconds = 30.0  # a host must have been free and well for this long
    grow_cooldown_s: Seconds = 300.0  # and the job must have run for this long since its last start
    grow_horizon_s: Seconds = 3600.0  # how much longer the job is assumed to run, and the hosts to stay
    adopt_only: Annotated[str, msgspec.Meta(max_length=63)] = ""  # the one job to take over from hosts; '': any
    # Assumed for expected costs, as long as the job has nothing to measure.
    assumed_restart_s: Seconds = 10.0  # from a decision to restart in place until steps advance
    assumed_migration_s: Seconds = 20.0  # the same with a move to another host
    assumed_spare_wait_s: Seconds = 600.0  # until a host is free
    assumed_operator_s: Seconds = 1800.0  # until a person has started a failed job again


class DrainView(msgspec.Struct, frozen=True):
    """An operator's newest drain request for a host. Moments are the wall clock of the API."""

    state: DrainState
    requested_at: float
    deadline_at: float  # ranks that are still there by then stay
    reason: str = ""


class StandingCondition(msgspec.Struct, frozen=True):
    """A condition that stands on a host."""

    condition: HostCondition
    is_overruled: bool = False  # an operator gave the host work all the same

    @property
    def is_pressing(self) -> bool:
        """Whether ranks should leave the host for it."""
        return self.condition.severity is not Severity.INFO and not self.is_overruled


class HostView(msgspec.Struct, frozen=True):
    host_id: str
    state: HostState
    since: float
    address: str
    failure_domain: str
    engine_address: str
    free_port: int
    last_report_at: float  # wall clock of the sensor that received it
    preempt_deadline_at: float = 0.0  # 0.0: no notice
    job: str = ""  # the job that has ranks on it
    reason: str = ""
    stale_jobs: Mapping[str, int] = {}  # job -> generation of the superseded workers in its newest report
    drain: DrainView | None = None
    stored_report_at: float = 0.0  # as of when the newest stored report is, if that is known
    left_at: float = 0.0  # when its daemon announced its end; 0.0: it has not, or came back
    silenced_until: float = 0.0  # the end of a maintenance window (wall clock); 0.0: none now
    recent_losses: int = 0  # how often it was lost with ranks on it within the last hour
    failed_at: tuple[float, ...] = ()  # when it was lost with ranks on it, over the last month (wall clock)
    conditions: tuple[StandingCondition, ...] = ()
    check: HostCheck | None = None  # the newest
    fabric: str = ""  # the network in which hosts reach each other fast, '' if unknown
    memory_bytes: int = 0  # for its ranks, 0: unknown

    def silenced(self, until: Mapping[str, float]) -> HostView:
        """The host with the end of its maintenance window, if it is in one. `until`: target -> the end."""
        if not until:
            return self
        end = max(until.get(self.host_id, 0.0), until.get(f"{DOMAIN}{self.failure_domain}", 0.0))
        return msgspec.structs.replace(self, silenced_until=end) if end else self

    @property
    def pressing(self) -> tuple[HostCondition, ...]:
        """The conditions for which its ranks should leave, the worst first, then the oldest."""
        found = (one.condition for one in self.conditions if one.is_pressing and not self.silenced_until)
        return tuple(sorted(found, key=lambda one: (-one.severity.rank, one.since, one.key)))

    @property
    def is_broken(self) -> bool:
        """Whether it cannot train."""
        worst = (one for one in self.conditions if one.condition.severity is Severity.CRITICAL)
        return not self.silenced_until and any(one.is_pressing for one in worst)

    @property
    def known_at(self) -> float:
        """The moment as of which its workers and their positions are known: a report may have been under way for long,
        and with many hosts they are stored in turns."""
        return self.stored_report_at or self.last_report_at

    @property
    def is_drained(self) -> bool:
        """Whether an operator drains it."""
        return self.drain is not None and self.drain.state is DrainState.REQUESTED

    @property
    def is_unfit(self) -> bool:
        """Whether it takes no new ranks. A host with no more than a warning does, as the last choice."""
        return self.preempt_deadline_at > 0.0 or self.is_drained or bool(self.conditions and self.is_broken)

    @property
    def is_leaving(self) -> bool:
        """Whether its ranks should move elsewhere while they can."""
        return self.preempt_deadline_at > 0.0 or self.is_drained or bool(self.conditions and self.pressing)


class RankView(msgspec.Struct, frozen=True):
    """The newest known facts about a rank of the running generation."""

    rank: int
    host_id: str
    step: int
    phase: Phase
    reported_at: float
    exited: WorkerExited | None = None
    exited_at: float = 0.0
    is_gone: bool = False  # its host reported it once; the daemon that runs there now does not know it


class GenerationView(msgspec.Struct, frozen=True):
    generation: int
    parent: int | None
    lineage: Lineage  # including this generation once it started
    hosts: tuple[HostRanks, ...]
    peers: Mapping[str, tuple[str, ...]]
    started_at: float  # 0.0: granted, not started
    restore_step: int | None
    restart_count: int  # all restarts after failures of workers
    ranks: tuple[RankView, ...] = ()
    restarts_used: int = -1  # of the budget, see GenerationPlan
    furthest_step: int = -1
    run: str = ""
    parent_lineage: Lineage = ()  # the history that it continues
    ran_before_s: float = 0.0  # how long it had run when it was adopted
    too_few_hosts: int = 0  # with so many, an earlier generation ran out of memory; 0: none did
    step_s: float = 0.0  # how long a step took until the job was adopted; 0.0: it was not
    first_step_at: float = 0.0  # when rank 0 completed its first step, by its host's clock; 0.0: not known

    @property
    def used_restarts(self) -> int:
        """Restarts since the last progress. A generation of an older release never refilled its budget."""
        return self.restart_count if self.restarts_used < 0 else self.restarts_used


class PastFailure(msgspec.Struct, frozen=True):
    """How an earlier generation ended, to distinguish a bug in the job from a fault of a machine."""

    generation: int
    cause: str
    error_kind: str
    error_message: str
    step: int
    host_id: str = ""  # '': recorded by an older release, or not one host's


class PastRecovery(msgspec.Struct, frozen=True):
    """How long an earlier recovery of the job took, from its decision until steps advanced."""

    kind: DecisionKind
    took_s: float


class JobView(msgspec.Struct, frozen=True):
    spec: JobSpec
    state: JobState
    submitted_at: float
    stop_requested: bool
    generation: GenerationView | None
    failures: tuple[PastFailure, ...] = ()
    newest_step: int = -1  # highest step that any rank of any generation completed
    message: str = ""  # about its state
    ended_at: float = 0.0  # 0.0: it has not ended
    stored_run: str = ""
    recoveries: tuple[PastRecovery, ...] = ()  # the newest ones
    acted_at: tuple[float, ...] = ()  # when its actions about incidents of the last hour were decided
    before: GenerationView | None = None  # the last generation before the job was submitted again

    @property
    def run(self) -> str:
        """The run that its folders are named after."""
        return self.stored_run or run_id(self.submitted_at)


class ActionView(msgspec.Struct, frozen=True):
    action_id: str
    decision_id: str
    incident_id: str
    plan: ActionPlan
    state: ActionState
    phase: str
    started_at: float
    message: str = ""
    positions: Mapping[str, int] = {}  # str(rank) -> its newest completed step, from the hosts that stopped
    restore_step: int | None = None
    restore_fixed: bool = False
    stands: tuple[RankStand, ...] = ()  # where the ranks of a job that hangs stand, without their stacks
    checks: tuple[CheckMeasure, ...] = ()  # what hosts measured
    unmeasured: Mapping[str, str] = {}  # host whose daemon answered a check without a measurement -> why
    failed: Mapping[str, tuple[str, str]] = {}  # host that failed in this phase -> code, message

    @property
    def of_generation(self) -> int:
        """The newest generation that the action is about."""
        return self.plan.next.generation if self.plan.next is not None else self.plan.generation


class ReportedStanding(msgspec.Struct, frozen=True):
    """The standing of a host that is ahead of the database and not settled yet, or whose word is still needed. Moments
    are the receiver's wall clock."""

    standing: HostStanding
    told_at: float
    first_told_at: float
    sealed: tuple[str, ...] = ()  # jobs that this cluster gave it, as its seals prove
    # Likewise: job -> run and generation in which it was placed, and which it says has ended.
    ended: Mapping[str, tuple[str, int]] = {}
    is_settled: bool = False  # it gets commands
    is_needed: bool = False  # its word is needed for some job that is not adopted yet


class WordChange(msgspec.Struct, frozen=True):
    """Whether the word of a host is needed from now on. One that has not given it is asked."""

    host_id: str
    is_needed: bool


class UnreadableRow(msgspec.Struct, frozen=True):
    """A row of the database that cannot be decoded."""

    table: str
    key: str  # which row
    reason: str
    job: str = ""  # that it is about, if it is one job's


class OrderChange(msgspec.Struct, frozen=True):
    """What became of an operator's order."""

    order: Order
    state: OrderState
    message: str = ""


class Fleet(msgspec.Struct, frozen=True):
    """The size of the whole cluster."""

    hosts: int = 0  # 0: not known
    largest_domain: int = 0  # hosts of the largest failure domain; 0: no host has one

    @classmethod
    def of(cls, domains: Iterable[str]) -> Fleet:
        """Count hosts by their failure domains, '' if unknown."""
        counted = Counter(domains)
        return cls(counted.total(), max((count for domain, count in counted.items() if domain), default=0))


class View(msgspec.Struct, frozen=True):
    """One consistent read of the store."""

    jobs: tuple[JobView, ...]
    hosts: tuple[HostView, ...]
    incidents: tuple[Incident, ...]  # not closed
    actions: tuple[ActionView, ...]  # the newest of each open incident, all open ones, failed starts of running jobs
    copies: tuple[ShardCopy, ...]  # as last reported
    next_incident: int
    next_decision: int
    is_whole: bool = True  # with very many hosts, a view has only those that a round covers
    cluster: str = ""  # the identity of the database
    standings: tuple[ReportedStanding, ...] = ()  # of hosts that are ahead of the database
    orders: tuple[Order, ...] = ()  # operators'
    fleet: Fleet = Fleet()  # of a view that is not whole
    epoch: int = 0  # the present one
    asked: tuple[str, ...] = ()  # hosts whose word is awaited
    unreadable: tuple[UnreadableRow, ...] = ()  # rows that were set aside


class HostChange(msgspec.Struct, frozen=True):
    host_id: str
    state: HostState
    reason: str
    preempt_deadline_at: float | None = None  # None: as it was
    ended_drain: DrainView | None = None  # the drain that is over: refused if it was still requested


class ConditionChange(msgspec.Struct, frozen=True):
    """A condition that begins, changes, is overruled, or ends. `condition` is as the view has it if it ends."""

    host_id: str
    condition: HostCondition
    is_overruled: bool = False
    has_ended: bool = False


class CheckChange(msgspec.Struct, frozen=True):
    """The result of a host's check."""

    host_id: str
    check: HostCheck


class JobChange(msgspec.Struct, frozen=True):
    job: str
    state: JobState
    message: str
    failure: PastFailure | None = None  # appended to the job's record


class AdoptedJob(msgspec.Struct, frozen=True):
    """A job to supervise from now on, as its hosts run it."""

    spec: JobSpec
    plan: GenerationPlan
    placement: Placement
    decision_id: str


class Adoption(msgspec.Struct, frozen=True):
    """Facts for the database to take over from hosts that are ahead of it."""

    settled: tuple[ReportedStanding, ...]
    epoch_floor: int  # the next epoch will be higher
    decision_floor: int  # and the next decision's number
    jobs: tuple[AdoptedJob, ...]


class Outcome(msgspec.Struct, frozen=True):
    """All changes of one round of the policy. Stored in one transaction with the position in the stream."""

    incidents: tuple[Incident, ...] = ()  # new or changed, whole
    decisions: tuple[Decision, ...] = ()
    superseded_actions: tuple[str, ...] = ()
    hosts: tuple[HostChange, ...] = ()
    conditions: tuple[ConditionChange, ...] = ()
    jobs: tuple[JobChange, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float = 0.0  # wall clock at which to decide again without a signal; 0.0: no need
    adoption: Adoption | None = None
    orders: tuple[OrderChange, ...] = ()
    checks: tuple[CheckChange, ...] = ()
    words: tuple[WordChange, ...] = ()
    withdrawn: tuple[ReportedStanding, ...] = ()  # what a host said, and says no longer: to be forgotten

    @property
    def empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (
            self.incidents
            or self.decisions
            or self.superseded_actions
            or self.hosts
            or self.conditions
            or self.jobs
            or self.events
            or self.adoption is not None
            or self.orders
            or self.checks
            or self.words
            or self.withdrawn
        )
