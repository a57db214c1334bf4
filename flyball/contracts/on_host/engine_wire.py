"""What the host daemon says to the checkpoint engine beside it, over a Unix stream socket.

Frames: 4-byte little-endian length, then one JSON request or reply (`wire.encode`). One request at a time per
connection; a connection may be kept open. The engine answers every request with exactly one EngineReply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from flyball.contracts.checkpoints import (
    CheckpointSpec,
    JobHistory,
    RestoreReport,
    SaveInterval,
    ShardCopy,
    StoredPoints,
)
from flyball.contracts.cluster import Placement
from flyball.contracts.identity import Fence, HostId, JobName, Rank
from flyball.contracts.reports.testimony import Asked, Testimonies

HOST_STATE_VERSION = "1"  # of the state folder, which daemon and engine share; in its file VERSION
ENGINE_SOCKET = "engine.sock"  # in the state folder, like the two that follow
NOTIFY_SOCKET = "notify.sock"  # where trainers tell the engine that there is something to do
ENGINE_PID_FILE = "engine.pid"  # "pid port"


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """A generation begins on this host: who are the peers, which history counts, what to fetch. Returns at once;
    shards that local ranks lack are fetched in the background and reported in Status."""

    fence: Fence
    host_id: HostId
    placement: Placement
    spec: CheckpointSpec


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Commit whatever is captured, then answer with all copies. `durable`: have the newest recovery point written to
    the disk and persistent tiers as well, out of schedule; `flushed` in the reply says what is where when the time is
    over."""

    job: JobName
    timeout_s: float
    durable: bool = False
    history: JobHistory | None = None  # where to look if the job is not known here


class Arm(msgspec.Struct, frozen=True, tag="arm"):
    """Tell local ranks to save at `step` and to park there. Replies `too_late` with positions if a rank passed it."""

    fence: Fence
    job: JobName
    step: int


class Disarm(msgspec.Struct, frozen=True, tag="disarm"):
    """Take back the step that `Arm` named: ranks that are parked at it train on."""

    fence: Fence
    job: JobName


class AwaitSaved(msgspec.Struct, frozen=True, tag="await_saved"):
    """Wait until every local rank's shard of `step` is committed, and replicated where peers are configured."""

    job: JobName
    generation: int
    step: int
    timeout_s: float


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The job ended: free its slots and replica slots on this host; or forget it alone, and leave them. `drop_disk`:
    what it has in the state folder's own disk tier goes too."""

    fence: Fence
    job: JobName
    keep_memory: bool = False
    drop_disk: bool = False


class GetStatus(msgspec.Struct, frozen=True, tag="status"):
    """What the engine holds and how it fares. `restores_since`: only restore reports newer than this wall time.
    `about`: peers of whose life something is to be said. `in_touch_until_s`: until then, on this machine's monotonic
    clock, the host cannot have been given up, by the last answer of the supervisor. A moment and not a time that is
    left: a request may wait for an engine that was stopped, and would begin to count when it is read. `stored_points`:
    as the supervisor last told them; None: this daemon knows nothing of them."""

    restores_since: float = 0.0
    about: Asked = ()
    in_touch_until_s: float = 0.0
    stored_points: StoredPoints | None = None


EngineRequest: TypeAlias = Configure | Flush | Arm | Disarm | AwaitSaved | Release | GetStatus


class SaveFailure(msgspec.Struct, frozen=True):
    job: JobName
    generation: int
    rank: Rank
    step: int
    message: str
    at: float


class LateSaves(msgspec.Struct, frozen=True):
    """Saves that training waited for: `count` of a rank since it was told last, the last one that of `step`."""

    job: JobName
    generation: int
    rank: Rank
    step: int
    waited_s: float  # the longest of them
    count: int
    at: float


class FailingSaves(msgspec.Struct, frozen=True):
    """How saves of a job fare on a host: those of `ranks` have failed for long; no ranks: saves are kept. The rest
    is of the rank that failed first: since when (0.0: none ever did), how many, the newest step, and why it failed."""

    job: JobName
    generation: int
    ranks: tuple[Rank, ...]
    since: float
    count: int
    step: int
    message: str = ""


class EngineReply(msgspec.Struct, frozen=True):
    """`ok` or a `code` with a message; the other fields as far as the request has them."""

    ok: bool
    code: str = ""
    message: str = ""
    pid: int = 0
    address: str = ""  # "ip:port" where peers reach this engine
    copies: tuple[ShardCopy, ...] = ()
    positions: Mapping[str, int] = {}  # str(rank) -> newest step that the rank began to save or completed
    restores: tuple[RestoreReport, ...] = ()
    failures: tuple[SaveFailure, ...] = ()  # the newest few
    late: tuple[LateSaves, ...] = ()  # the newest few
    failing: tuple[FailingSaves, ...] = ()  # of each job of which that is known
    intervals: tuple[SaveInterval, ...] = ()  # of each job that this engine coordinates
    flushed: Mapping[str, int] = {}  # by tier, the newest step that every local rank has there; for a durable Flush
    unreachable_peers: tuple[HostId, ...] = ()
    testimonies: Testimonies = ()
    counters: Mapping[str, int] = {}


MAX_ENGINE_FRAME_BYTES = 16 << 20
