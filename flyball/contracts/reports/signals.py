"""The observations of hosts, and how they reach the sensor.

A daemon sends one Report per interval, and at once when something happened. Its signals are numbered per (host,
incarnation); the daemon keeps them on disk until a reply says that the controller has committed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

import msgspec

from flyball.contracts.checkpoints import (
    CleanSteps,
    PeerTransports,
    RestoreReport,
    SaveInterval,
    ShardCopy,
    StoredPoints,
)
from flyball.contracts.cluster import HostFacts, Phase, WorkerError
from flyball.contracts.identity import (
    Duration,
    EngineAddresses,
    Generation,
    HostId,
    Incarnation,
    JobName,
    Moment,
    Pid,
    Rank,
    RepeatedJobName,
    SeenStep,
    Seq,
)
from flyball.contracts.reports.conditions import (
    MAX_CONDITIONS,
    ConditionKey,
    ConditionSource,
    HostCondition,
    Subject,
)
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, Workers
from flyball.contracts.reports.succession import Predecessors
from flyball.contracts.reports.testimony import Asked, Testimonies
from flyball.contracts.reports.training_health import (
    LossDiverged,
    LossRecovered,
    RankCompute,
    RankLoss,
    ReplayDiffers,
    Straggler,
    StragglerRecovered,
)

Text = Annotated[str, msgspec.Meta(max_length=16_384)]
Counters = Annotated[
    Mapping[Annotated[str, msgspec.Meta(max_length=64)], Annotated[int, msgspec.Meta(ge=-1, le=2**62)]],
    msgspec.Meta(max_length=256),
]
MAX_LOG_TAIL_CHARS: Final = 4_096
MAX_SAVE_INTERVALS: Final = 64
SaveIntervals = Annotated[tuple[SaveInterval, ...], msgspec.Meta(max_length=MAX_SAVE_INTERVALS)]
Sender: TypeAlias = tuple[str, str]  # (source, incarnation) of signals
ExitNumber = Annotated[int, msgspec.Meta(gt=-(2**31), lt=2**31)]


STORE_ENDED: Final = "store_ended"  # WorkerStartFailed.code: the process hosting the rendezvous store ended


class WorkerExited(msgspec.Struct, frozen=True, tag="worker_exited"):
    """A worker's process ended.

    Exactly one of `exit_code` and `signal_number` is set, or neither if a restarted daemon adopted the worker and could
    not learn it.
    """

    job: JobName
    generation: Generation
    rank: Rank
    pid: Pid
    exit_code: ExitNumber | None
    signal_number: ExitNumber | None
    last_step: SeenStep  # newest step in its beacon, -1 if none
    error: WorkerError | None = None
    expected: bool = False  # the daemon stopped it on command
    last_phase: Phase | None = None  # in its beacon; None: unknown
    error_class: Annotated[str, msgspec.Meta(max_length=64)] = ""  # an ErrorClass; '' from an older daemon
    log_tail: Annotated[str, msgspec.Meta(max_length=MAX_LOG_TAIL_CHARS)] = ""  # the last lines of its log
    core_dumped: bool = False
    kernel: Text = ""  # the kernel's own line about its end, as for a lack of memory


class WorkerStartFailed(msgspec.Struct, frozen=True, tag="worker_start_failed"):
    """A rank could not be started at all (script missing, no memory, port taken)."""

    job: JobName
    generation: Generation
    rank: Rank
    message: Text
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the FlyballError; '' from an older daemon


class RankStalled(msgspec.Struct, frozen=True, tag="rank_stalled"):
    """Beacons of a generation stopped moving. `ranks` are the likely cause, or all ranks if it cannot be determined."""

    job: JobName
    generation: Generation
    ranks: tuple[Rank, ...]
    phase: Phase
    step: int
    silent_s: float
    deadline_s: float
    stance: Annotated[str, msgspec.Meta(max_length=32)] = ""  # of services.sensor.detector.stances
    seen: Text = ""  # what the processes did: "stopped by a signal, while those of other ranks are not"
    limit: Text = ""  # how the deadline was derived: "8 x the usual step of 0.05 s, at least 2 s"


class FalseAlarm(msgspec.Struct, frozen=True, tag="false_alarm"):
    """A reported stall was none: the next generation paused at the same step, and went on. From now on the job's
    deadlines are multiplied by `patience`."""

    job: JobName
    generation: Generation  # the one that went on
    stalled_generation: Generation
    ranks: tuple[Rank, ...]  # reported as stalled
    step: int
    paused_s: float
    patience: float


class HostSilent(msgspec.Struct, frozen=True, tag="host_silent"):
    """No report within the adapted deadline. `witnesses` are hosts that cannot reach it either."""

    host_id: HostId
    silent_s: float
    deadline_s: float
    witnesses: tuple[HostId, ...]
    domain: str = ""  # the failure domain shared by all hosts that fell silent with it
    together: int = 1  # number of hosts that fell silent together, itself included
    within_s: float = 0.0  # from the last report of the first of these to that of the last
    after_suspect: bool = False  # this sensor had reported it suspect, and the evidence that it lives is gone


class HostSuspect(msgspec.Struct, frozen=True, tag="host_suspect"):
    """No report within the adapted deadline, but the host is alive: only its path to the sensor is cut."""

    host_id: HostId
    silent_s: float
    deadline_s: float
    reached_by: tuple[HostId, ...] = msgspec.field(name="heard_by")  # hosts whose engines still hear its daemon
    steps_advance: bool  # of a job in which its ranks must take part


class HostReturned(msgspec.Struct, frozen=True, tag="host_returned"):
    """A host that was reported silent or suspect reports again."""

    host_id: HostId
    away_s: float


class PeerUnreachable(msgspec.Struct, frozen=True, tag="peer_unreachable"):
    """An engine lost its connection to a peer's engine and cannot reconnect."""

    peer: HostId
    message: Text


