"""The messages between engines. Every request gets exactly one Reply, with these exceptions. ListShards gets a
ShardList, and ListWanted a WantedList. An accepted PutShard gets SEND before the bytes and the outcome after them; or
COMPARE before the manifest, then SEND, then the outcome.

Bulk data follows a frame raw: first the manifest and its checksum (16 bytes, xxh3-128), then the shard, which is a
whole safetensors file. The frame names their lengths.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

import msgspec

from ckpt_engine.contracts.control_views import AbandonedSteps, KeptStep
from ckpt_engine.contracts.wanted_chunks import WantedShard
from ckpt_engine.format.changed_chunks import MAX_BITMAP_BYTES
from ckpt_engine.format.chunk_runs import MAX_RUNS, ChunkRun
from ckpt_engine.format.manifest import MAX_MANIFEST_BYTES
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.identity import HostId, JobName, Rank, Step
from flyball.contracts.reports.testimony import Age

PEER_PROTOCOL = "flyball-engine/6"
MAX_FRAME_BYTES = 64 << 10
MAX_PROBE_BYTES = 8 << 20
MAX_REPORTED_STEPS = 2048  # of one disk tier

Nonce = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]  # 32 bytes, hex
Proof = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
Address = Annotated[str, msgspec.Meta(max_length=255)]
ManifestSize = Annotated[int, msgspec.Meta(gt=0, le=MAX_MANIFEST_BYTES)]
ShardSize = Annotated[int, msgspec.Meta(gt=0)]


class Challenge(msgspec.Struct, frozen=True):
    """The first frame, from the accepting side; with a `refusal` also the last."""

    protocol: Annotated[str, msgspec.Meta(max_length=64)]
    nonce: Nonce
    refusal: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class Hello(msgspec.Struct, frozen=True):
    """The connecting engine, the job for which it calls ('': by the key that all engines share), and the proof that it
    has the key."""

    host_id: HostId
    address: Address  # where it accepts connections
    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    nonce: Nonce
    proof: Proof
    job: Annotated[str, msgspec.Meta(max_length=63)] = ""


class Welcome(msgspec.Struct, frozen=True):
    """The accepting engine, and the proof that it has the key too."""

    host_id: HostId
    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    proof: Proof


class QueuePairEndpoint(msgspec.Struct, frozen=True):
    """One side's queue pair, as the other side needs it to connect to it."""

    qp_number: Annotated[int, msgspec.Meta(ge=2, lt=0xFFFFFF)]  # the others are for management and for multicast
    first_psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    gid: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]  # "$" matches before a newline as well
    lid: Annotated[int, msgspec.Meta(ge=0, lt=0xC000)]  # above: multicast; 0 on Ethernet
    mtu_bytes: Literal[256, 512, 1024, 2048, 4096]
    is_infiniband: bool  # else Ethernet: RoCE
    receive_buffers: Annotated[int, msgspec.Meta(ge=16, le=1024)]  # they are given back a quarter of them at a time
    receive_buffer_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 20)]
    reads: Annotated[int, msgspec.Meta(ge=1, le=255)]  # RDMA READs that it answers at a time


class OfferQueuePair(msgspec.Struct, frozen=True, tag="offer_queue_pair"):
    """Go on over a queue pair instead of this TCP connection. At most once, and before any other request."""

    endpoint: QueuePairEndpoint
    proof: Proof  # by the connection's key
    required: bool = False  # the connecting side sends nothing over TCP instead


