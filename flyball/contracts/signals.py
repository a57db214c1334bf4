"""What is observed, and how it travels up.

A daemon sends one Report per interval, and at once when something happened. The signals in it are numbered per
(host, incarnation); the daemon keeps them on disk until a reply says that the controller has committed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from flyball.contracts.checkpoints import RestoreReport, ShardCopy
from flyball.contracts.cluster import HostFacts, Phase, RankStatus, WorkerError
from flyball.contracts.identity import HostId, JobName, Rank

Text = Annotated[str, msgspec.Meta(max_length=16_384)]


class WorkerExited(msgspec.Struct, frozen=True, tag="worker_exited"):
    """A worker's process ended. Exactly one of `exit_code` and `signal_number` is set, or none when a restarted
    daemon adopted the worker and could not learn it."""

    job: JobName
    generation: int
    rank: Rank
    pid: int
    exit_code: int | None
    signal_number: int | None
    last_step: int  # newest step in its beacon, -1 if none
    error: WorkerError | None = None
    expected: bool = False  # the daemon ended it on command
    last_phase: Phase | None = None  # in its beacon; None: not told


class WorkerStartFailed(msgspec.Struct, frozen=True, tag="worker_start_failed"):
    """A rank could not be started at all (script missing, no memory, port taken)."""

    job: JobName
    generation: int
    rank: Rank
    message: Text


class RankStalled(msgspec.Struct, frozen=True, tag="rank_stalled"):
    """Beacons of a generation stopped moving. `ranks` are those that are furthest behind: the likely cause."""

    job: JobName
    generation: int
    ranks: tuple[Rank, ...]
    phase: Phase
    step: int
    silent_s: float
    deadline_s: float


class HostSilent(msgspec.Struct, frozen=True, tag="host_silent"):
    """No report within the adapted deadline. `witnesses` are hosts that say they cannot reach it either."""

    host_id: HostId
    silent_s: float
    deadline_s: float
    witnesses: tuple[HostId, ...]


class HostReturned(msgspec.Struct, frozen=True, tag="host_returned"):
    """A host that was reported silent reports again."""

    host_id: HostId
    away_s: float


class PeerUnreachable(msgspec.Struct, frozen=True, tag="peer_unreachable"):
    """An engine lost its connection to a peer's engine and cannot make a new one."""

    peer: HostId
    message: Text


class PreemptionNotice(msgspec.Struct, frozen=True, tag="preemption_notice"):
    """The host will be taken away at `deadline_at` (wall clock)."""

    deadline_at: float
    source: str


class SaveFailed(msgspec.Struct, frozen=True, tag="save_failed"):
    """A rank's save was not captured, committed or replicated."""

    job: JobName
    generation: int
    rank: Rank
    step: int
    message: Text


class EngineRestarted(msgspec.Struct, frozen=True, tag="engine_restarted"):
    """The daemon found its checkpoint engine dead and started another."""

    message: Text


SignalBody: TypeAlias = (
    WorkerExited
    | WorkerStartFailed
    | RankStalled
    | HostSilent
    | HostReturned
    | PeerUnreachable
    | PreemptionNotice
    | SaveFailed
    | EngineRestarted
)


class Signal(msgspec.Struct, frozen=True):
    """One observation. (source, incarnation, seq) is unique for ever; `source` is a host_id or 'sensor.<id>'."""

    source: str
    incarnation: str
    seq: int
    at: float  # wall clock of the observer, when it was observed
    body: SignalBody


class RankSteps(msgspec.Struct, frozen=True):
    """Steps that a rank completed since the last report: completed_at[i] is the wall time of first_step + i."""

    job: JobName
    generation: int
    rank: Rank
    first_step: int
    completed_at: tuple[float, ...]


class RankMarks(msgspec.Struct, frozen=True):
    """Moments of a worker's life, wall clock, 0.0 when not reached; sent when one of them is new."""

    job: JobName
    generation: int
    rank: Rank
    spawned_at: float
    attached_at: float
    restore_began_at: float
    restored_at: float
    first_step_at: float
    save_blocked_s: float  # total so far


class EngineStatus(msgspec.Struct, frozen=True):
    """The co-located engine as the daemon sees it."""

    alive: bool
    unreachable_peers: tuple[HostId, ...] = ()
    counters: Mapping[str, int] = {}  # e.g. peer_bytes_sent, peer_bytes_received, disk_bytes_written


class Report(msgspec.Struct, frozen=True):
    """One message of one daemon. Everything but `signals` is state: the newest wins, a lost one does not matter."""

    version: int
    incarnation: str
    sent_at: float
    interval_s: float
    facts: HostFacts
    engine: EngineStatus
    signals: tuple[Signal, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    steps: tuple[RankSteps, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    restores: tuple[RestoreReport, ...] = ()
    copies: tuple[ShardCopy, ...] = ()
    lagged_s: float = 0.0  # how late the daemon's own loop ran


class ReportReply(msgspec.Struct, frozen=True):
    """`committed[incarnation]`: every signal up to this seq is committed, and may leave the spool."""

    committed: Mapping[str, int]