class PreemptionNotice(msgspec.Struct, frozen=True, tag="preemption_notice"):
    """The host will be taken away at `deadline_at` (wall clock). 0.0: withdraws an earlier notice."""

    deadline_at: Moment
    source: Text


class SaveFailed(msgspec.Struct, frozen=True, tag="save_failed"):
    """A rank's save was not captured, committed or replicated."""

    job: JobName
    generation: Generation
    rank: Rank
    step: SeenStep
    message: Text


class SaveLate(msgspec.Struct, frozen=True, tag="save_late"):
    """Training waited for a save: for a slot, or for a copy. Sent now and then, not for each save: `count` saves of
    this rank since the last signal, `waited_s` the longest wait."""

    job: JobName
    generation: Generation
    rank: Rank
    step: SeenStep
    waited_s: Duration
    count: Seq


class ReplicasDiffer(msgspec.Struct, frozen=True, tag="replicas_differ"):
    """Ranks of the sender's host hold different bytes of tensors that should be equal: silent corruption, or a bug of
    the job. `agree`: the ranks that hold the same, () if no majority does. `tensors` are the first few of `count`. Sent
    once per generation for the same ranks."""

    job: JobName
    generation: Generation
    step: SeenStep
    tensors: tuple[Text, ...]
    count: Seq
    agree: tuple[Rank, ...]
    differ: tuple[Rank, ...]
    equal_step: SeenStep = -1  # the newest step before at which all of them were seen equal


class SavesFailing(msgspec.Struct, frozen=True, tag="saves_failing"):
    """Saves of these ranks, all on the sender's host, have been failing for long: none has succeeded since. `count`,
    `step` (the newest) and `message` are those of the rank that failed first."""

    job: JobName
    generation: Generation
    ranks: tuple[Rank, ...]
    since: Moment
    count: Seq
    step: SeenStep
    message: Text


class SavesRecovered(msgspec.Struct, frozen=True, tag="saves_recovered"):
    """The sender's `SavesFailing` is over: each of its ranks has saved a newer step."""

    job: JobName
    generation: Generation


class ConditionBegan(msgspec.Struct, frozen=True, tag="condition_began"):
    """A condition of the sender's host stands from now on, or has changed."""

    condition: HostCondition


class ConditionEnded(msgspec.Struct, frozen=True, tag="condition_ended"):
    """A condition of the sender's host is over."""

    source: ConditionSource
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    subject: Subject = ""


class ConditionsStand(msgspec.Struct, frozen=True, tag="conditions_stand"):
    """Of all conditions of the sender's host that these sources report, these stand. Sent to a supervisor that may know
    of others: its database went back, or the host lost its state folder. Of what is remembered, that says nothing
    unless it is of another boot: the host may have lost what it knew, and no reading may show it again."""

    sources: Annotated[tuple[ConditionSource, ...], msgspec.Meta(max_length=64)]
    keys: Annotated[tuple[ConditionKey, ...], msgspec.Meta(max_length=MAX_CONDITIONS)]
    boot: Annotated[str, msgspec.Meta(max_length=1_000)] = ""  # of the sender's kernel; '' if unknown


