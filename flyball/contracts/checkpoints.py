"""Checkpoint settings, verified copies and their lineage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec

from flyball.contracts.identity import (
    Address,
    Duration,
    Generation,
    HostId,
    JobName,
    Moment,
    Rank,
    RepeatedJobName,
    RunId,
    SeenStep,
    SizeBytes,
    Step,
    WorldSize,
)

STATE_DIR_DISK: Final = "checkpoints"  # default disk tier of a multi-host job, inside each host's state folder


class Tier(StrEnum):
    MEMORY = "memory"  # a slot on the host that ran the rank
    PEER = "peer"  # a replica slot in another host's memory
    DISK = "disk"  # this host's disk
    PERSISTENT = "persistent"  # a store that outlives every host


class WhenFull(StrEnum):
    """How a save behaves while the world still needs its slot."""

    WAIT = "wait"  # up to `save_timeout_s`, then the whole world skips the step
    SKIP = "skip"  # at once


class Replication(StrEnum):
    """How hosts choose the peers that store their replicas."""

    RING = "ring"  # the next hosts in other failure domains
    CLIQUE = "clique"  # fixed groups of replicas + 1 hosts across failure domains


Steps = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
IntervalSeconds = Annotated[float, msgspec.Meta(ge=0, le=604_800)]
TimeoutSeconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class TierPolicy(msgspec.Struct, frozen=True):
    """When a tier receives a step, and which steps it keeps."""

    every_steps: Steps = 0
    every_s: IntervalSeconds = 0.0
    keep_latest: int = 2
    keep_every: Steps = 0

    @property
    def is_on(self) -> bool:
        return self.every_steps > 0 or self.every_s > 0


class CheckpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a job checkpoints. The same for all its hosts, so it travels with the placement.

    A tier with no interval (steps or seconds) is off. Per-host limits and bandwidths live in the engine's settings.
    """

    every_steps: Steps = 1  # steps between saves to memory and to the peers; 0: none
    every_s: IntervalSeconds = 0.0  # seconds between them: in addition to every_steps if both are set, else instead
    replicas: Annotated[int, msgspec.Meta(ge=0, le=8)] = 1  # hosts that hold a copy of each host's memory
    # How they are chosen. ring: the next hosts of other failure domains; clique: fixed groups.
    replication: Replication = Replication.RING
    disk_dir: str = ""  # folder on each host's disk; none: the tier is off
    disk_every_steps: Steps = 0  # steps between saves to it; 0: none
    disk_every_s: IntervalSeconds = 0.0  # seconds between them, as well
    disk_keep_latest: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 2  # newest steps that stay
    disk_keep_every: Steps = 0  # multiples of this are kept for ever
    disk_is_default: bool = False  # nobody named the folder: unused if memory is short, deleted on success
    persistent_dir: str = ""  # a folder that all hosts share, or s3://, gs://, az://; none: the tier is off
    persistent_every_steps: Steps = 0  # steps between saves to it; 0: none
    persistent_every_s: IntervalSeconds = 0.0  # seconds between them, as well
    persistent_keep_latest: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 2  # newest steps that stay
    persistent_keep_every: Steps = 0  # multiples of this are kept for ever
    # If every slot is in use: wait, or skip the step in the whole world.
    when_full: WhenFull = WhenFull.WAIT
    adapt_interval: bool = True  # save less often than the step intervals say if saves hold up training
    raise_on_failure: bool = False  # the trainer's next call raises the error of a failed save
    save_timeout_s: TimeoutSeconds = 30.0  # longest wait for a slot that the world still needs
    restore_timeout_s: TimeoutSeconds = 120.0  # longest wait of a rank for its shard at the start

    @property
    def saves(self) -> bool:
        """Whether any step is saved at all."""
        return self.policy(Tier.MEMORY).is_on or self.is_durable

    @property
    def is_durable(self) -> bool:
        """Whether any step reaches a disk or a store."""
        return self.policy(Tier.DISK).is_on or self.policy(Tier.PERSISTENT).is_on

    @property
    def disk_is_each_hosts_own(self) -> bool:
        """Whether the default disk tier is in each host's state folder, not in that of a single-machine run."""
        return self.disk_is_default and self.disk_dir == STATE_DIR_DISK

    def disk_folder(self, state_dir: Path) -> str:
        """The disk tier's folder on the host with this state folder."""
        return str(state_dir / STATE_DIR_DISK) if self.disk_is_each_hosts_own else self.disk_dir

    def policy(self, tier: Tier) -> TierPolicy:
        """The interval and retention of a tier. A disk or persistent tier without a folder is off; the peer tier
        follows the memory tier."""
        match tier:
            case Tier.MEMORY | Tier.PEER:
                return TierPolicy(self.every_steps, self.every_s)
            case Tier.DISK if self.disk_dir:
                return TierPolicy(self.disk_every_steps, self.disk_every_s, self.disk_keep_latest, self.disk_keep_every)
            case Tier.PERSISTENT if self.persistent_dir:
                return TierPolicy(
                    self.persistent_every_steps,
                    self.persistent_every_s,
                    self.persistent_keep_latest,
                    self.persistent_keep_every,
                )
        return TierPolicy()


