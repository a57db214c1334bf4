"""Jobs, hosts, workers, placements."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec, Lineage, RestorePlan
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
)


class JobState(StrEnum):
    SUBMITTED = "submitted"  # waits for hosts
    RUNNING = "running"  # includes the time in which incidents are handled
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by an operator

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class Again(StrEnum):
    """What is to become of a job whose name has ended."""

    NO = "no"  # it is shown as it ended
    RESUME = "resume"  # it goes on from its newest recovery point
    FRESH = "fresh"  # another run of it begins, from scratch


class HostState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    SILENT = "silent"
    DEGRADED = "degraded"
    CORDONED = "cordoned"
    IN_REPAIR = "in_repair"
    SPARE = "spare"


class Phase(IntEnum):
    """What a rank is doing; the beacon carries the number."""

    STARTING = 0  # process start, imports, rendezvous, until attach
    RESTORING = 1
    STEP = 2
    CHECKPOINT = 3  # inside save, waiting or copying
    EVAL = 4
    DATA = 5
    PARKED = 6  # saved the step of an emergency checkpoint and waits to be ended
    DONE = 7
    OTHER = 8


class Activity(IntEnum):
    """What a worker's processes do while its beacon stands still, as its daemon sees it from outside."""

    UNKNOWN = 0  # not looked at, since the beacon moves; or it cannot be read
    ACTIVE = 1  # uses a processor or a GPU, reads or writes, or its main thread goes in and out of the kernel
    IDLE = 2  # none of it
    STOPPED = 3  # by a signal (SIGSTOP, SIGTSTP)
    TRACED = 4  # a debugger holds it
    READS_INPUT = 5  # waits for somebody to type
    BLOCKED = 6  # as idle, and in the kernel waiting for a disk, a network file system or a driver


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user asks for."""

    job: JobName
    argv: tuple[str, ...]  # script and its arguments; with `module`, a module name and its arguments
    workdir: str
    nnodes: int = 1
    nproc_per_node: int = 1
    max_restarts: int = 3
    module: bool = False
    env: Mapping[str, str] = {}  # added to the daemon's own environment
    user_env: Mapping[
        str, str
    ] = {}  # of who submitted it: also added; two submissions that differ only here are one job
    sealed_env: Mapping[str, str] = {}  # the secret ones among them, encrypted: see flyball.sealed_values
    log_dir: str = ""  # '' : the daemon's state folder
    checkpoint: CheckpointSpec = CheckpointSpec()
    hosts: tuple[HostId, ...] = ()  # () : any healthy host
    stop_grace_s: float = 10.0
    program: bool = False  # argv is run as it is, without a Python before it
    virtual_local_rank: bool = False  # LOCAL_RANK is 0 for each, and CUDA_VISIBLE_DEVICES the rank's one device
    spares: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0  # free hosts that no later job is started on meanwhile
    never_from_scratch: bool = False  # once it has saved a step, it waits for a copy rather than begin anew
    hang_timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0  # 0.0: adapts to what was seen of the job

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


class HostFacts(msgspec.Struct, frozen=True, gc=False):
    """What a daemon says of its host in every report."""

    host_id: HostId
    address: Address  # the IP that other hosts reach it by
    failure_domain: Address
    engine_address: Address  # "ip:port", '' while the engine is away
    free_port: Port  # a port for the next generation's MASTER_PORT, found free a moment ago
    daemon_version: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Pid


class HostRanks(msgspec.Struct, frozen=True):
    """The ranks of one host in a placement, local rank = position."""

    host_id: HostId
    address: str
    engine_address: str
    ranks: tuple[Rank, ...]


class Placement(msgspec.Struct, frozen=True):
    """Everything a daemon needs to start its part of a generation."""

    job: JobName
    generation: int
    world_size: int
    hosts: tuple[HostRanks, ...]  # in the order of their ranks; a host's own part names those it has to do with
    master_address: str
    master_port: int
    peers: Mapping[str, tuple[HostId, ...]]  # host -> hosts that hold its replicas
    lineage: Lineage
    restore: RestorePlan | None  # None: start from step 0
    restart_count: int = 0
    run: RunId = ""  # what disks and stores keep of other runs of the job is none of its business

    def host(self, host_id: str) -> HostRanks | None:
        """This host's part, None if it has none."""
        return next((h for h in self.hosts if h.host_id == host_id), None)


class WorkerError(msgspec.Struct, frozen=True):
    """The exception that ended a worker, from torch's error file or the end of its log."""

    kind: str  # exception class name, '' if unknown
    message: str
    traceback: str = ""


class RankStatus(msgspec.Struct, frozen=True, gc=False):
    """One live worker as its beacon shows it."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    pid: Pid
    phase: Phase
    step: SeenStep  # newest completed step, -1 before the first
    beacon_age_s: Duration  # since the beacon last moved
    activity: Activity = Activity.UNKNOWN
    activity_s: Duration = 0.0  # for how long it has been that
    place: Place = ""  # the system call that an idle main thread is in; '': not known
