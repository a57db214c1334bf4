"""Extracts a complete step from its tiers into an ordinary folder: a safetensors file and a manifest per rank."""

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
    """A nearer copy that could not be used."""

    copy: ShardCopy
    path: str
    reason: str


class ExtractedShard(msgspec.Struct, frozen=True):
    """One rank's shard in the folder. `source` is the copy it was made from, `source_path` where that is."""

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
    """Write every rank's shard into `target`, each from the nearest copy that can be verified. Nothing is written if a
    rank has no copy at all.

    Raises RestoreFailed with the reason per rank; Conflict if `target` has shards and `overwrite` is not set, or if it
    holds copies of the job itself; StorageFull; OSError.
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
    except BaseException:  # also at Ctrl-C: half a step is useless
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
        except (StorageFull, ConfigurationError):  # about the folder, not the copy
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
            f"{target / shard} cannot be written: {error.strerror}.", hint="choose a writable folder"
        ) from error


def _verified(reading: ShardReading, on_bytes: Callable[[int], None]) -> Iterator[memoryview]:
    try:
        for chunk in reading.verified_chunks():
            on_bytes(len(chunk))
            yield chunk
    except OSError as error:
        raise CorruptShard(f"It cannot be read: {error.strerror}.") from error


def _names(rank: int) -> tuple[str, str]:
    """Manifest and shard, in the order of removal."""
    return f"rank{rank}{MANIFEST_SUFFIX}", f"rank{rank}{SHARD_SUFFIX}"


def _check_apart(inventory: CopyInventory, target: Path) -> None:
    """Refuse a target that holds copies of the job: they would be overwritten before they are read."""
    for held in inventory.held:
        if held.copy.tier in (Tier.DISK, Tier.PERSISTENT) and Path(held.path).parent.resolve() == target.resolve():
            raise Conflict(
                f"{target} is where step {held.copy.step} of {inventory.job} is stored.", hint="choose another folder"
            )


def _make_room(target: Path, *, overwrite: bool) -> None:
    """Make an empty folder: shards of another step or world in it would be taken for this one's."""
    try:
        make_folder(target)
        present = sorted(path.name for path in target.iterdir() if _RANK_FILE.fullmatch(path.name))
        if present and overwrite:
            FolderStorage(target).remove(present)
    except OSError as error:
        raise ConfigurationError(
            f"The folder {target} cannot be used: {error.strerror}.", hint="choose a writable one"
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
