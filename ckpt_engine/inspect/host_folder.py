"""Reads a host's state folder without an engine: the last Configure of each job, and the names of its segments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from flyball.contracts import wire
from flyball.contracts.checkpoints import PeerTransport
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.on_host.engine_wire import ENGINE_PID_FILE, TRANSPORTS_FILE, Configure
from flyball.contracts.on_host.segments import parse_segment, shm_prefix

JOBS_FOLDER = "engine-jobs"
_MAX_DEPTH = 3  # of jobs/NAME/host below the root of all state folders


@dataclass(frozen=True, slots=True)
class HostFolder:
    """One host, as its state folder shows it."""

    path: Path
    prefix: str  # of its segments
    configures: dict[str, Configure] = field(default_factory=dict)  # by job
    unreadable: dict[str, str] = field(default_factory=dict)  # file -> reason
    segment_jobs: frozenset[str] = frozenset()
    transports: tuple[PeerTransport, ...] = ()  # of its newest engine

    @property
    def jobs(self) -> set[str]:
        return set(self.configures) | self.segment_jobs

    @property
    def changed_at(self) -> float:
        """The wall time at which a generation last began here."""
        try:
            return (self.path / JOBS_FOLDER).stat().st_mtime
        except OSError:
            return 0.0

    def run(self, job: str) -> str | None:
        """The run of the job's last Configure; None without one."""
        known = self.configures.get(job)
        return known.placement.run if known else None

    def host_id(self, job: str) -> str:
        """The host id in the last Configure; without one the folder's name."""
        known = self.configures.get(job) or next(iter(self.configures.values()), None)
        return known.host_id if known else self.path.name


def find_host_folders(root: Path, shm_dir: str) -> list[HostFolder]:
    """The host folders at or below `root`: of a host, of a run, of the demo, or the root of all."""
    patterns = [
        "/".join(["*"] * depth + [name]) for depth in range(_MAX_DEPTH + 1) for name in (JOBS_FOLDER, ENGINE_PID_FILE)
    ]
    found = {path.parent for pattern in patterns for path in root.glob(pattern)}
    return [read_host_folder(path, shm_dir) for path in sorted(found)]


def read_host_folder(path: Path, shm_dir: str) -> HostFolder:
    """Read an engine's files, without creating or locking anything."""
    prefix = shm_prefix(str(path.resolve()), shm_dir)
    configures: dict[str, Configure] = {}
    unreadable: dict[str, str] = {}
    for file in sorted((path / JOBS_FOLDER).glob("*.json")):
        try:
            configure = wire.decode(file.read_bytes(), Configure)
        except (OSError, InvalidMessage) as error:
            unreadable[str(file)] = getattr(error, "message", str(error))
        else:
            configures[configure.placement.job] = configure
    return HostFolder(path, prefix, configures, unreadable, frozenset(_segment_jobs(prefix)), _read_transports(path))


def _read_transports(path: Path) -> tuple[PeerTransport, ...]:
    """What carries shards to each peer; () if the engine wrote nothing that can be read."""
    try:
        return wire.decode((path / TRANSPORTS_FILE).read_bytes(), tuple[PeerTransport, ...])
    except (OSError, InvalidMessage):
        return ()


def _segment_jobs(prefix: str) -> set[str]:
    folder, name = os.path.split(prefix)
    found = (parse_segment(prefix, path.name) for path in Path(folder).glob(f"{name}.*"))
    return {segment.job for segment in found if segment is not None}