class SaveInterval(msgspec.Struct, frozen=True, gc=False):
    """The save interval of a job, in steps, as chosen by its coordinator's engine.

    The settings ask for `wanted_steps`; the coordinator saves every `every_steps`. `save_s` is the time until the whole
    world had a save, `step_s` that of a training step without save waits. Both were measured when the interval last
    changed (0.0: it never did).
    """

    job: JobName
    generation: Generation
    wanted_steps: Steps
    every_steps: Steps
    save_s: Duration
    step_s: Duration


MAX_PEER_TRANSPORTS: Final = 64  # that one host reports
NO_TRANSPORT: Final = "none"  # RDMA is required, but not possible


class PeerTransport(msgspec.Struct, frozen=True, gc=False):
    """What carries shards from a host to a peer, or to the host from it when it restores; and why that."""

    peer: HostId
    transport: Annotated[str, msgspec.Meta(max_length=16)]  # "rdma", "tcp" or NO_TRANSPORT
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


PeerTransports = Annotated[tuple[PeerTransport, ...], msgspec.Meta(max_length=MAX_PEER_TRANSPORTS)]


class ShardCopy(msgspec.Struct, frozen=True, gc=False, order=True):
    """One verified copy of one rank's bytes of one step. `host_id` stores it ('' for the persistent tier)."""

    job: JobName
    generation: Generation
    step: Step
    rank: Rank
    tier: Tier
    host_id: Address
    size_bytes: SizeBytes
    digest: Annotated[str, msgspec.Meta(max_length=64)]  # xxh3-128 of the manifest, hex


class LineageEntry(msgspec.Struct, frozen=True):
    """Steps of `generation` count up to and including `upto_step` (None: all of them, it is running).

    `after_step` marks a generation that may have completed steps without a report; it is the step that generation
    restored. If one of its own steps turns up, that generation becomes the history. Older generations then count only
    up to `after_step`, and not at all if it is -1.

    `world_size` is the number of ranks that saved its steps; 0: as many as the job has.
    """

    generation: Generation
    upto_step: SeenStep | None = None
    after_step: SeenStep | None = None
    world_size: WorldSize = 0


Lineage = tuple[LineageEntry, ...]
Point = tuple[Step, int]  # a step, and the generation that completed it


class StoredPoint(msgspec.Struct, frozen=True, gc=False):
    """The newest persistent step of all ranks that the supervisor has stored, and the generation that completed it."""

    step: Step
    generation: Generation


StoredPoints = Mapping[JobName, StoredPoint]
# Of jobs whose newest steps are suspect: the newest step that is not, -1 for none.
CleanSteps = Mapping[JobName, Annotated[int, msgspec.Meta(ge=-1)]]


class JobHistory(msgspec.Struct, frozen=True):
    """Tells an engine that no longer knows a job where to look for its copies."""

    spec: CheckpointSpec
    lineage: Lineage
    run: RunId = ""


