"""Bringing a whole step out of its tiers into an ordinary folder: a safetensors file and a manifest per rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.shard_names import MANIFEST_SUFFIX, SHARD_SUFFIX
from ckpt_engine.format.step_listing import StepListing
from ckpt_engine.inspect.copy_places import reason
from ckpt_engine.inspect.inventory import CopyInventory, HeldCopy
from ckpt_engine.inspect.shard_reading import ShardReading
from ckpt_engine.tiers.folder import FolderStorage
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import (
    ConfigurationError,
    Conflict,
    CorruptShard,
    FlyballError,
    RestoreFailed,
    StorageFull,
)
from flyball.state_folder import make_folder

_RANK_FILE = re.compile(r"rank\d+(\.safetensors|\.manifest)")


class PassedOver(msgspec.Struct, frozen=True):
    """A copy that was nearer and could not be used."""

    copy: ShardCopy
    path: str
    reason: str


class ExtractedShard(msgspec.Struct, frozen=True):
    """One rank's shard in the folder. `source` is the copy that it was made from, `source_path` where that lies."""

    rank: int
    path: str
    manifest_path: str
    size_bytes: int
    source: ShardCopy
    source_path: str
    passed_over: tuple[PassedOver, ...]


def extract_step(
    inventory: CopyInventory,
    listing: StepListing,
    target: Path,
    *,
    overwrite: bool,
    on_bytes: Callable[[int], None],
) -> tuple[ExtractedShard, ...]:
    """Write every rank's shard into `target`, each from the nearest copy whose every byte is right. Nothing is written
    if a rank has no copy at all.

    Raises RestoreFailed with the reason per rank, Conflict if files are there already and `overwrite` is not set, or if
    `target` is where copies of the job lie, StorageFull or OSError.
    """
    sources: dict[int, list[HeldCopy]] = {rank: [] for rank in range(listing.world_size)}
    for held in inventory.copies_of(listing):
        if inventory.counts(held) and held.copy.rank in sources:
            sources[held.copy.rank].append(held)
    _check_complete(inventory, listing, {rank: "no copy" for rank, found in sources.items() if not found})
    _check_apart(inventory, target)
    _make_room(target, overwrite=overwrite)
    extracted: list[ExtractedShard] = []
    failed: dict[int, str] = {}
    try:
        for rank, held_copies in sources.items():
            shard, passed_over = _extract(rank, held_copies, target, on_bytes)
            if shard is None:
                failed[rank] = "; ".join(f"{found.path}: {found.reason}" for found in passed_over)
            else:
                extracted.append(shard)
        _check_complete(inventory, listing, failed)
    except BaseException:  # Ctrl-C too: half a step is of no use to anybody
        FolderStorage(target).remove([name for rank in sources for name in _names(rank)])
        raise
    return tuple(extracted)


def _extract(
    rank: int, sources: list[HeldCopy], target: Path, on_bytes: Callable[[int], None]
) -> tuple[ExtractedShard | None, tuple[PassedOver, ...]]:
    passed_over: list[PassedOver] = []
    for held in sources:
        source_path = held.path
        try:
            with held.place.reading(held.copy) as reading:
                _write(target, rank, reading, on_bytes)
        except (StorageFull, ConfigurationError):  # of the folder, not of the copy
            raise
        except (FlyballError, OSError) as error:
            passed_over.append(PassedOver(held.copy, source_path, reason(error)))
            continue
        manifest, shard = _names(rank)
        found = ExtractedShard(
            rank=rank,
            path=str(target / shard),
            manifest_path=str(target / manifest),
            size_bytes=held.copy.size_bytes,
            source=held.copy,
            source_path=source_path,
            passed_over=tuple(passed_over),
        )
        return found, ()
    return None, tuple(passed_over)


def _write(target: Path, rank: int, reading: ShardReading, on_bytes: Callable[[int], None]) -> None:
    manifest, shard = _names(rank)
    lines = manifests.as_file(reading.manifest_bytes)
    folder = FolderStorage(target)
    try:
        folder.write(shard, _verified(reading, on_bytes), reading.manifest.payload_bytes)
        folder.write(manifest, [lines], len(lines))
    except OSError as error:
        raise ConfigurationError(
            f"{target / shard} cannot be written: {error.strerror}.", hint="choose a folder that you may write to"
        ) from error


def _verified(reading: ShardReading, on_bytes: Callable[[int], None]) -> Iterator[memoryview]:
    try:
        for chunk in reading.verified_chunks():
            on_bytes(len(chunk))
            yield chunk
    except OSError as error:
        raise CorruptShard(f"It cannot be read: {error.strerror}.") from error


def _names(rank: int) -> tuple[str, str]:
    """The manifest's first: so they are removed."""
    return f"rank{rank}{MANIFEST_SUFFIX}", f"rank{rank}{SHARD_SUFFIX}"


def _check_apart(inventory: CopyInventory, target: Path) -> None:
    """What is written over is gone before the first byte is read."""
    for held in inventory.held:
        if held.copy.tier in (Tier.DISK, Tier.PERSISTENT) and Path(held.path).parent.resolve() == target.resolve():
            raise Conflict(
                f"In {target} lies step {held.copy.step} of {inventory.job} itself.", hint="choose another folder"
            )


def _make_room(target: Path, *, overwrite: bool) -> None:
    """A folder without shards: those of another step, or world, would pass for this one's."""
    try:
        make_folder(target)
        present = sorted(path.name for path in target.iterdir() if _RANK_FILE.fullmatch(path.name))
        if present and overwrite:
            FolderStorage(target).remove(present)
    except OSError as error:
        raise ConfigurationError(
            f"The folder {target} cannot be used: {error.strerror}.", hint="choose one that you may write to"
        ) from error
    if present and not overwrite:
        raise Conflict(
            f"{target} already has {', '.join(present[:4])}{' and others' if len(present) > 4 else ''}.",
            hint="choose another folder, or replace all shards in it with --force",
        )


def _check_complete(inventory: CopyInventory, listing: StepListing, failed: dict[int, str]) -> None:
    if failed:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failed.items()))
        raise RestoreFailed(
            f"Step {listing.step} (generation {listing.generation}) of {inventory.job} is not complete: {reasons}.",
            hint="choose a complete step (flyball ckpt ls), or name more places with --state-dir or --dir",
        )
