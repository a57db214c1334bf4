"""Find the copies for `flyball ckpt`: in state folders of hosts, and in folders of the disk and persistent tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ckpt_engine.inspect.copy_places import Ignored, Place, SlotPlace, StoragePlace
from ckpt_engine.inspect.host_folder import HostFolder, find_host_folders
from ckpt_engine.inspect.inventory import CopyInventory
from ckpt_engine.inspect.known_bad import KnownBad
from ckpt_engine.inspect.step_folder import StepFolder
from ckpt_engine.inspect.tier_folders import TierFolder, find_in_folder, find_in_store
from ckpt_engine.settings import EngineSettings, load_settings
from ckpt_engine.tiers.opening import open_storage
from flyball.cli.reach.places import bad_copies_file, state_root
from flyball.cli.run.run_folders import CHECKPOINTS
from flyball.cli.show.output import announce
from flyball.contracts.checkpoints import PeerTransports, Tier
from flyball.contracts.errors import ConfigurationError, FlyballError, NotFound, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.on_host.engine_wire import Configure
from flyball.contracts.on_host.os_text import from_text
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE

MAX_STORE_RETRY_S = 10.0  # short, because a user is waiting


@dataclass(frozen=True)
class JobCopies:
    """The copies of one run of a job, and the state folders of its hosts."""

    inventory: CopyInventory
    hosts: tuple[HostFolder, ...]  # of this run
    runs: tuple[str, ...] = ()  # all known runs of the job, oldest first

    @property
    def job(self) -> str:
        return self.inventory.job

    @property
    def transports(self) -> dict[str, PeerTransports]:
        """By host, what carries shards between it and its peers."""
        return {host.host_id(self.job): host.transports for host in self.hosts if host.transports}

    @property
    def configure(self) -> Configure | None:
        """The configuration of the newest generation that any of the hosts knows."""
        return _newest_configure(self.hosts, self.job)


def find_copies(
    environ: Mapping[str, str], *, state_dir: str, folders: Sequence[str], job: str, with_notes: bool = True
) -> JobCopies:
    """Find the copies in a state folder (of a host, a run, or the root of all) and in `folders` of tiers.

    Without either, searches all runs on this machine. `job` is JOB (its newest run) or JOB/RUN. `with_notes`: no step
    counts because of a copy that did not verify when this machine last read it. Raises NotFound if
    there is no such job or run, UsageError if there are several jobs and none is named, ConfigurationError for an
    unreadable folder.
    """
    job, _, wanted_run = job.partition("/")
    if job or wanted_run:
        check_name("The job", job)
    root = None if folders and not state_dir else Path(state_dir) if state_dir else state_root(environ)
    hosts = _hosts(root, environ) if root else []
    settings = load_settings(environ)
    settings = msgspec.structs.replace(settings, store_retry_s=min(settings.store_retry_s, MAX_STORE_RETRY_S))
    by_folder = {folder: _tier_folders(folder, settings) for folder in folders}
    tier_folders = [found for of_folder in by_folder.values() for found in of_folder]
    found_names = {name for host in hosts for name in host.jobs} | {found.job for found in tier_folders}
    if root and (job not in found_names if job else not found_names):
        tier_folders += _default_folders(root)
    name = _choose_job(job, hosts, tier_folders, looked_in=[*([state_dir] if state_dir else []), *folders])
    for folder, of_folder in by_folder.items():
        if all(found.job != name for found in of_folder):
            announce(f"{folder} holds no checkpoints of {name}")
    hosts_of_job = [host for host in hosts if name in host.jobs]
    of_job = [found for found in tier_folders if found.job == name]
    of_job += _configured_folders(hosts_of_job, name, settings)
    runs = sorted(
        {found.run for found in of_job} | {run for host in hosts_of_job if (run := host.run(name)) is not None}
    )
    run = _choose_run(name, wanted_run, runs)
    here = _one_folder_per_host([host for host in hosts_of_job if host.run(name) in (None, run)], name)
    places: list[Place] = [
        SlotPlace(tier, host.prefix, name, host.host_id(name), run=run)
        for host in here
        for tier in (Tier.MEMORY, Tier.PEER)
    ]
    places += [_storage_place(found, settings) for found in of_job if found.run == run]
    known = _newest_configure(here, name)
    inventory = CopyInventory(name, _unique(places), run=run or "", lineage=known.placement.lineage if known else ())
    inventory.ignored += [Ignored(file, why) for host in hosts for file, why in host.unreadable.items()]
    if with_notes:
        known_bad = KnownBad(bad_copies_file(environ))
        inventory.leave_out(lambda held: known_bad.problem(held) != "")
    return JobCopies(inventory, tuple(here), tuple(runs))


def _newest_configure(hosts: Sequence[HostFolder], job: str) -> Configure | None:
    known = [c for host in hosts if (c := host.configures.get(job)) is not None]
    return max(known, key=lambda configure: configure.placement.generation, default=None)


def _hosts(root: Path, environ: Mapping[str, str]) -> list[HostFolder]:
    if not root.is_dir():
        raise NotFound(
            f"There is no state folder {root}.",
            hint="name one of `flyball run` or `flyball host` with --state-dir, or a checkpoint folder with --dir",
        )
    try:
        list(root.iterdir())
        return find_host_folders(root, environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR)
    except PermissionError as error:
        raise ConfigurationError(
            f"{error.filename} cannot be read: {error.strerror}.", hint="run this as the user who owns the job"
        ) from error


def _default_folders(root: Path) -> list[TierFolder]:
    """The default disk tiers in the state folders below `root`. Hosts forget where an ended job's checkpoints are."""
    places = [
        place for pattern in ("", "jobs/*/", "hosts/*/") for place in sorted(root.glob(f"{pattern}{CHECKPOINTS}"))
    ]
    return [found for place in places for found in find_in_folder(place)]