class AnswerQueuePair(msgspec.Struct, frozen=True):
    """The accepting side's queue pair, connected to the offered one already; or why it stays with TCP."""

    proof: Proof
    endpoint: QueuePairEndpoint | None = None
    refusal: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class PathProbe(msgspec.Struct, frozen=True):
    """The first frame over a new queue pair, from the connecting side, and sent back. It needs several packets, as a
    way may carry short ones only."""

    filler: Annotated[str, msgspec.Meta(max_length=60_000)]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks whether the peer is alive."""


class StorageStage(StrEnum):
    """How far a rank is with its part of what ranks of several hosts store together."""

    FILE = "file"  # its file is durable; it waits for the coordinator
    MANIFEST = "manifest"  # the coordinator agreed; its manifest is written or being written
    WHOLE = "whole"  # it stores its whole shard, or gave the step up
    ALONE = "alone"  # it has nothing to share


class StorageVote(msgspec.Struct, frozen=True):
    """From a rank, about one step: its stage; with a file or manifest also the digest of the plan, and how many ranks
    are its members."""

    step: int
    stage: StorageStage
    plan: Annotated[str, msgspec.Meta(max_length=32)] = ""
    members: Annotated[int, msgspec.Meta(ge=0)] = 0


class StorageDecision(StrEnum):
    """Of the coordinator, about what ranks of several hosts store together."""

    OPEN = ""
    AGREED = "agreed"  # all files are durable: write the manifests
    GIVEN_UP = "given_up"  # store whole shards


class TierNaming(msgspec.Struct, frozen=True):
    """From the coordinator, for one disk tier: the newest step that all ranks write, and the steps to keep.

    `spared`: what the supervisor may know from the coordinator's host, whose reports speak for all ranks. A host that
    is out of touch does not know it otherwise. `together`: the decision about `step`.
    """

    tier: Tier
    step: int
    kept: tuple[int, ...] = ()  # oldest first; every rank has them, except unreadable ones
    spared: tuple[int, ...] = ()  # oldest first
    together: StorageDecision = StorageDecision.OPEN


class TierReport(msgspec.Struct, frozen=True):
    """To the coordinator, about one disk tier: the newest named step that was received, the newest one written or given
    up, and the newest steps that this rank holds there, oldest first.

    `unread`: steps that are there but cannot be read at the moment. If they were reported as lost, the other ranks
    would remove theirs. If they counted, one that never becomes readable would displace a good one.
    """

    tier: Tier
    received: int = msgspec.field(name="heard")
    settled: int
    held: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_REPORTED_STEPS)] = ()
    unread: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_REPORTED_STEPS)] = ()
    vote: StorageVote | None = None

    @property
    def present(self) -> frozenset[int]:
        return frozenset((*self.held, *self.unread))


class WorldStep(msgspec.Struct, frozen=True, tag="world"):
    """From the coordinator: the newest step that all ranks have; newer ones that they never will (the newest by name,
    and all up to `abandoned_upto`); what to write to the disk tiers; the next step to save for an interval in seconds;
    and the word that widens intervals in steps (`save_pace`; it only grows). `kept`: see `KeptStep`; a
    message says it for sure, the words of an engine that has received none do not."""

    job: JobName
    generation: int
    world_step: int
    abandoned: tuple[int, ...] = ()
    tiers: tuple[TierNaming, ...] = ()
    next_save: int = -1
    abandoned_upto: int = -1
    pace: int = 0
    kept: int = -1
    kept_is_sure: bool = True

    @property
    def kept_step(self) -> KeptStep:
        return KeptStep(self.kept, self.kept_is_sure)

    @property
    def abandoned_steps(self) -> AbandonedSteps:
        return AbandonedSteps(frozenset(self.abandoned), self.world_step, self.abandoned_upto)


class SavedSteps(msgspec.Struct, frozen=True, tag="rank_steps"):
    """To the coordinator: the steps that a rank has committed and, with peers, replicated; and those that it will never
    have."""

    job: JobName
    generation: int
    rank: Rank
    saved: tuple[int, ...]
    failed: tuple[int, ...] = ()
    tiers: tuple[TierReport, ...] = ()
    flush: int = -1  # write this step or a newer one to the disk tiers, out of schedule
    saving: int = -1  # saving it, or at it, for a while: of older steps it has only those in `saved`; -1: none


class PutShard(msgspec.Struct, frozen=True, tag="put"):
    """Take a replica of a rank's shard, from the host of that rank. `running_generation` fences off senders of a
    superseded generation."""

    job: JobName
    running_generation: int
    generation: int  # the one that wrote the bytes
    step: Step
    rank: Rank
    manifest_bytes: ManifestSize
    shard_bytes: ShardSize


class GetShard(msgspec.Struct, frozen=True, tag="get"):
    """Send a rank's shard, from any tier."""

    job: JobName
    generation: int
    step: Step
    rank: Rank


class GetChunks(msgspec.Struct, frozen=True, tag="get_chunks"):
    """Send some chunks of a rank's shard, in order, from any tier. The manifest comes before them if it is asked
    for. `broadcast`: both hosts read the step from the store, these chunks the receiver's; it waits a moment for them,
    and does not read them for this request."""

    job: JobName
    generation: int
    step: Step
    rank: Rank
    runs: Annotated[tuple[ChunkRun, ...], msgspec.Meta(max_length=MAX_RUNS)]
    with_manifest: bool = False
    broadcast: bool = False


class ProbeBandwidth(msgspec.Struct, frozen=True, tag="probe"):
    """Send so many zeros, to measure how fast they come. An OK comes before them."""

    size_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_PROBE_BYTES)]


class ListShards(msgspec.Struct, frozen=True, tag="list"):
    """List this rank's shards in memory, own slots and replicas. Sent by an engine that starts empty."""

    job: JobName
    rank: Rank


class ListWanted(msgspec.Struct, frozen=True, tag="list_wanted"):
    """List the chunks that this host's ranks want from the store, to restore `step` in `generation` in another
    layout."""

    job: JobName
    generation: int
    step: Step


PeerRequest: TypeAlias = (
    Ping | WorldStep | SavedSteps | PutShard | GetShard | GetChunks | ListShards | ListWanted | ProbeBandwidth
)


class ShardVerdict(StrEnum):
    OK = "ok"
    SEND = "send"  # send the bytes
    COMPARE = "compare"  # send the manifest first: an older step here may share chunks
    HAVE = "have"  # a verified copy is here already
    BUSY = "busy"  # not ready; try again
    FULL = "full"  # both replica slots hold steps that the world may need; try again when it has advanced
    STALE = "stale"  # from a superseded generation
    FOREIGN = "foreign"  # the sender was not given what it speaks for; it is not believed
    CORRUPT = "corrupt"  # the bytes did not match the manifest
    MISSING = "missing"  # no such shard here
    ERROR = "error"


class Reply(msgspec.Struct, frozen=True):
    """The reply to a request. Sizes and tier are set if a shard follows, or chunks of it: the sizes are of the whole
    manifest (0: it does not follow) and shard."""

    verdict: ShardVerdict
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    manifest_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MANIFEST_BYTES)] = 0
    shard_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    tier: Tier | None = None
    wanted: Annotated[bytes, msgspec.Meta(max_length=MAX_BITMAP_BYTES)] = b""  # chunks to send after COMPARE; b"": all
    unchanged_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # of a replica, which were not sent
    daemon_s: Age | None = None  # since the replying engine's daemon last asked it; None: unknown


class ShardList(msgspec.Struct, frozen=True):
    """The reply to ListShards: committed copies, newest step first."""

    copies: tuple[ShardCopy, ...] = ()


class WantedList(msgspec.Struct, frozen=True):
    """The reply to ListWanted. BUSY: not all ranks have asked yet. MISSING: this host does not share."""

    verdict: ShardVerdict
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    shards: Annotated[tuple[WantedShard, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
