"""From what a job's settings say to the store of its shards."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.rate_limit import RateLimit
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import ConfigurationError

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
    """A host's own disk. The host's name keeps hosts apart whose disk folders are one, by mistake or on one machine."""
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
    """What all hosts share. `ranks`: whose shards are looked at, as in `ShardStore`."""
    storage = open_storage(run_location(persistent_dir, job, run), settings)
    return ShardStore(storage, tier=Tier.PERSISTENT, job=job, run=run, host_id="", rate_limit=rate_limit, ranks=ranks)


def run_location(root: str, job: str, run: str) -> str:
    """Where a run keeps what it has below `root`, a folder or URL: apart from all other runs of the job."""
    return "/".join((root.rstrip("/"), job, run) if run else (root.rstrip("/"), job))


def open_storage(location: str, settings: EngineSettings) -> Storage:
    """A folder, or the URL of an object store. Nothing is read yet. Raises ConfigurationError."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return FolderStorage(Path(location))
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise ConfigurationError(
            f"{location} is no place for checkpoints that this release knows.",
            hint=f"give a folder, or a URL that begins with {', '.join(f'{known}://' for known in _SCHEMES)}",
        )
    from ckpt_engine.tiers.persistent import ObjectStorage  # obstore is loaded by those who use it

    return ObjectStorage(location, timeout_s=settings.store_timeout_s, retry_s=settings.store_retry_s)
