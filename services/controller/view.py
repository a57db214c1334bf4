"""What the policy sees and what it answers. Plain values: no clock, no I/O.

Identifiers are derived from counters in the view, so that the same view and signals give the same decisions,
to the letter (replay, simulation).
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
    """Every number that the policy uses, with its unit."""

    root_cause_window_s: float = 2.0  # secondary failures (a lost connection) wait this long for their cause
    action_deadline_s: float = 60.0
    verify_deadline_s: float = 300.0  # from the start of the workers to steps that advance again
    emergency_margin_steps: int = 3  # S = newest beacon step + margin
    emergency_reserve_s: float = 5.0  # kept of a notice's time for the migration itself
    identical_exception_limit: int = 2  # the same exception at the same step this often is a bug in the job
    max_decisions_per_incident: int = 8
    unwatched_verify_s: float = 10.0  # a script that never attached shows no steps: living this long is its proof
    start_patience_s: float = 120.0  # for a file that no host has, a disk that is full everywhere: then the job fails
    spare_fresh_s: float = 15.0  # a host without a report for this long is not given work
    rollback_free_s: float = 10.0  # steps that take less than this to do again are given up without a wait
    rollback_wait_s: float = 900.0  # the longest wait for hosts that hold newer steps; 0: none
    refill_steps: int = 10  # new steps of a generation that refill the restart budget
    refill_slow_steps_s: float = 60.0  # a generation that ran this long refills it with one new step
    refill_unwatched_s: float = 600.0  # a script that shows no steps refills it by running this long


class DrainView(msgspec.Struct, frozen=True):
    """An operator's newest wish about a host. Moments are wall clock, of the API that took it."""

    state: DrainState
    requested_at: float
    deadline_at: float  # ranks that are still there then stay
    reason: str = ""


class HostView(msgspec.Struct, frozen=True):
    host_id: str
    state: HostState
    since: float
    address: str
    failure_domain: str
    engine_address: str
    free_port: int
    last_report_at: float  # wall clock of the sensor that heard of it
    preempt_deadline_at: float = 0.0  # 0.0: no notice
    job: str = ""  # the job that has ranks on it
    reason: str = ""
    stale_jobs: Mapping[str, int] = {}  # job -> generation of workers in its newest report that were superseded since
    drain: DrainView | None = None
    stored_report_at: float = 0.0  # of the newest report that was stored, if that is not the last one
    left_at: float = 0.0  # when it said goodbye; 0.0: it has not, or came back
    recent_losses: int = 0  # how often it was lost with ranks within the last hour

    @property
    def known_at(self) -> float:
        """As of when its workers and its ranks' positions are known: of many hosts reports are stored in turns."""
        return self.stored_report_at or self.last_report_at

    @property
    def is_drained(self) -> bool:
        """Whether an operator wants no rank on it."""
        return self.drain is not None and self.drain.state is DrainState.REQUESTED

    @property
    def is_leaving(self) -> bool:
        """Whether its ranks are to go elsewhere while they can."""
        return self.preempt_deadline_at > 0.0 or self.is_drained


class RankView(msgspec.Struct, frozen=True):
    """The newest that is known of a rank of the running generation."""

    rank: int
    host_id: str
    step: int
    phase: Phase
    reported_at: float
    exited: WorkerExited | None = None
    exited_at: float = 0.0
    is_gone: bool = False  # its host told of it once; the daemon that runs there now does not know of it


class GenerationView(msgspec.Struct, frozen=True):
    generation: int
    parent: int | None
    lineage: Lineage  # including this generation once it started
    hosts: tuple[HostRanks, ...]
    peers: Mapping[str, tuple[str, ...]]
    started_at: float  # 0.0: granted, not started
    restore_step: int | None
    restart_count: int  # all restarts of workers that failed
    ranks: tuple[RankView, ...] = ()
    restarts_used: int = -1  # of the budget, see GenerationPlan
    furthest_step: int = -1
    run: str = ""
    parent_lineage: Lineage = ()  # the history that it was to go on from
    ran_before_s: float = 0.0  # of one that was adopted: how long it had run by then

    @property
    def used_restarts(self) -> int:
        """Restarts since the last progress; one of an older release never refilled its budget."""
        return self.restart_count if self.restarts_used < 0 else self.restarts_used


class PastFailure(msgspec.Struct, frozen=True):
    """How an earlier generation ended, for telling a bug in the job from a fault in the machine."""

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
    message: str = ""  # of its state
    ended_at: float = 0.0  # 0.0: it has not ended
    stored_run: str = ""
    before: GenerationView | None = None  # of a job that was submitted again: the last generation of its earlier life

    @property
    def run(self) -> str:
        """What its folders are named after."""
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
    positions: Mapping[str, int] = {}  # str(rank) -> newest completed step, from the hosts that stopped
    restore_step: int | None = None
    restore_fixed: bool = False
    failed: Mapping[str, tuple[str, str]] = {}  # hosts that failed in this phase: code, message

    @property
    def of_generation(self) -> int:
        """The newest generation that it is about."""
        return self.plan.next.generation if self.plan.next is not None else self.plan.generation


class ToldStanding(msgspec.Struct, frozen=True):
    """What a host that is ahead of the database told, and is not settled. Moments are wall clock, of who took it."""

    standing: HostStanding
    told_at: float
    first_told_at: float


class View(msgspec.Struct, frozen=True):
    """One consistent read of the store."""

    jobs: tuple[JobView, ...]
    hosts: tuple[HostView, ...]
    incidents: tuple[Incident, ...]  # not closed
    actions: tuple[ActionView, ...]  # of each open incident the newest, all open ones, failed starts of running jobs
    copies: tuple[ShardCopy, ...]  # as last reported
    next_incident: int
    next_decision: int
    is_whole: bool = True  # all hosts are in it; of very many only those that a round is about
    cluster: str = ""  # whose database it is
    standings: tuple[ToldStanding, ...] = ()  # of hosts that are ahead of it


class HostChange(msgspec.Struct, frozen=True):
    host_id: str
    state: HostState
    reason: str
    preempt_deadline_at: float | None = None  # None: as it was
    ended_drain: DrainView | None = None  # the wish that is answered: refused if it was requested, else forgotten


class JobChange(msgspec.Struct, frozen=True):
    job: str
    state: JobState
    message: str
    failure: PastFailure | None = None  # appended to the job's record


class AdoptedJob(msgspec.Struct, frozen=True):
    """A job as its hosts run it, to be supervised from now on."""

    spec: JobSpec
    plan: GenerationPlan
    placement: Placement
    decision_id: str


class Adoption(msgspec.Struct, frozen=True):
    """What is taken over from hosts that are ahead of the database."""

    settled: tuple[ToldStanding, ...]
    epoch_floor: int  # the next epoch is above it
    decision_floor: int  # so is the next decision's number
    jobs: tuple[AdoptedJob, ...]


class Outcome(msgspec.Struct, frozen=True):
    """All that one round of the policy changes; stored in one transaction with the consumer's position."""

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
