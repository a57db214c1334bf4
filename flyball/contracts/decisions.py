"""Incidents, decisions, actions, and the commands that carry them to hosts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from flyball.contracts.checkpoints import JobHistory, Lineage, ShardCopy
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.identity import (
    CommandId,
    Fence,
    HostId,
    Incarnation,
    JobName,
    Moment,
    Pid,
    Port,
    Rank,
    RunId,
    SeenStep,
)
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.host_checks import CheckMeasure
from flyball.contracts.reports.rank_logs import LogRequest
from flyball.contracts.reports.rank_stands import RankStand

MAX_ANSWER_CHARS: Final = 65_536  # of the message in an answer


class IncidentState(StrEnum):
    OPEN = "open"
    DECIDING = "deciding"
    ACTING = "acting"
    VERIFYING = "verifying"
    RESOLVED = "resolved"
    ESCALATED = "escalated"

    @property
    def closed(self) -> bool:
        return self in (IncidentState.RESOLVED, IncidentState.ESCALATED)


class DecisionKind(StrEnum):
    START_JOB = "start_job"
    RESTART_IN_PLACE = "restart_in_place"
    MIGRATE_TO_SPARE = "migrate_to_spare"
    TAKE_STACKS = "take_stacks"  # see where the ranks of a job that hangs stand, before anything is stopped
    CHECK_HOSTS = "check_hosts"  # measure hosts in groups, to find the bad ones
    EMERGENCY_CHECKPOINT = "emergency_checkpoint"
    RESUME = "resume"  # ranks parked at an emergency step train on where they are
    CORDON = "cordon"
    UNCORDON = "uncordon"
    ADOPT = "adopt"  # take over from the hosts what the database does not know
    SHRINK = "shrink"
    GROW = "grow"
    FAIL_JOB = "fail_job"
    STOP_JOB = "stop_job"
    COMPLETE_JOB = "complete_job"
    HOLD = "hold"


class ActionState(StrEnum):
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    ACKNOWLEDGED = "acknowledged"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    SUPERSEDED = "superseded"

    @property
    def ended(self) -> bool:
        return self in (ActionState.SUCCEEDED, ActionState.FAILED, ActionState.TIMED_OUT, ActionState.SUPERSEDED)


class GenerationPlan(msgspec.Struct, frozen=True):
    """A generation granted by a decision.

    The restore step is fixed only after the old workers have stopped and every engine has reported its copies
    (docs/decisions/0001).
    """

    job: JobName
    generation: int
    parent: int | None
    hosts: tuple[HostRanks, ...]
    peers: Mapping[str, tuple[HostId, ...]]
    parent_lineage: Lineage  # (): start from scratch
    restart_count: int  # restarts after worker failures, over the job's whole life
    known_step: int = -1  # the recovery point as last reported; finding less means a report is incomplete
    master_port: int = 0  # free on rank 0's host at decision time; a newer one from its stop result takes precedence
    run: RunId = ""
    restarts_used: int = -1  # of max_restarts, since the job's last progress; -1: same as restart_count
    furthest_step: int = -1  # reached by earlier generations: progress is counted from here
    ran_before_s: float = 0.0  # of an adopted generation: how long it had already run
    too_few_hosts: int = 0  # with so many hosts, its ranks run out of memory; 0: not seen
    step_s: float = 0.0  # after an adoption: how long a step took until then

    @property
    def used_restarts(self) -> int:
        return self.restart_count if self.restarts_used < 0 else self.restarts_used


class HostToCheck(msgspec.Struct, frozen=True):
    """A host that takes part in a check."""

    host_id: HostId
    address: str
    free_port: int  # found free a moment ago
    is_helper: bool = False  # not judged: it is there for want of hosts that passed


class HostCheckPlan(msgspec.Struct, frozen=True):
    """Hosts to check together, in the order in which neighbours are paired."""

    hosts: tuple[HostToCheck, ...]
    timeout_s: float  # of each round
    stops: bool = False  # stop the generation first
    wants_fast: bool = False  # a slow host does not count as fit


class ActionPlan(msgspec.Struct, frozen=True):
    """The plan that the actuator carries out. The decision's kind determines which fields are used; the playbook
    lists the phases of each kind."""

    kind: DecisionKind
    job: str  # '': the action is about hosts only, and `spec` means nothing
    spec: JobSpec
    generation: int  # the generation to stop, save or end
    stop_hosts: tuple[HostId, ...] = ()  # hosts whose workers of `generation` are stopped
    unreachable_hosts: tuple[HostId, ...] = ()  # known to be lost: not waited for
    next: GenerationPlan | None = None
    emergency_step: int = -1
    deadline_s: float = 30.0  # from the decision to the end of the action
    grace_s: float = 0.0  # SIGTERM this long before SIGKILL; 0: SIGKILL at once
    warm_hosts: tuple[HostId, ...] = ()  # hosts that prepare a warm standby for the job; not waited for
    claimed_hosts: tuple[HostId, ...] = ()  # free hosts for which the ranks park; other jobs' moves leave them alone
    history: JobHistory | None = None  # of a job that ends, or continues after it had ended
    lacks_ranks: bool = False  # some rank's host is unreachable: no newer step can become complete
    check: HostCheckPlan | None = None
    keep_memory: bool = False  # of a job that fails since its steps cannot be restored: nothing is freed


class Alternative(msgspec.Struct, frozen=True):
    """One course that was weighed, the chosen one included. A GPU second is one second of one rank."""

    kind: DecisionKind
    expected_cost_gpu_s: float  # lost until the job is where it was
    reason: str  # how the cost comes about, and why the course was not chosen
    is_feasible: bool = True
    is_chosen: bool = False


class Decision(msgspec.Struct, frozen=True):
    """The controller's choice and its reason. `evidence` holds the numbers quoted in the reason."""

    decision_id: str  # "dec-17"
    incident_id: str  # '' for a decision without an incident (start, stop, complete)
    job: str
    kind: DecisionKind
    reason: str
    rule: str  # name of the policy rule that decided
    at: float
    evidence: Mapping[str, str | int | float | bool | None] = {}
    action: ActionPlan | None = None  # None: hold
    alternatives: tuple[Alternative, ...] = ()  # cheapest first; (): nothing was to be weighed


