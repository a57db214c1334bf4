"""Opens the stores of a job's shards according to its settings."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.on_host.os_text import from_text

_SCHEMES = ("s3", "gs", "az")


def open_disk(
    disk_dir: str,
    *,
    job: str,
    run: str = "",
    host_id: str,
    settings: EngineSettings,
    rate_limit: RateLimit | None = None,
) -> ShardStore:
    """A host's own disk. The host id is part of the path: several hosts may share a disk folder, by mistake or on one
    machine."""
    storage = open_storage(run_location(f"{disk_dir}/{host_id}", job, run), settings)
    return ShardStore(storage, tier=Tier.DISK, job=job, run=run, host_id=host_id, rate_limit=rate_limit)


def open_persistent(
    persistent_dir: str,
    *,
    job: str,
    run: str = "",
    settings: EngineSettings,
    rate_limit: RateLimit | None = None,
    ranks: Collection[int] | None = None,
) -> ShardStore:
    """The store that all hosts share. `ranks`: see `ShardStore`."""
    storage = open_storage(run_location(persistent_dir, job, run), settings)
    return ShardStore(storage, tier=Tier.PERSISTENT, job=job, run=run, host_id="", rate_limit=rate_limit, ranks=ranks)


def run_location(root: str, job: str, run: str) -> str:
    """The place of one run below `root`, a folder or URL. Runs of a job do not share places."""
    root = from_text(root)
    return "/".join((root.rstrip("/"), job, run) if run else (root.rstrip("/"), job))


def open_storage(location: str, settings: EngineSettings) -> Storage:
    """A folder, or an object store given by its URL. Does not access it yet. Raises ConfigurationError."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return FolderStorage(Path(location))
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise ConfigurationError(
            f"Checkpoints cannot be stored at {location}: this kind of URL is not supported.",
            hint=f"use a folder, or a URL that begins with {', '.join(f'{known}://' for known in _SCHEMES)}",
        )
    from ckpt_engine.tiers.persistent import ObjectStorage  # loads obstore only if it is used

    return ObjectStorage(location, timeout_s=settings.store_timeout_s, retry_s=settings.store_retry_s)