class EngineRestarted(msgspec.Struct, frozen=True, tag="engine_restarted"):
    """The daemon found its checkpoint engine dead and started another."""

    message: Text


class SignalUnreadable(msgspec.Struct, frozen=True, tag="signal_unreadable"):
    """Recorded in place of a signal that the supervisor cannot read or store. Never sent."""

    kind: Text  # as its sender names it; '' if unknown
    reason: Text
    document: Text  # its beginning


SignalBody: TypeAlias = (
    WorkerExited
    | WorkerStartFailed
    | RankStalled
    | FalseAlarm
    | HostSilent
    | HostSuspect
    | HostReturned
    | PeerUnreachable
    | PreemptionNotice
    | SaveFailed
    | SaveLate
    | ReplicasDiffer
    | ReplayDiffers
    | Straggler
    | StragglerRecovered
    | LossDiverged
    | LossRecovered
    | SavesFailing
    | SavesRecovered
    | ConditionBegan
    | ConditionEnded
    | ConditionsStand
    | EngineRestarted
    | SignalUnreadable
)


class Signal(msgspec.Struct, frozen=True):
    """One observation. (source, incarnation, seq) is unique forever; `source` is a host_id or 'sensor.<id>'."""

    source: str
    incarnation: Incarnation
    seq: Seq
    at: Moment  # when it was observed, on the observer's wall clock
    body: SignalBody


class RankMarks(msgspec.Struct, frozen=True, gc=False):
    """Moments in a worker's life, wall clock, 0.0 if not reached; sent when one of them is new."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    spawned_at: Moment
    attached_at: Moment
    restore_began_at: Moment
    restored_at: Moment
    first_step_at: Moment
    save_blocked_s: Duration  # total so far
    data_wait_s: Duration = 0.0  # total so far, in the phase DATA


class EngineStatus(msgspec.Struct, frozen=True, gc=False):
    """The co-located engine as the daemon sees it."""

    alive: bool
    unreachable_peers: tuple[HostId, ...] = ()
    counters: Counters = {}  # e.g. peer_bytes_sent, peer_bytes_received, disk_bytes_written
    testimonies: Testimonies = ()  # of the peers that its sensor asked about
    intervals: SaveIntervals = ()  # of jobs that it coordinates
    transports: PeerTransports = ()  # to its peers; empty from an older engine


class Report(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One message of one daemon. Everything but `signals` is state: the newest report wins, and a lost one does not
    matter.

    Fields that seldom change come first, in the encoded bytes too: a sensor compares them with the host's previous
    report and decodes the rest (services.sensor.reports.report_decoding). Readers accept any order.
    """

    version: int
    incarnation: Incarnation
    interval_s: Duration
    facts: HostFacts
    engine: EngineStatus
    workers: tuple[Workers, ...] = ()
    copies: tuple[ShardCopy, ...] = ()
    succeeds: Predecessors = ()  # earlier daemons of its state folder, newest first
    sent_at: Moment  # from here on everything changes with every report, or is sent once
    seq: Seq = 0  # grows with every report of an incarnation, sent or not; 0: absent, order by `sent_at`
    progress: tuple[RankProgress, ...] = ()  # of `workers`, in their order
    completed: tuple[CompletedSteps, ...] = ()
    lagged_s: Duration = 0.0  # how late the daemon's own loop ran
    signals: tuple[Signal, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    restores: tuple[RestoreReport, ...] = ()
    leaves: bool = False  # the last report: the daemon terminates in order, and the host is no longer needed
    losses: tuple[RankLoss, ...] = ()  # those that changed
    computes: tuple[RankCompute, ...] = ()  # now and then


class ReportReply(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`committed[incarnation]`: every signal up to this seq is committed, and may leave the spool. `ask`: the sensor
    receives nothing from these hosts; the next reports should carry testimonies about them. `stored_points`: for the
    host's jobs that have one; may lag. `clean_steps`: likewise; a job that is not in it has no suspect steps.
    `engine_addresses`: host -> "ip:port", of peers that the report calls unreachable."""

    committed: Mapping[str, int]
    ask: Asked = ()
    stored_points: StoredPoints = {}
    clean_steps: CleanSteps = {}
    engine_addresses: EngineAddresses = {}