class FailedStart(msgspec.Struct, frozen=True):
    """A host that could not start its ranks, within one incident. The failure is blamed on the host until another host
    fails the same way."""

    host_id: HostId
    code: str  # of the FlyballError, e.g. not_found, storage_full, port_in_use
    generation: int  # the newest one that failed
    first_at: float
    times: int = 1  # number of generations
    last_at: float = 0.0  # 0.0: recorded by an older release


class Harm(msgspec.Struct, frozen=True):
    """Steps of a generation that are not worth restoring: their state is wrong, though their bytes are as saved. Steps
    up to `clean_step` are good (-1: none is), those from `first_step` on are bad, those in between suspect."""

    clean_step: int
    first_step: int


class Incident(msgspec.Struct, frozen=True):
    """The life of one problem."""

    incident_id: str  # "inc-4"
    job: str  # '': a host without a placement
    host_id: str  # '': not a single host's problem
    cause: str  # e.g. worker_killed, worker_exception, rank_stalled, host_silent, preemption_notice
    state: IncidentState
    opened_at: float
    since: float  # when the current state began
    message: str
    generation: int
    failed_step: int = -1  # newest step that all ranks had completed before it
    fault_at: float = 0.0  # the last sign of life before it; all its durations begin here
    observed_at: float = 0.0  # when the first signal was observed, on its observer's clock
    action_id: str = ""  # the newest action
    hold_until: float = 0.0  # wall clock; 0.0 when not holding
    holding_for: str = ""  # what a hold waits for; '' when not holding
    decisions_made: int = 0  # that led to an action, about its newest fault; at most max_decisions_per_incident
    decisions_before: int = 0  # likewise, about earlier faults since the job's last progress
    resolved_at: float = 0.0
    restored_step: int = -1
    lost_steps: int = -1  # -1 until known
    failed_starts: tuple[FailedStart, ...] = ()
    hosts: tuple[HostId, ...] = ()  # for saves_failing: where saves fail; for domain_silent: the silent hosts
    harm: Harm | None = None  # of the training itself, in `generation`
    excess_s: float = 0.0  # for straggler: how much longer per step than usual the rank computes
    expires_at: float = 0.0  # for straggler: when it is over unless it is named again, wall clock; 0.0: never
    part_of: str = ""  # the incident of the failure domain whose hosts fell silent together
    parts: tuple[str, ...] = ()  # for domain_silent: the incidents of the jobs that had ranks there


# --- commands: from the outbox to one host ---------------------------------------------------------------------------


class WarmUp(msgspec.Struct, frozen=True, tag="warm_up"):
    """Prepare a warm standby with the job's environment; for spares."""

    spec: JobSpec


class StopWorkers(msgspec.Struct, frozen=True, tag="stop_workers"):
    """Stop all workers of the job up to `generation`, then have the engine commit whatever was captured.

    `durable`: also write the newest recovery point to the disk and persistent tiers, because memory is about to be
    freed.
    """

    job: JobName
    generation: int
    grace_s: float
    flush_timeout_s: float = 10.0
    durable: bool = False
    history: JobHistory | None = None  # of a job that the engine may not know: it had ended, or the host lost its state


