"""The policy's input and output. Plain values: no clock, no I/O.

Identifiers come from counters in the view, so that the same view and signals give identical decisions (replay,
simulation).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase, Placement
from flyball.contracts.decisions import ActionPlan, ActionState, Decision, GenerationPlan, Incident
from flyball.contracts.events import Event
from flyball.contracts.identity import run_id
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import WorkerExited
from flyball.contracts.reports.standings import HostStanding


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy's settings."""

    root_cause_window_s: float = 2.0  # secondary failures (a lost connection) wait this long for their cause
    action_deadline_s: float = 60.0
    verify_deadline_s: float = 300.0  # from the start of the workers to steps that advance again
    emergency_margin_steps: int = 3  # an emergency save names the newest step in beacons plus this margin
    emergency_reserve_s: float = 5.0  # of a notice's time, reserved for the migration itself
    identical_exception_limit: int = 2  # so often the same exception at the same step is a bug in the job
    max_decisions_per_incident: int = 8
    unwatched_verify_s: float = 10.0  # a script that never attaches reports no steps: if it runs this long, it works
    start_patience_s: float = 120.0  # for a file that no host has, or full disks everywhere; then the job fails
    spare_fresh_s: float = 15.0  # a host without a report for this long gets no work
    rollback_free_s: float = 10.0  # steps that can be redone in less time are given up without a wait
    rollback_wait_s: float = 900.0  # the longest wait for hosts that hold newer steps; 0: none
    refill_steps: int = 10  # new steps of a generation that refill the restart budget
    refill_slow_steps_s: float = 60.0  # a generation that ran this long refills it with one new step
    refill_unwatched_s: float = 600.0  # a script that reports no steps refills it by running this long


class DrainView(msgspec.Struct, frozen=True):
    """An operator's newest drain request for a host. Moments are the wall clock of the API."""

    state: DrainState
    requested_at: float
    deadline_at: float  # ranks that are still there by then stay
    reason: str = ""


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
    stored_report_at: float = 0.0  # of the newest stored report, if that is not the last one
    left_at: float = 0.0  # when its daemon announced its end; 0.0: it has not, or came back
    recent_losses: int = 0  # how often it was lost with ranks on it within the last hour

    @property
    def known_at(self) -> float:
        """The moment as of which its workers and their positions are known: with many hosts, reports are stored in
        turns."""
        return self.stored_report_at or self.last_report_at

    @property
    def is_drained(self) -> bool:
        """Whether an operator drains it."""
        return self.drain is not None and self.drain.state is DrainState.REQUESTED

    @property
    def is_leaving(self) -> bool:
        """Whether its ranks should move elsewhere while they can."""
        return self.preempt_deadline_at > 0.0 or self.is_drained


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
    failed: Mapping[str, tuple[str, str]] = {}  # host that failed in this phase -> code, message

    @property
    def of_generation(self) -> int:
        """The newest generation that the action is about."""
        return self.plan.next.generation if self.plan.next is not None else self.plan.generation


class ReportedStanding(msgspec.Struct, frozen=True):
    """The standing of a host that is ahead of the database, not settled yet. Moments are the receiver's wall clock."""

    standing: HostStanding
    told_at: float
    first_told_at: float


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


class HostChange(msgspec.Struct, frozen=True):
    host_id: str
    state: HostState
    reason: str
    preempt_deadline_at: float | None = None  # None: as it was
    ended_drain: DrainView | None = None  # the drain that is over: refused if it was still requested


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
    """What the database takes over from hosts that are ahead of it."""

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
    jobs: tuple[JobChange, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float = 0.0  # wall clock at which to decide again without a signal; 0.0: no need
    adoption: Adoption | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (
            self.incidents
            or self.decisions
            or self.superseded_actions
            or self.hosts
            or self.jobs
            or self.events
            or self.adoption is not None
        )
