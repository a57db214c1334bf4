"""Replies about jobs: the job with its ranks, its verified copies, pieces of its ranks' logs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.reports.training_health import LossValue
from services.api.replies.fields import (
    Cursor,
    Generation,
    HostId,
    HostOrEmpty,
    JobName,
    Message,
    Rank,
    SecondsOrNull,
    SizeBytes,
    Step,
    WallClock,
    WallClockOrNull,
)
from services.rules.job_doing import Doing
from services.rules.recoverability import Lost

RankPhase = Annotated[
    str,
    msgspec.Meta(description='A phase of the trainer, or "waiting" or "exited".', examples=["step"]),
]


class RankReply(msgspec.Struct, frozen=True):
    """One rank of the newest granted generation."""

    rank: Rank
    host_id: HostId
    pid: Annotated[int | None, msgspec.Meta(description="Process id; null: not known.", examples=[4711])]
    step: Step
    phase: RankPhase
    stands: Annotated[str, msgspec.Meta(description='Where it stands, if it makes no step for long; "": it does.')]
    reported_at: WallClockOrNull
    exit_code: Annotated[int | None, msgspec.Meta(description="null: it has not exited, or by a signal.")]
    signal_number: Annotated[int | None, msgspec.Meta(description="The signal that ended it; null: none.")]


class LossReply(msgspec.Struct, frozen=True):
    """The newest loss that the script reported."""

    value: LossValue
    step: Step


class SaveIntervalReply(msgspec.Struct, frozen=True):
    """Steps between saves: as the settings ask, and as they are."""

    wanted_steps: int
    every_steps: int
    save_s: Annotated[float, msgspec.Meta(description="Seconds until the whole world had a save; 0.0: not measured.")]
    step_s: Annotated[float, msgspec.Meta(description="Seconds of a step without save waits; 0.0: not measured.")]


class DoingReply(msgspec.Struct, frozen=True):
    """What a job does now, from what its hosts saw last."""

    kind: Annotated[Doing, msgspec.Meta(description="The one word.", examples=["training"])]
    since: WallClock
    steps_per_s: Annotated[float, msgspec.Meta(description="0.0 unless it trains.", examples=[18.2])]
    text: Annotated[str, msgspec.Meta(description="The sentence.", examples=["training at 18.2 steps/s"])]


class ListedJob(msgspec.Struct, frozen=True):
    """A job, without its ranks. Values of environment variables are hidden."""

    job: JobName
    spec: JobSpec
    state: JobState
    message: Message
    doing: DoingReply
    world_size: Annotated[int, msgspec.Meta(description="Number of ranks; fewer after a shrink.", examples=[2])]
    asked_world_size: Annotated[int, msgspec.Meta(description="Number of ranks that was asked for.", examples=[2])]
    generation: Generation
    restart_count: Annotated[int, msgspec.Meta(description="Restarts over the job's whole life.", examples=[1])]
    restarts_used: Annotated[int, msgspec.Meta(description="Restarts since the last progress.", examples=[0])]
    newest_step: Step
    loss: LossReply | None
    submitted_at: WallClock
    ended_at: WallClockOrNull
    since: WallClock
    started_at: WallClockOrNull
    generation_started_at: WallClockOrNull
    last_step_at: WallClockOrNull
    step_s: SecondsOrNull
    stop_requested: bool
    save_interval: SaveIntervalReply | None
    hosts: Annotated[int, msgspec.Meta(description="Number of hosts with ranks of the newest generation.")]


class JobReply(ListedJob, frozen=True):
    """A job with the newest generation's ranks. Values of environment variables are hidden."""

    last_report_at: WallClockOrNull
    ranks: tuple[RankReply, ...]


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, oldest first."""

    items: tuple[ListedJob, ...]
    next_before: Cursor


class LogPieceReply(msgspec.Struct, frozen=True):
    """A piece of one rank's log."""

    job: JobName
    rank: Rank
    host_id: HostId
    generation: Generation
    generations: Annotated[tuple[int, ...], msgspec.Meta(description="Those with a log of this rank on the host.")]
    offset: Annotated[int, msgspec.Meta(description="Of `data`, in bytes.", examples=[0])]
    next_offset: Annotated[int, msgspec.Meta(description="Pass it as `offset` to continue.", examples=[12])]
    size_bytes: SizeBytes
    data: Annotated[bytes, msgspec.Meta(description="Base64.", examples=["c3RlcCAxMjAwCg=="])]


