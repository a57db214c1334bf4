"""What engines say to each other. Every request is answered by exactly one Reply, with two exceptions. ListShards is
answered by an Inventory. An accepted PutShard is answered by SEND, before the bytes, and by the outcome after them; or
by COMPARE, before the manifest, then SEND and the outcome.

Bytes follow a frame raw, and never inside it: first the manifest and its checksum (16 bytes, xxh3-128), then the shard
(a whole safetensors file), in the lengths that the frame names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from ckpt_engine.format.changed_chunks import MAX_BITMAP_BYTES
from ckpt_engine.format.manifest import MAX_MANIFEST_BYTES
from ckpt_engine.slots.slot_rules import AbandonedSteps
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.identity import HostId, JobName, Rank, Step
from flyball.contracts.reports.testimony import Age

PEER_PROTOCOL = "flyball-engine/4"
MAX_FRAME_BYTES = 64 << 10

Nonce = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]  # 32 bytes, hex
Proof = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
Address = Annotated[str, msgspec.Meta(max_length=255)]
ManifestSize = Annotated[int, msgspec.Meta(gt=0, le=MAX_MANIFEST_BYTES)]
ShardSize = Annotated[int, msgspec.Meta(gt=0)]


class Challenge(msgspec.Struct, frozen=True):
    """The first words of whoever accepted a connection; with a `refusal` also the last."""

    protocol: Annotated[str, msgspec.Meta(max_length=64)]
    nonce: Nonce
    refusal: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class Hello(msgspec.Struct, frozen=True):
    """Who connects, and the proof that it has the token."""

    host_id: HostId
    address: Address  # where it accepts connections
    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    nonce: Nonce
    proof: Proof


class Welcome(msgspec.Struct, frozen=True):
    """Who accepted, and the proof that it has the token as well."""

    host_id: HostId
    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    proof: Proof


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there?"""


class TierNaming(msgspec.Struct, frozen=True):
    """From the coordinator, of one disk tier: the newest step that all ranks are to write, and those to keep."""

    tier: Tier
    step: int
    kept: tuple[int, ...] = ()  # oldest first; every rank has them, as far as they could be read


class TierReport(msgspec.Struct, frozen=True):
    """To the coordinator, of one disk tier: the newest name heard, the newest that was written or given up, and the
    steps that this rank has there, oldest first; the newest few. `unread`: those that are there and cannot be read just
    now. Were they told as lost, the other ranks would remove theirs; were they counted, one that never becomes readable
    would take the place of one that is good."""

    tier: Tier
    received: int = msgspec.field(name="heard")
    settled: int
    held: Annotated[tuple[int, ...], msgspec.Meta(max_length=2048)] = ()
    unread: Annotated[tuple[int, ...], msgspec.Meta(max_length=2048)] = ()

    @property
    def present(self) -> frozenset[int]:
        return frozenset((*self.held, *self.unread))


class WorldStep(msgspec.Struct, frozen=True, tag="world"):
    """From the coordinator: the newest step that all ranks have, newer ones that they never will (the newest few by
    name, and all up to `abandoned_upto`), what to write to the disk tiers, the step to save for an interval in
    seconds, and what those in steps are multiplied by (`save_pace`: a word that only grows)."""

    job: JobName
    generation: int
    world_step: int
    abandoned: tuple[int, ...] = ()
    tiers: tuple[TierNaming, ...] = ()
    next_save: int = -1
    abandoned_upto: int = -1
    pace: int = 0

    @property
    def abandoned_steps(self) -> AbandonedSteps:
        return AbandonedSteps(frozenset(self.abandoned), self.world_step, self.abandoned_upto)


class CommittedSteps(msgspec.Struct, frozen=True, tag="rank_steps"):
    """To the coordinator: steps that a rank has committed and, where peers are configured, replicated; and those that
    it will never have."""

    job: JobName
    generation: int
    rank: Rank
    saved: tuple[int, ...]
    failed: tuple[int, ...] = ()
    tiers: tuple[TierReport, ...] = ()
    flush: int = -1  # bring this step or a newer one to the disk tiers, out of schedule
    saving: int = -1  # busy with it, or at it, for long: it will have no older ones but those in `saved`; -1: none


class PutShard(msgspec.Struct, frozen=True, tag="put"):
    """Take a replica of a rank's shard. `running_generation` fences out senders of a superseded generation; `world`
    is what the sender knows of the world step, so that a receiver that has not heard yet need not answer FULL."""

    job: JobName
    running_generation: int
    generation: int  # the one that wrote the bytes
    step: Step
    rank: Rank
    manifest_bytes: ManifestSize
    shard_bytes: ShardSize
    world: WorldStep


class GetShard(msgspec.Struct, frozen=True, tag="get"):
    """Send a rank's shard from whatever tier has it."""

    job: JobName
    generation: int
    step: Step
    rank: Rank


class ListShards(msgspec.Struct, frozen=True, tag="list"):
    """Which shards of this rank are in your memory, as own slots or replicas? From an engine that starts empty."""

    job: JobName
    rank: Rank


PeerRequest: TypeAlias = Ping | WorldStep | CommittedSteps | PutShard | GetShard | ListShards


class ShardVerdict(StrEnum):
    OK = "ok"
    SEND = "send"  # the put may begin
    COMPARE = "compare"  # send the manifest first: an older step is here, and some of its chunks may be the same
    HAVE = "have"  # a verified copy is there already
    BUSY = "busy"  # not ready for this; try again
    FULL = "full"  # both replica slots hold steps that the world may still need; try again when it has moved on
    STALE = "stale"  # of a generation that no longer counts here
    CORRUPT = "corrupt"  # the bytes did not match the manifest
    MISSING = "missing"  # no such shard here
    ERROR = "error"


class Reply(msgspec.Struct, frozen=True):
    """The answer to a request. Sizes and tier are set when a shard follows."""

    verdict: ShardVerdict
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    manifest_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MANIFEST_BYTES)] = 0
    shard_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    tier: Tier | None = None
    wanted: Annotated[bytes, msgspec.Meta(max_length=MAX_BITMAP_BYTES)] = b""  # chunks to send after COMPARE; b"": all
    unchanged_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # of a replica, that did not travel
    daemon_s: Age | None = None  # since the daemon beside the one who answers last spoke to it; None: not told


class ShardList(msgspec.Struct, frozen=True):
    """The answer to ListShards: committed copies, newest step first."""

    copies: tuple[ShardCopy, ...] = ()
