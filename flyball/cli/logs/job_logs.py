"""Find the logs of a job's ranks on this machine, while it runs and afterwards."""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flyball.cli.logs.console import LOG_NAME
from flyball.cli.reach import this_host
from flyball.cli.reach.places import state_root
from flyball.process_title import read_words
from host_daemon.store.state_dir import host_of

_DAEMON = ("host_daemon", "--state-dir", "--host-id")
_DATABASE = "daemon.sqlite"
_READ_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class RankLog:
    """One rank's log of one generation."""

    host_id: str
    generation: int
    rank: int
    path: Path


@dataclass(frozen=True)
class JobLogs:
    """The logs that one host on this machine has of one run of a job."""

    job: str
    host_id: str
    folder: Path  # has one folder per generation
    state_dir: Path  # of the host's daemon

    @property
    def written_at(self) -> float:
        """When any of its logs was last written."""
        return max((log.path.stat().st_mtime for log in self.logs()), default=self.folder.stat().st_mtime)

    def logs(self) -> list[RankLog]:
        """All logs, sorted by generation and rank."""
        found = []
        for path in self.folder.glob("g*/rank*.log"):
            if match := LOG_NAME.search(path.as_posix()):
                found.append(RankLog(self.host_id, int(match[1]), int(match[2]), path))
        return sorted(found, key=lambda log: (log.generation, log.rank))

    @property
    def may_continue(self) -> bool:
        """Whether a daemon runs here that has the job: nothing writes between two generations, and others follow."""
        own = self.state_dir.resolve()
        if not any(daemon.state_dir.resolve() == own for daemon in _daemons()):
            return False
        database = f"{(own / _DATABASE).as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(database, uri=True, timeout=_READ_TIMEOUT_S)) as rows:
                return bool(rows.execute("SELECT 1 FROM jobs WHERE job = ?", (self.job,)).fetchall())
        except sqlite3.Error:  # busy, or not readable: only what is written shows it then
            return False


def jobs_here(environ: Mapping[str, str], state_dir: str = "") -> list[JobLogs]:
    """All jobs with logs on this machine, newest last. With `state_dir`: only in that folder."""
    found = {
        logs.folder.resolve(): logs
        for host_id, folder in _hosts(environ, state_dir)
        for logs in _jobs_of(host_id, folder)
    }
    return sorted(found.values(), key=lambda logs: logs.written_at)


def jobs_of_daemons(job: str) -> list[JobLogs]:
    """The job's logs in non-default state folders, which can be found only while their daemons run."""
    found = (logs for daemon in _daemons() for logs in _jobs_of(daemon.host_id, daemon.state_dir) if logs.job == job)
    return sorted(found, key=lambda logs: logs.written_at)


def daemon_dir(host_id: str, supervisor_url: str) -> Path | None:
    """The state folder of the daemon running here for this host and supervisor, if this user may read it."""
    for daemon in _daemons():
        if daemon.host_id == host_id and supervisor_url in daemon.supervisors:
            return daemon.state_dir
    return None


def _hosts(environ: Mapping[str, str], state_dir: str) -> Iterable[tuple[str, Path]]:
    """(host_id, state folder) of every host that has a state folder here."""
    if state_dir:
        named = Path(state_dir)
        yield named.name, named
        yield this_host.host_id(), named / "host"
        return
    root = state_root(environ)
    yield from ((this_host.host_id(), folder) for folder in root.glob("jobs/*/host"))
    yield from ((host_of(folder) or folder.name, folder) for folder in root.glob("hosts/*"))


def _jobs_of(host_id: str, state_dir: Path) -> Iterable[JobLogs]:
    for folder in state_dir.glob("logs/*"):
        if any(folder.glob("g*/rank*.log")):
            yield JobLogs(folder.name, host_id, folder, state_dir)


@dataclass(frozen=True)
class _Daemon:
    host_id: str
    state_dir: Path
    supervisors: tuple[str, ...]


def _daemons() -> Iterable[_Daemon]:
    """The daemons running here whose state folder this user may read."""
    import psutil

    for pid in psutil.pids():
        try:
            words = read_words(pid)
        except OSError:
            continue
        if all(word in words for word in _DAEMON):
            options = dict(itertools.pairwise(words))
            folder = Path(options["--state-dir"])
            if os.access(folder, os.R_OK | os.X_OK):
                yield _Daemon(options["--host-id"], folder, tuple(options.get("--supervisor", "").split(",")))