# --- checkpoints -----------------------------------------------------------------------------------------------------


class CopyReply(msgspec.Struct, frozen=True):
    """One verified copy of one rank's bytes of one step."""

    job: JobName
    generation: Generation
    step: Step
    rank: Rank
    tier: Tier
    host_id: HostOrEmpty
    size_bytes: SizeBytes
    digest: Annotated[str, msgspec.Meta(description="xxh3-128 of the manifest.", examples=["9f0c"])]
    reachable: Annotated[bool, msgspec.Meta(description="false: its host is lost or has left.")]


class TierReply(msgspec.Struct, frozen=True):
    """The reachable copies in one tier."""

    copies: Annotated[int, msgspec.Meta(description="Number of copies.", examples=[4])]
    size_bytes: SizeBytes
    newest_step: Step
    newest_complete_step: Annotated[int, msgspec.Meta(description="Of all ranks; -1: none.", examples=[1200])]


class TierRung(msgspec.Struct, frozen=True):
    """What one tier alone could restore."""

    tier: Tier
    step: Step
    steps: Annotated[int | None, msgspec.Meta(description="Steps trained since; null: it has none.", examples=[3])]
    redo_s: Annotated[
        float | None, msgspec.Meta(description="Its age: training since then, in seconds; null: unknown.")
    ]


class LossCase(msgspec.Struct, frozen=True):
    """What would be lost in the worst case of a loss."""

    lost: Lost
    name: Annotated[str, msgspec.Meta(description="The host or failure domain of the worst case.", examples=["host-a"])]
    cases: Annotated[int, msgspec.Meta(description="Number of hosts or failure domains with ranks.", examples=[4])]
    costly_cases: Annotated[
        int, msgspec.Meta(description="Those whose loss costs more than that of the processes alone.", examples=[0])
    ]
    recovery_step: Annotated[int, msgspec.Meta(description="Where the job would go on; -1: from scratch.")]
    tier: Annotated[Tier | None, msgspec.Meta(description="The slowest tier read; null: from scratch.")]
    steps: Annotated[int, msgspec.Meta(description="Steps to train again.", examples=[3])]
    redo_s: Annotated[float | None, msgspec.Meta(description="Seconds to train them again; null: unknown.")]
    gpu_s: Annotated[float | None, msgspec.Meta(description="The same times the ranks; null: unknown.")]


class RecoverabilityReply(msgspec.Struct, frozen=True):
    """What a job would lose now. Copies on lost hosts do not count."""

    job: JobName
    state: JobState
    doing: DoingReply
    world_size: Annotated[int, msgspec.Meta(description="Number of ranks.", examples=[2])]
    generation: Generation
    step: Step
    step_s: SecondsOrNull
    last_step_at: WallClockOrNull
    tiers: Annotated[tuple[TierRung, ...], msgspec.Meta(description="Memory, peer, disk, persistent.")]
    losses: Annotated[
        tuple[LossCase, ...], msgspec.Meta(description="The least loss first; none for a job without ranks.")
    ]


class CheckpointsReply(msgspec.Struct, frozen=True):
    """A job's verified copies by tier. Copies on lost hosts are listed, but do not count."""

    job: JobName
    world_size: int
    newest_step: Step
    recovery_point: Annotated[
        int, msgspec.Meta(description="Newest step of which every rank has a copy; -1: none.", examples=[1200])
    ]
    lineage: tuple[LineageEntry, ...]
    tiers: Annotated[dict[str, TierReply], msgspec.Meta(description="By name: memory, peer, disk, persistent.")]
    copies: Annotated[tuple[CopyReply, ...], msgspec.Meta(description="Newest step first; empty unless asked for.")]
