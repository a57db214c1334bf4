"""Removes steps from disks and stores on request: finds what would go and what must stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.format.step_listing import StepKey, StepListing, list_steps
from ckpt_engine.inspect.copy_places import StoragePlace
from ckpt_engine.inspect.inventory import CopyInventory
from flyball.contracts.checkpoints import Tier

REMOVABLE = (Tier.DISK, Tier.PERSISTENT)  # a job's slots can only be freed all at once


class Protection(StrEnum):
    """Why a step stays unless its removal is forced."""

    RECOVERY_POINT = "recovery_point"  # the newest step that all ranks have
    DURABLE_POINT = "durable_point"  # the newest one that survives the loss of all memory
    PINNED = "pinned"
    PARTIAL_VIEW = "partial_view"  # other hosts' disks, invisible from here, may have the rest


@dataclass(frozen=True, slots=True)
class Target:
    """One shard in one place, valid or not."""

    place: StoragePlace
    key: ShardKey
    size_bytes: int  # 0 without a valid manifest

    @property
    def path(self) -> str:
        return self.place.file_path(self.key.shard)

    def remove(self) -> None:
        """Remove it, manifests first, the world's with rank 0's. Raises OSError or FlyballError."""
        self.place.remove(self.key)


def protected(inventory: CopyInventory) -> dict[StepKey, Protection]:
    """The steps that stay, and why."""
    durable = durable_point(inventory)
    found = dict.fromkeys(_perhaps_needed(inventory, durable), Protection.PARTIAL_VIEW)
    found |= dict.fromkeys(inventory.pinned, Protection.PINNED)
    points = (Protection.DURABLE_POINT, durable), (Protection.RECOVERY_POINT, inventory.recovery_point)
    return found | {(point.generation, point.step): why for why, point in points if point is not None}


def _perhaps_needed(inventory: CopyInventory, durable: StepListing | None) -> set[StepKey]:
    """Steps on disk, newer than the durable point, of which not all ranks' disks are visible from here."""
    seen = {target.key.rank for target in _all_targets(inventory, (Tier.DISK,))}
    return {
        (step.generation, step.step)
        for step in inventory.steps
        if step.alive
        and len(seen) < step.world_size
        and any(share.tier is Tier.DISK for share in step.tiers)
        and (durable is None or step.step > durable.step)
    }


def needed_memory(inventory: CopyInventory) -> StepListing | None:
    """The newest step with a copy in memory, if it is newer than the durable point."""
    durable = durable_point(inventory)
    in_memory = (step for step in inventory.steps if step.alive and any(s.tier not in REMOVABLE for s in step.tiers))
    newest = max(in_memory, key=lambda step: (step.step, step.generation), default=None)
    return newest if newest and (durable is None or newest.step > durable.step) else None


def durable_point(inventory: CopyInventory) -> StepListing | None:
    """The recovery point of disks and stores alone."""
    durable = list_steps(
        (held.copy for held in inventory.held if held.copy.tier in REMOVABLE),
        lineage=inventory.lineage,
        world_sizes={(step.generation, step.step): step.world_size for step in inventory.steps},
        unsealed=inventory.unsealed,
        bad=inventory.bad,
    )
    key = next(((step.generation, step.step) for step in durable if step.recovery_point), None)
    return next((step for step in inventory.steps if (step.generation, step.step) == key), None)


def stored_steps(inventory: CopyInventory, tiers: Collection[Tier]) -> set[StepKey]:
    """The steps that have anything in these tiers, even if it does not count."""
    return {(target.key.generation, target.key.step) for target in _all_targets(inventory, tiers)}


def find_targets(inventory: CopyInventory, steps: Collection[StepKey], tiers: Collection[Tier]) -> list[Target]:
    """All shards of these steps, rank 0 first: its removal makes the whole step stop counting."""
    found = [t for t in _all_targets(inventory, tiers) if (t.key.generation, t.key.step) in steps]
    return sorted(found, key=lambda target: (target.key, target.path))


def _all_targets(inventory: CopyInventory, tiers: Collection[Tier]) -> list[Target]:
    valid = [
        Target(held.place, ShardKey(*held.key, held.copy.rank), held.copy.size_bytes)
        for held in inventory.held
        if isinstance(held.place, StoragePlace) and held.place.tier in tiers
    ]
    invalid = [
        Target(found.place, found.key, 0)
        for found in inventory.ignored
        if found.place is not None and found.key is not None and found.place.tier in tiers
    ]
    return valid + invalid