def _choose_job(job: str, hosts: list[HostFolder], folders: list[TierFolder], *, looked_in: list[str]) -> str:
    names = sorted({name for host in hosts for name in host.jobs} | {found.job for found in folders})
    if job in names:
        return job
    where = f" in {', '.join(looked_in)}" if looked_in else " on this machine"
    if job or not names:
        raise NotFound(
            f"There are no checkpoints of {f'job {job}' if job else 'any job'}{where}."
            + (f" Known jobs: {', '.join(names)}." if names else ""),
            hint="name a state folder with --state-dir DIR, or a disk or persistent folder with --dir DIR",
        )
    if len(names) > 1:
        raise UsageError(
            f"There are checkpoints of several jobs: {', '.join(names)}.", hint="choose one with --job NAME"
        )
    return names[0]


def _choose_run(job: str, wanted: str, runs: Sequence[str]) -> str | None:
    """The newest run, unless another is wanted; None if there are only segments, whose run is unknown."""
    if wanted and wanted not in runs:
        raise NotFound(
            f"There are no checkpoints of run {wanted} of {job} here.",
            hint=f"known runs: {', '.join(filter(None, runs)) or 'none'}; --job {job} means the newest",
        )
    run = wanted or (runs[-1] if runs else None)
    if others := [other for other in runs if other and other != run]:
        chosen = f"{job} has {len(runs)} runs; this is {'' if wanted else 'the newest, '}{run}"
        announce(f"{chosen} (--job {job}/{others[-1]} shows another)")
    return run


def _one_folder_per_host(hosts: list[HostFolder], job: str) -> list[HostFolder]:
    """If a host has several state folders, keep those used last: without a run id they cannot be told apart."""
    if len({host.host_id(job) for host in hosts}) == len(hosts):
        return hosts
    newest = max(hosts, key=lambda host: host.changed_at)
    announce(f"{job} has several state folders; this is the newest, {newest.path} (--state-dir DIR shows another)")
    return [host for host in hosts if host is newest or host.path.parent == newest.path.parent]


def _configured_folders(hosts: Sequence[HostFolder], job: str, settings: EngineSettings) -> list[TierFolder]:
    """The tier folders of the hosts' last configuration, and those of other runs beside them.

    Folders of the run itself are included even if they are empty or unreachable.
    """
    named: dict[TierFolder, None] = {}  # a dict, because all hosts name the same persistent folder
    for host in hosts:
        configure = host.configures.get(job)
        if configure is None:
            continue
        host_id, run = host.host_id(job), configure.placement.run
        if configure.spec.disk_dir:
            disk = from_text(configure.spec.disk_folder(host.path))
            named[TierFolder(f"{disk}/{host_id}", job, Tier.DISK, host_id, run)] = None
        if configure.spec.persistent_dir:
            named[TierFolder(from_text(configure.spec.persistent_dir), job, Tier.PERSISTENT, "", run)] = None
    return [*named, *(replace(place, run=other) for place in named for other in _runs_beside(place, settings))]


def _runs_beside(place: TierFolder, settings: EngineSettings) -> set[str]:
    """The other runs in the job's folder; none if it is unreadable, which the inventory reports by itself."""
    try:
        found = _tier_folders(replace(place, run="").location, settings)
    except (FlyballError, OSError):
        return set()
    return {other.run for other in found if other.job == place.job} - {place.run}


def _tier_folders(location: str, settings: EngineSettings) -> list[TierFolder]:
    if "://" in location:
        return find_in_store(open_storage(location, settings))
    return find_in_folder(Path(location))


def _storage_place(found: TierFolder, settings: EngineSettings) -> StoragePlace:
    if found.step is not None:
        step_folder = StepFolder(Path(found.root), *found.step)
        return StoragePlace(step_folder, tier=found.tier, job=found.job, run=found.run, host_id=found.host_id)
    storage = open_storage(found.location, settings)
    return StoragePlace(storage, tier=found.tier, job=found.job, run=found.run, host_id=found.host_id)


def _unique(places: Sequence[Place]) -> list[Place]:
    """Remove duplicates: all hosts name the same persistent folder, and --dir may name it again."""
    return list({(place.tier, place.where): place for place in places}.values())
