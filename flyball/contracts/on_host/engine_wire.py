"""The requests of the host daemon to the checkpoint engine beside it, over a Unix stream socket.

Frames: 4-byte little-endian length, then one JSON request or reply (`wire.encode`). One request at a time per
connection; a connection may stay open. The engine sends exactly one EngineReply per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from flyball.contracts.checkpoints import (
    CheckpointSpec,
    CleanSteps,
    JobHistory,
    PeerTransports,
    RestoreReport,
    SaveInterval,
    ShardCopy,
    StoredPoints,
)
from flyball.contracts.cluster import Placement
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.identity import (
    Duration,
    EngineAddresses,
    Fence,
    Generation,
    HostId,
    JobName,
    Moment,
    Rank,
    SeenStep,
    Seq,
)
from flyball.contracts.reports.testimony import Asked, Testimonies
from flyball.contracts.reports.training_health import ReplayDiffers

HOST_STATE_VERSION = "1"  # of the state folder shared by daemon and engine; in its file VERSION
ENGINE_SOCKET = "engine.sock"  # in the state folder, like the next two
NOTIFY_SOCKET = "notify.sock"  # where trainers notify the engine of new work
ENGINE_LOG = "engine.log"
ENGINE_PID_FILE = "engine.pid"  # "pid port"
DAEMON_PID_FILE = "daemon.pid"  # locked by the daemon while it runs
TRANSPORTS_FILE = "engine-transports.json"  # PeerTransports of the newest engine


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """A generation begins on this host: its peers, its lineage, and the shards to fetch.

    Returns at once. Shards that local ranks lack are fetched in the background and reported by GetStatus.
    """

    fence: Fence
    host_id: HostId
    placement: Placement
    spec: CheckpointSpec
    keys: EngineKeys = EngineKeys()


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Commit whatever is captured, then reply with all copies.

    `durable`: also write the newest recovery point to the disk and persistent tiers, outside the schedule. `flushed` in
    the reply says which steps arrived before the timeout.
    """

    job: JobName
    timeout_s: float
    durable: bool = False
    history: JobHistory | None = None  # where to look if the engine does not know the job


class Arm(msgspec.Struct, frozen=True, tag="arm"):
    """Have local ranks save at `step` and park there. Replies `too_late` with positions if a rank passed it."""

    fence: Fence
    job: JobName
    step: int


class Disarm(msgspec.Struct, frozen=True, tag="disarm"):
    """Cancel the step named by `Arm`: ranks parked at it train on."""

    fence: Fence
    job: JobName


class AwaitSaved(msgspec.Struct, frozen=True, tag="await_saved"):
    """Wait until every local rank's shard of `step` is committed, and replicated if peers are configured."""

    job: JobName
    generation: int
    step: int
    timeout_s: float


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The job ended: free its slots and replica slots on this host. `keep_memory`: only forget the job, and leave the
    slots. `drop_disk`: also delete its copies in the state folder's own disk tier."""

    fence: Fence
    job: JobName
    keep_memory: bool = False
    drop_disk: bool = False


class GetStatus(msgspec.Struct, frozen=True, tag="status"):
    """Ask for the engine's copies and state.

    `restores_since`: only restore reports newer than this wall time. `about`: peers whose testimony is wanted.
    `in_touch_until_s`: by the supervisor's last reply the host cannot be given up before this time, on this machine's
    monotonic clock. It is not a time left, because a request may sit in the queue of a stopped engine. `stored_points`:
    the supervisor's latest; None: this daemon has received none. `clean_steps`: of jobs whose newest steps are suspect,
    the newest that is not; None: the supervisor has not replied to this daemon yet. `addresses`: where peers are that
    this engine could not reach. `keys`: the host's answer key.
    """

    restores_since: float = 0.0
    about: Asked = ()
    in_touch_until_s: float = 0.0
    stored_points: StoredPoints | None = None
    clean_steps: CleanSteps | None = None
    addresses: EngineAddresses = {}
    keys: EngineKeys = EngineKeys()


EngineRequest: TypeAlias = Configure | Flush | Arm | Disarm | AwaitSaved | Release | GetStatus


class SaveFailure(msgspec.Struct, frozen=True):
    job: JobName
    generation: Generation
    rank: Rank
    step: SeenStep
    message: str
    at: Moment


class LateSaves(msgspec.Struct, frozen=True):
    """Saves that training waited for: `count` of one rank since the last report; `step` is that of the last."""

    job: JobName
    generation: Generation
    rank: Rank
    step: SeenStep
    waited_s: Duration  # the longest of them
    count: Seq
    at: Moment


class DifferingReplicas(msgspec.Struct, frozen=True):
    """At `step`, ranks that should hold the same bytes of `tensors` (the first few of `count`) did not. `agree`: those
    that do hold the same, () if no majority does."""

    job: JobName
    generation: Generation
    step: SeenStep
    tensors: tuple[str, ...]
    count: Seq
    agree: tuple[Rank, ...]
    differ: tuple[Rank, ...]
    at: Moment
    # The newest step before at which all of them were equal; -1: they never were, as far as known.
    equal_step: SeenStep = -1


class FailingSaves(msgspec.Struct, frozen=True):
    """How a job's saves fare on a host. `ranks`: those whose saves have been failing for long; empty: saves succeed.

    The other fields describe the rank that failed first: since when (0.0: none ever failed), how often, its newest
    step, and the error.
    """

    job: JobName
    generation: Generation
    ranks: tuple[Rank, ...]
    since: Moment
    count: Seq
    step: SeenStep
    message: str = ""


class EngineReply(msgspec.Struct, frozen=True):
    """`ok`, or a `code` with a message. Each request fills the other fields that apply to it."""

    ok: bool
    code: str = ""
    message: str = ""
    pid: int = 0
    address: str = ""  # "ip:port" where peers reach this engine
    copies: tuple[ShardCopy, ...] = ()
    positions: Mapping[str, SeenStep] = {}  # str(rank) -> newest step that the rank began to save or completed
    restores: tuple[RestoreReport, ...] = ()
    failures: tuple[SaveFailure, ...] = ()  # the newest few
    late: tuple[LateSaves, ...] = ()  # the newest few
    differing: tuple[DifferingReplicas, ...] = ()  # the newest few
    replays: tuple[ReplayDiffers, ...] = ()  # the newest few
    failing: tuple[FailingSaves, ...] = ()  # one per job whose state is known
    intervals: tuple[SaveInterval, ...] = ()  # one per job that this engine coordinates
    flushed: Mapping[str, SeenStep] = {}  # tier -> the newest step that every local rank has there; for a durable Flush
    unreachable_peers: tuple[HostId, ...] = ()
    testimonies: Testimonies = ()
    transports: PeerTransports = ()  # of the linked hosts to which a connection for shards was made
    counters: Mapping[str, int] = {}
    # The generations that it was configured for, of GetStatus; None: an engine of an older release.
    generations: Mapping[JobName, Generation] | None = None


MAX_ENGINE_FRAME_BYTES = 16 << 20
