"""Finding the jobs of disk and persistent tiers below a folder or URL, by their layout alone.

A persistent folder or store has `JOB/gG/stepS/`, a folder for disks `HOST/JOB/gG/stepS/`. What is named may also be one
host's folder, or one job's. Where no step of a folder has a world manifest, `JOB/...` is taken for a host's own disk,
named after the folder that it lies in. A folder with one step's files in it, as `flyball ckpt restore` makes them, is a tier of its
own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.step_folder import first_manifest
from ckpt_engine.step_listing import StepKey
from ckpt_engine.tiers.storage import Storage
from ckpt_engine.world_manifest import WORLD_MANIFEST
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import ConfigurationError, NotFound
from flyball.contracts.identity import NAME_PATTERN

_GENERATION = re.compile(r"g\d+")
_IN_STORE = re.compile(r"(?:(?P<job>[^/]+)/)?g\d+/step\d+/[^/]+")


@dataclass(frozen=True, slots=True)
class TierFolder:
    """`root/job/gG/stepS/...`"""

    root: str  # a folder, or a URL
    job: str
    tier: Tier
    host_id: str
    step: StepKey | None = None  # the files of this step lie in `root` itself


def find_in_store(store: Storage) -> list[TierFolder]:
    """What is in an object store, which is a persistent tier. Raises what the store does."""
    jobs = {match["job"] for entry in store.entries() if (match := _IN_STORE.fullmatch(entry.name))}
    root, _, last = store.place.rpartition("/")
    found = [(root, last) if job is None else (store.place, job) for job in jobs]
    return [TierFolder(root, job, Tier.PERSISTENT, "") for root, job in sorted(found) if _is_job_name(job)]


def find_in_folder(folder: Path) -> list[TierFolder]:
    """What is below a folder. Raises NotFound if there is none, ConfigurationError if it cannot be read."""
    if not folder.is_dir():
        raise NotFound(f"There is no folder {folder}.", hint="name the disk or persistent folder of a job")
    folder = folder.resolve()
    try:
        if _is_job(folder):
            return [_found(folder)]
        manifest = first_manifest(folder)
        if manifest is not None:
            return [TierFolder(str(folder), manifest.job, Tier.DISK, "", (manifest.generation, manifest.step))]
        found = []
        for child in _folders(folder):
            if _is_job(child):
                found.append(_found(child))
            else:
                found += [_found(job, host_id=child.name) for job in _folders(child) if _is_job(job)]
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or folder} cannot be read: {error.strerror}.", hint="read it as the user who owns it"
        ) from error
    return found


def _found(job: Path, *, host_id: str | None = None) -> TierFolder:
    if host_id is None and any(job.glob(f"g*/step*/{WORLD_MANIFEST}")):
        return TierFolder(str(job.parent), job.name, Tier.PERSISTENT, "")
    return TierFolder(str(job.parent), job.name, Tier.DISK, host_id or job.parent.name)


def _is_job(folder: Path) -> bool:
    return _is_job_name(folder.name) and any(_GENERATION.fullmatch(child.name) for child in _folders(folder))


def _is_job_name(name: str) -> bool:
    return re.fullmatch(NAME_PATTERN, name) is not None


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