def entries_of(lineage: Lineage, generations: Collection[int]) -> dict[int, tuple[int, LineageEntry]]:
    """generation -> its place in a history, and its entry; without those that are not part of it. A long job has
    thousands of generations, and copies of the newest: looks from the end."""
    missing, found = set(generations), dict[int, tuple[int, LineageEntry]]()
    for place in range(len(lineage) - 1, -1, -1):
        if not missing:
            break
        entry = lineage[place]
        if entry.generation in missing:
            missing.discard(entry.generation)
            found[entry.generation] = place, entry
    return found


def is_alive(generation: int, step: int, lineage: Iterable[LineageEntry]) -> bool:
    """Whether a copy of (generation, step) belongs to the job's current history."""
    return any(
        entry.generation == generation and (entry.upto_step is None or step <= entry.upto_step)
        for entry in reversed(tuple(lineage))
    )


def world_size_of(generation: int, lineage: Iterable[LineageEntry], *, of_job: int) -> int:
    """How many ranks saved the steps of `generation`; `of_job`: how many the job has."""
    return next((entry.world_size for entry in lineage if entry.generation == generation), 0) or of_job


def with_world_sizes(lineage: Lineage, of_job: int) -> Lineage:
    """The lineage with every number of ranks filled in, before the job's becomes another one."""
    return tuple(msgspec.structs.replace(entry, world_size=entry.world_size or of_job) for entry in lineage)


def newest_point(points: Iterable[Point], lineage: Lineage) -> Point | None:
    """The newest recovery point of a history; None if there is none.

    A later generation's steps are newer, even if it is uncertain whether it completed any. A step of its own then ends
    the older history.
    """
    points = tuple(points)
    found = entries_of(lineage, {generation for _, generation in points})
    return max(points, key=lambda point: (found[point[1]][0] if point[1] in found else -1, point[0]), default=None)


def branch(
    lineage: Lineage, *, restored_step: int | None, generation: int, source: int | None = None, world_size: int = 0
) -> Lineage:
    """The lineage of a new generation of `world_size` ranks that continues from `restored_step` of generation `source`.

    `restored_step` None: from scratch, nothing earlier counts. `source` None: the last generation.
    """
    kept = [LineageEntry(generation, world_size=world_size)]
    last = restored_step
    for entry in reversed(lineage):
        if last is not None and (source is None or entry.generation <= source):
            upto_step = last if entry.upto_step is None else min(entry.upto_step, last)
            is_same = upto_step == entry.upto_step and entry.after_step is None  # as nearly all of a long job's
            kept.append(entry if is_same else LineageEntry(entry.generation, upto_step, world_size=entry.world_size))
            last = last if entry.after_step is None else min(last, entry.after_step)
    return tuple(reversed(kept))


class ShardSource(msgspec.Struct, frozen=True):
    """One place to fetch a rank's bytes of the restore step from; lists of these are sorted best first."""

    rank: Rank
    generation: Generation
    tier: Tier
    host_id: str
    engine_address: str  # "ip:port" of the engine that serves it; '' if local or in a persistent folder


class RestorePlan(msgspec.Struct, frozen=True):
    """One step for the whole world, and the sources in order of the shard of each rank that saved it."""

    step: Step
    sources: Mapping[str, tuple[ShardSource, ...]]  # key: str(rank), because JSON keys are strings

    @property
    def source_generation(self) -> int:
        """The generation that completed the step, the same for all ranks."""
        return next(source.generation for found in self.sources.values() for source in found)


class RestoreReport(msgspec.Struct, frozen=True, gc=False):
    """How an engine brought a rank's bytes into local memory, or to files that the rank reads.

    In another layout they come from many shards. `source_tier` is then the tier that most came from, and `source_host`
    the host, if there is only one.
    """

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    step: Step
    source_tier: Tier
    source_host: Address  # '' for the persistent tier
    size_bytes: SizeBytes
    socket_bytes: SizeBytes  # payload bytes received through a socket; 0 unless fetched from another engine
    seconds: Duration
    at: Moment  # wall clock, when the bytes were verified in local memory
    transport: Annotated[str, msgspec.Meta(max_length=16)] = ""  # that they came over: "rdma", "tcp"; '' as above
    tier_bytes: Mapping[Tier, SizeBytes] = {}  # in another layout, or a broadcast load: how much each tier gave