class StartWorkers(msgspec.Struct, frozen=True, tag="start_workers"):
    """Start this host's ranks of the placement, after stopping older workers of the job."""

    spec: JobSpec
    placement: Placement
    seal: GrantSeal = GrantSeal()  # the daemon keeps it, and returns it in its standing
    keys: EngineKeys = EngineKeys()  # added as the command is handed out


class SaveEmergency(msgspec.Struct, frozen=True, tag="save_emergency"):
    """Have every local rank save at `step` and park; report when the save is committed and replicated."""

    job: JobName
    generation: int
    step: int
    deadline_s: float


class FlushState(msgspec.Struct, frozen=True, tag="flush_state"):
    """Write the newest recovery point to the disk and persistent tiers now, whether or not the workers live.

    `disarm`: the emergency save is cancelled, and ranks parked at its step train on.
    """

    job: JobName
    generation: int
    timeout_s: float
    disarm: bool = False


class TakeStacks(msgspec.Struct, frozen=True, tag="take_stacks"):
    """Report where this host's ranks of the generation stand, with their Python stacks. Changes nothing."""

    job: JobName
    generation: int
    timeout_s: float


class CheckHost(msgspec.Struct, frozen=True, tag="check_host"):
    """Measure this host in a group of hosts: a matrix product on each device, and an all-reduce over the group."""

    job: str  # for which the check is made; '' for none
    check_id: str  # the same for all hosts of the group; no other group has it
    round: int  # from 1
    group: tuple[HostId, ...]  # in the order of their ranks
    master_address: str  # of the group's first host
    master_port: int
    timeout_s: float
    env: Mapping[str, str] = {}  # of the job: how its ranks reach each other


class EndJob(msgspec.Struct, frozen=True, tag="end_job"):
    """The job ended: stop what is left of it and free its slots, unless they hold data that no slower tier has."""

    job: JobName
    generation: int
    grace_s: float
    keep_memory: bool = False  # keep the slots until the job continues or their time to live expires
    drop_disk: bool = False  # it succeeded, and the disk tier in its hosts' state folders was only the default


CommandBody: TypeAlias = (
    WarmUp | StopWorkers | StartWorkers | SaveEmergency | FlushState | TakeStacks | CheckHost | EndJob
)


class Command(msgspec.Struct, frozen=True):
    """One outbox row for one host. Executed at most once per command_id; a repeat gets the stored result."""

    command_id: str  # "act-3f9a01c2-17.stop.host-a.1": unique across copies of the database, too
    action_id: str
    host_id: HostId
    fence: Fence
    body: CommandBody
    deadline_s: float  # the daemon gives up after this long and reports failure


class RankPosition(msgspec.Struct, frozen=True):
    """A rank's newest completed step, from its beacon; known after its death, too."""

    rank: Rank
    step: SeenStep


class CommandResult(msgspec.Struct, frozen=True):
    """The outcome of a command on a host. Each command fills the fields that apply to it."""

    positions: tuple[RankPosition, ...] = ()
    copies: tuple[ShardCopy, ...] = ()  # every verified copy of the job on this host, all tiers
    free_port: Port = 0
    pids: Mapping[str, Pid] = {}  # str(rank) -> pid
    stands: tuple[RankStand, ...] = ()
    flushed: Mapping[str, SeenStep] = {}  # tier -> the newest step that every local rank has there
    check: CheckMeasure | None = None


class UpdateState(StrEnum):
    ACKNOWLEDGED = "acknowledged"  # for save_emergency: armed, no local rank has reached the step
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"  # stale fence: nothing was done


class CommandUpdate(msgspec.Struct, frozen=True):
    """A host's reply to a command; may be sent more than once."""

    command_id: CommandId
    host_id: HostId
    incarnation: Incarnation
    state: UpdateState
    at: Moment
    message: Annotated[str, msgspec.Meta(max_length=MAX_ANSWER_CHARS)] = ""
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the FlyballError, or "too_late" for save_emergency
    result: CommandResult = CommandResult()


class CommandBatch(msgspec.Struct, frozen=True):
    """The reply to a daemon's long poll."""

    commands: tuple[Command, ...] = ()
    log_requests: tuple[LogRequest, ...] = ()
    cluster: str = ""  # whose commands these are; '' from an older release
    incarnation: str = ""  # of the cluster's database; changes with every epoch
    # The database does not know what the host obeyed last; the host gets no commands until it has reported that.
    report_standing: bool = msgspec.field(default=False, name="tell_standing")
    # The answer key of the host's engine. One that a job left gets no start command, but is asked for what it holds.
    keys: EngineKeys = EngineKeys()
