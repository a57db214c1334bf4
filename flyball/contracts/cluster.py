"""Jobs, hosts, workers, placements."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec, Lineage, RestorePlan, world_size_of
from flyball.contracts.identity import (
    Address,
    Duration,
    Generation,
    HostId,
    JobName,
    Pid,
    Place,
    Port,
    Rank,
    RepeatedJobName,
    RunId,
    SeenStep,
    WorldSize,
)
from flyball.contracts.reports.rank_stands import RankStand

Whole = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
PolicyValue: TypeAlias = bool | int | float | str | tuple[str, ...]


class JobState(StrEnum):
    SUBMITTED = "submitted"  # waiting for hosts
    RUNNING = "running"  # includes the handling of incidents
    COMPLETING = "completing"  # decided, but workers, or saves of theirs, are not at their end yet; so the next two
    FAILING = "failing"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by an operator

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)

    @property
    def ending(self) -> bool:
        """Whether its end is decided, and under way."""
        return self in _OUTCOMES

    @property
    def outcome(self) -> JobState:
        """How it ends, if that is decided; otherwise the state itself."""
        return _OUTCOMES.get(self, self)


_OUTCOMES = {
    JobState.COMPLETING: JobState.SUCCEEDED,
    JobState.FAILING: JobState.FAILED,
    JobState.STOPPING: JobState.STOPPED,
}


IN_MEMORY_ALONE = "its newest step is in memory alone"  # in the message of a job that succeeded


class Again(StrEnum):
    """How to treat a job whose name has already ended."""

    NO = "no"  # show it as it ended
    RESUME = "resume"  # continue from its newest recovery point
    FRESH = "fresh"  # start another run from scratch


class HostState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    SILENT = "silent"
    DEGRADED = "degraded"
    CORDONED = "cordoned"
    IN_REPAIR = "in_repair"
    SPARE = "spare"


class Phase(IntEnum):
    """The phase that a rank is in. The beacon carries the number."""

    STARTING = 0  # process start, imports, rendezvous, until attach
    RESTORING = 1
    STEP = 2
    CHECKPOINT = 3  # inside save, waiting or copying
    EVAL = 4
    DATA = 5
    PARKED = 6  # saved the emergency checkpoint's step and waits to be stopped
    DONE = 7
    OTHER = 8


class Activity(IntEnum):
    """The activity of a worker's processes while its beacon stands still, as the daemon sees it from outside."""

    UNKNOWN = 0  # not checked because the beacon moves, or not readable
    ACTIVE = 1  # uses a CPU or GPU, does I/O, or its main thread enters and leaves the kernel
    IDLE = 2  # none of the above
    STOPPED = 3  # by a signal (SIGSTOP, SIGTSTP)
    TRACED = 4  # held by a debugger
    READS_INPUT = 5  # waits for keyboard input
    BLOCKED = 6  # idle, and waiting in the kernel for a disk, a network file system or a driver


