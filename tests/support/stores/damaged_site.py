"""A small job with its shard in every tier, written as by the engine, to be damaged by tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.stores.shards import make_manifest, put_in_slot

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.format.manifest import MAX_MANIFEST_BYTES, Manifest
from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.peers.fetch import Fetched, Fetcher
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.control_file import HEADER_BYTES
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.memory import MemoryTier, PeerTier, SlotTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.trainer.capture.capturer import Capturer
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.errors import Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, SLOT_SUFFIXES

STEP = 3
CHUNK_BYTES = 256  # so that a shard of 1 KiB has several chunks
HOSTS = {Tier.MEMORY: "a", Tier.PEER: "a", Tier.DISK: "a", Tier.PERSISTENT: ""}  # all reachable from host a


def make_state(step: int, rank: int = 0) -> dict[str, Any]:
    values = torch.arange(20, dtype=torch.float32) * (step + 1) + 1000 * rank
    return {"w": values, "seen": {"tokens": step * 7, "by": (rank, b"\0\xff")}}


@dataclass(frozen=True)
class Shard:
    manifest: Manifest
    data: bytes  # the manifest's
    payload: bytes


def make_shard(step: int = STEP, rank: int = 0, *, generation: int = 1, job: str = "job", world_size: int = 1) -> Shard:
    """As captured, but without the header's padding, so that every byte counts."""
    prepared = Capturer().take(make_state(step, rank))
    whole = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, whole)
    start = shard_format.header_bytes(whole, len(whole))
    header = bytes(whole[shard_format.LENGTH_BYTES : start]).rstrip()
    header = header.ljust(-(-len(header) // 8) * 8)
    payload = len(header).to_bytes(shard_format.LENGTH_BYTES, "little") + header + bytes(whole[start:])
    manifest = make_manifest(
        payload, step, rank, generation=generation, world_size=world_size, job=job, chunk_bytes=CHUNK_BYTES
    )
    return Shard(manifest, manifests.encode(manifest), payload)


def nobody(host_id: str, address: str) -> Connection:
    raise Unreachable(f"{host_id} at {address} is not there.")


class DamagedSite:
    """Host a, which runs rank 0 of `job` in generation 2, after step STEP of generation 1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        prefix = str(root / "flyball-test")
        self.slots: dict[Tier, SlotTier] = {
            Tier.MEMORY: MemoryTier(prefix, "job", "a"),
            Tier.PEER: PeerTier(prefix, "job", "a"),
        }
        self.stores = {
            tier: ShardStore(FolderStorage(root / tier / "job"), tier=tier, job="job", host_id=HOSTS[tier])
            for tier in (Tier.DISK, Tier.PERSISTENT)
        }
        self.counters = Counters()

    def put(self, tier: Tier, shard: Shard) -> None:
        if tier in self.stores:
            store = self.stores[tier]
            store.write(shard.manifest, shard.data, memoryview(shard.payload))
            if tier is Tier.PERSISTENT:
                store.seal(shard.manifest.generation, shard.manifest.step, shard.manifest.rank + 1)
            return
        with self.slots[tier].using(0, create=True) as entry:
            assert entry is not None
            put_in_slot(entry.segments, 0, shard.manifest, shard.payload, shard.data)

    def shard_file(self, tier: Tier) -> Path:
        if tier in self.stores:
            return self.root / tier / "job" / ShardKey(1, STEP, 0).shard
        return Path(self.base(tier) + SLOT_SUFFIXES[0])

    def manifest_file(self, tier: Tier) -> tuple[Path, int]:
        """The file with the manifest, and the offset of the manifest in it."""
        if tier in self.stores:
            return self.root / tier / "job" / ShardKey(1, STEP, 0).manifest, 0
        return Path(self.base(tier) + CONTROL_SUFFIX), HEADER_BYTES + 0 * MAX_MANIFEST_BYTES

    def base(self, tier: Tier) -> str:
        with self.slots[tier].using(0) as entry:
            assert entry is not None
            return entry.segments.base

    def fetcher(self, *tiers: Tier, dial: Dial = nobody, settings: EngineSettings | None = None) -> Fetcher:
        """A fetcher whose plan names these tiers. Host b stands in for host a's own slots."""
        lineage = (LineageEntry(1, STEP), LineageEntry(2))
        sources = tuple(
            ShardSource(0, 1, tier, "b", "b:1") if tier is Tier.MEMORY else ShardSource(0, 1, tier, HOSTS[tier], "")
            for tier in tiers
        )
        plan = RestorePlan(STEP, {"0": sources})
        placement = Placement("job", 2, 1, (HostRanks("a", "::1", "a:1", (0,)),), "::1", 1, {}, lineage, plan)
        return Fetcher(
            HostGeneration(Configure(Fence(1, 2), "a", placement, CheckpointSpec()), "a"),
            plan,
            memory=self.slots[Tier.MEMORY],  # type: ignore[arg-type]  # it is one
            replicas=self.slots[Tier.PEER],  # type: ignore[arg-type]
            disks=self.stores,
            dial=dial,
            settings=settings or EngineSettings(),
            counters=self.counters,
        )

    def fetch(self, fetcher: Fetcher) -> tuple[Tier, bytes]:
        """Fetch as an engine does for a trainer. Returns the source tier and the slot's bytes."""
        reasons: list[str] = []
        with self.slots[Tier.MEMORY].using(0, create=True) as entry:
            assert entry is not None
            fetched: Fetched = fetcher.local_slot(entry, reasons) or fetcher.fetch(entry, reasons)
            return fetched.tier, bytes(entry.segments.payload(fetched.slot))

    def forget(self) -> None:
        """Empty the rank's own slots."""
        with self.slots[Tier.MEMORY].using(0, create=True) as entry:
            assert entry is not None
            for view in entry.segments.slots():
                entry.segments.discard(view)

    def close(self) -> None:
        for tier in self.slots.values():
            tier.release()
            tier.close()
