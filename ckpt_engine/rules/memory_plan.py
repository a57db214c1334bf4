"""How much of a host's memory one job's checkpoints take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.rules.slot_rules import MIN_SLOTS


def readable_size(size_bytes: float) -> str:
    """'14.2 MiB'"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Slots and replica slots of one job on one host."""

    payload_bytes: int  # of one rank's shard
    local_ranks: int = 1
    replicas: int = 0  # shards of other hosts' ranks kept here, per local rank
    slots: int = MIN_SLOTS  # of each local rank: see slot_rules.slot_count

    @property
    def rank_bytes(self) -> int:
        return self.slots * self.payload_bytes

    @property
    def replica_bytes(self) -> int:
        """Memory for all replicas. Each has two slots, because no slow tier writes from them."""
        return MIN_SLOTS * self.payload_bytes * self.replicas * self.local_ranks

    @property
    def total_bytes(self) -> int:
        return self.rank_bytes * self.local_ranks + self.replica_bytes

    def __str__(self) -> str:
        return (
            f"{readable_size(self.payload_bytes)} per slot, {self.slots} slots = {readable_size(self.rank_bytes)} per "
            f"rank, {self.local_ranks} ranks, {self.replicas} replicas each with {MIN_SLOTS} slots: "
            f"{readable_size(self.total_bytes)} per host"
        )