DUE_SLEEP: Final = "a sleep that ends soon"  # an idle rank's place: it goes on by itself


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job as the user asks for it."""

    job: JobName
    argv: tuple[str, ...]  # script and its arguments; with `module`, a module name and its arguments
    workdir: str
    nnodes: Whole = 1
    nproc_per_node: Whole = 1
    max_restarts: Whole = 3
    module: bool = False
    env: Mapping[str, str] = {}  # added to the daemon's own environment
    # The submitter's environment: also added. Two submissions that differ only here are the same job.
    user_env: Mapping[str, str] = {}
    sealed_env: Mapping[str, str] = {}  # the secret part of it, encrypted: see flyball.sealed_values
    log_dir: str = ""  # '': the daemon's state folder
    checkpoint: CheckpointSpec = CheckpointSpec()
    hosts: tuple[HostId, ...] = ()  # (): any healthy host
    stop_grace_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] = 10.0
    program: bool = False  # run argv as it is, without Python
    virtual_local_rank: bool = False  # LOCAL_RANK is 0 everywhere, and CUDA_VISIBLE_DEVICES is the rank's one device
    spares: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0  # free hosts that no later job may start on
    never_from_scratch: bool = False  # once a step was saved, wait for a copy rather than start over
    check_nodes: bool = False  # start only on hosts that pass a check
    exclude_stragglers: bool = False  # that, and not on those that are slower than the others
    hang_timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0  # 0.0: adapts to what was observed of the job
    policy: Mapping[str, PolicyValue] = {}  # settings of the controller's policy for this job, over the cluster's
    min_nodes: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0  # it may go on with so few hosts; 0: with all only
    max_nodes: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0  # the number asked for, while it has fewer; 0: nnodes
    injectable: bool = False  # `flyball inject` may break it on purpose

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def asked_nnodes(self) -> int:
        """How many hosts the user asked for."""
        return max(self.nnodes, self.max_nodes)

    @property
    def fewest_nnodes(self) -> int:
        """With how few hosts the job may go on."""
        return self.min_nodes or self.asked_nnodes

    @property
    def as_asked(self) -> JobSpec:
        """The job as the user asked for it, on all its hosts."""
        return self.on(self.asked_nnodes)

    def on(self, nnodes: int) -> JobSpec:
        """The job on so many hosts."""
        asked = self.asked_nnodes
        return msgspec.structs.replace(self, nnodes=nnodes, max_nodes=asked if nnodes < asked else 0)


class HostFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts about a host that are in every report."""

    host_id: HostId
    address: Address  # the IP at which other hosts reach it
    failure_domain: Address
    engine_address: Address  # "ip:port"; '' while the engine is away
    free_port: Port  # for the next generation's MASTER_PORT, found free a moment ago
    daemon_version: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Pid
    fabric: Address = ""  # the network in which hosts reach each other fast; '': not said
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0  # for its ranks; 0: not known


class HostRanks(msgspec.Struct, frozen=True):
    """One host's ranks in a placement, in the order of their local ranks."""

    host_id: HostId
    address: str
    engine_address: str
    ranks: tuple[Rank, ...]


class Placement(msgspec.Struct, frozen=True):
    """Everything a daemon needs to start its part of a generation."""

    job: JobName
    generation: Generation
    world_size: WorldSize
    hosts: tuple[HostRanks, ...]  # in rank order; a host's own part lists only the hosts it deals with
    master_address: str
    master_port: Port
    peers: Mapping[str, tuple[HostId, ...]]  # host -> hosts that store its replicas
    lineage: Lineage
    restore: RestorePlan | None  # None: start from step 0
    restart_count: Whole = 0
    run: RunId = ""  # copies of the job's other runs, on disks and in stores, are ignored

    def host(self, host_id: str) -> HostRanks | None:
        """This host's part; None if it has none."""
        return next((h for h in self.hosts if h.host_id == host_id), None)


def restored_world_size(placement: Placement) -> int:
    """How many ranks saved the restore step; as many as the placement has, if there is none."""
    if placement.restore is None or not placement.restore.sources:
        return placement.world_size
    generation = placement.restore.source_generation
    return world_size_of(generation, placement.lineage, of_job=placement.world_size)


def restores_another_world(placement: Placement) -> bool:
    """Whether another number of ranks saved the restore step, so that no rank's shard is that of one rank."""
    return restored_world_size(placement) != placement.world_size


class WorkerError(msgspec.Struct, frozen=True):
    """The exception that ended a worker, from torch's error file or the end of its log."""

    kind: str  # exception class name, '' if unknown
    message: str
    traceback: str = ""


class RankStatus(msgspec.Struct, frozen=True, gc=False):
    """One live worker, as its beacon shows it."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    pid: Pid
    phase: Phase
    step: SeenStep  # newest completed step, -1 before the first
    beacon_age_s: Duration  # since the beacon last moved
    activity: Activity = Activity.UNKNOWN
    activity_s: Duration = 0.0  # how long the activity has lasted
    place: Place = ""  # the system call that an idle main thread is in; '' if unknown
    stand: RankStand | None = None  # where it stands, once it has stood still for long; without a stack
