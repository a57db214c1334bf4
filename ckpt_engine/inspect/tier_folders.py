"""Finds the runs of jobs in disk and persistent tiers below a folder or URL, from their layout alone.

A persistent tier has `JOB/RUN/gG/stepS/`, a disk tier `HOST/JOB/RUN/gG/stepS/`. `RUN/` is missing if the engine was
used without a controller. The given folder may also be that of a host, a job or a run. If no step of a job has a world
manifest, the folder counts as a host's own disk, and its parent's name as the host id. A folder with one step's files,
as `flyball ckpt restore` writes it, is a tier of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.format.step_listing import StepKey
from ckpt_engine.format.world_manifest import WORLD_MANIFEST
from ckpt_engine.inspect.step_folder import first_manifest
from ckpt_engine.tiers.opening import run_location
from ckpt_engine.tiers.storage import Storage
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import ConfigurationError, NotFound
from flyball.contracts.identity import NAME_PATTERN, RUN_PATTERN

_GENERATION = re.compile(r"g\d+")
_IN_STORE = re.compile(r"(?P<above>(?:[^/]+/){0,2})g\d+/step\d+/[^/]+")


@dataclass(frozen=True, slots=True)
class TierFolder:
    """`root/job/run/gG/stepS/...`"""

    root: str  # a folder, or a URL
    job: str
    tier: Tier
    host_id: str
    run: str = ""
    step: StepKey | None = None  # this step's files are directly in `root`

    @property
    def location(self) -> str:
        return self.root if self.step is not None else run_location(self.root, self.job, self.run)


def find_in_store(store: Storage) -> list[TierFolder]:
    """The tiers in an object store, all persistent. Raises what the store raises."""
    above = {match["above"] for entry in store.entries() if (match := _IN_STORE.fullmatch(entry.name))}
    found = [_split(f"{store.place}/{folders}".rstrip("/")) for folders in sorted(above)]
    return [TierFolder(root, job, Tier.PERSISTENT, "", run) for root, job, run in found if _is_usable_name(job)]


def _split(location: str) -> tuple[str, str, str]:
    """Root, job and run of a folder that contains generations."""
    root, _, last = location.rpartition("/")
    run = last if _is_run_name(last) else ""
    if run:
        root, _, last = root.rpartition("/")
    return root, last, run


def find_in_folder(folder: Path) -> list[TierFolder]:
    """The tiers below a folder. Raises NotFound if it does not exist, ConfigurationError if it cannot be read."""
    if not folder.is_dir():
        raise NotFound(f"There is no folder {folder}.", hint="give the disk or persistent folder of a job")
    folder = folder.resolve()
    try:
        if _is_run_name(folder.name) and _has_generations(folder):
            return [found for found in _runs(folder.parent) if found.run == folder.name]
        if found := _runs(folder):
            return found
        manifest = first_manifest(folder)
        if manifest is not None:
            key = (manifest.generation, manifest.step)
            return [TierFolder(str(folder), manifest.job, Tier.DISK, "", manifest.run, key)]
        for child in _folders(folder):
            if _is_usable_name(child.name):  # as hosts and jobs have
                found += _runs(child) or [run for job in _folders(child) for run in _runs(job, host_id=child.name)]
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or folder} cannot be read: {error.strerror}.", hint="run this as the user who owns it"
        ) from error
    return found


def _runs(job: Path, *, host_id: str | None = None) -> list[TierFolder]:
    """The runs in a job's folder; [] if it is not one."""
    if not _is_usable_name(job.name):
        return []
    runs = [child for child in _folders(job) if _is_run_name(child.name) and _has_generations(child)]
    runs = [job, *runs] if _has_generations(job) else runs
    names = ["" if run is job else run.name for run in runs]
    if host_id is None and _is_sealed(runs):
        return [TierFolder(str(job.parent), job.name, Tier.PERSISTENT, "", name) for name in names]
    return [TierFolder(str(job.parent), job.name, Tier.DISK, host_id or job.parent.name, name) for name in names]


def _is_sealed(runs: Iterable[Path]) -> bool:
    return any(next(run.glob(f"g*/step*/{WORLD_MANIFEST}"), None) is not None for run in runs)


def _has_generations(folder: Path) -> bool:
    return any(_GENERATION.fullmatch(child.name) for child in _folders(folder))


def _is_usable_name(name: str) -> bool:
    return re.fullmatch(NAME_PATTERN, name) is not None


def _is_run_name(name: str) -> bool:
    return name != "" and re.fullmatch(RUN_PATTERN, name) is not None


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
