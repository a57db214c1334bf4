"""A host's state folder, processes and shared memory on this machine. Nothing else is touched."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import msgspec

from flyball.contracts.errors import ConfigurationError, NotFound, StateVersionMismatch
from flyball.contracts.on_host.engine_wire import HOST_STATE_VERSION
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, shm_prefix
from simulator.inject.processes import LiveProcess, environment_of, look_at, own_processes

PREEMPTION_NOTICE = "preemption-notice.json"  # watched by the daemon
CONDITIONS_FOLDER = "conditions"  # likewise
_DAEMON = "host_daemon"
_ENGINE = "ckpt_engine.host.server"
_MODULES = frozenset({_DAEMON, "host_daemon.spawning.spawner", _ENGINE})


class RecordedWorker(msgspec.Struct, frozen=True):
    """A process that the daemon recorded at its start. Rank -1 is a generation's store."""

    job: str
    generation: int
    rank: int
    pid: int
    start_ticks: int


class HostFiles:
    """One host's state folder. Raises NotFound if it is not one, or belongs to another user."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir.resolve()
        try:
            version = (self.root / "VERSION").read_text().strip()
            is_own = self.root.stat().st_uid == os.geteuid()
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from error
        if not (self.root / "daemon.sqlite").is_file():
            raise self._refusal("it has no daemon.sqlite")
        if not is_own:
            raise self._refusal("it belongs to another user")
        if version != HOST_STATE_VERSION:
            raise StateVersionMismatch(
                f"The state folder {self.root} has version {version!r}; this release uses {HOST_STATE_VERSION!r}.",
                hint="inject faults with the release that runs the host",
            )

    def _refusal(self, why: str) -> NotFound:
        return NotFound(
            f"{self.root} is not the state folder of a host daemon ({why}): nothing was done.",
            hint="give the folder that the daemon got as --state-dir",
        )

    def workers(self) -> list[RecordedWorker]:
        """Workers that had not ended when the daemon last looked, newest generation first."""
        uri = f"{(self.root / 'daemon.sqlite').as_uri()}?mode=ro"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=5.0)
            try:
                rows = connection.execute(
                    "SELECT job, generation, rank, pid, start_ticks FROM workers WHERE ended = 0"
                    " ORDER BY generation DESC, rank"
                ).fetchall()
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"The workers of {self.root} cannot be read: {error}.", hint="see that its host daemon runs"
            ) from error
        return [RecordedWorker(*row) for row in rows]

    def process_of(self, worker: RecordedWorker) -> LiveProcess | None:
        """The worker's process if it runs. Checks its start time, and that it leads its session as all workers do."""
        process = look_at(worker.pid)
        if process is None or process.start_ticks != worker.start_ticks or process.session != worker.pid:
            return None
        return process

    def processes(self) -> list[LiveProcess]:
        """All running processes: the daemon, then engine, spawners, workers and the processes that workers started."""
        sessions = self._sessions()
        found = [p for p in own_processes() if p.pid != os.getpid() and (p.session in sessions or self._serves(p))]
        return sorted(found, key=lambda p: (_DAEMON not in p.argv, p.session in sessions, p.pid))

    def worker_processes(self) -> list[LiveProcess]:
        """Running workers, and the processes that they started."""
        sessions = self._sessions()
        return [p for p in own_processes() if p.session in sessions]

    def _sessions(self) -> set[int]:
        return {w.pid for w in self.workers() if self.process_of(w) is not None}

    def daemon(self) -> LiveProcess | None:
        return next((p for p in self.processes() if _DAEMON in p.argv), None)

    def engine(self) -> LiveProcess | None:
        """The checkpoint engine. Not by the pid in its file, which outlives it."""
        return next((p for p in self.processes() if _ENGINE in p.argv and self._serves(p)), None)

    def segment_prefix(self) -> Path:
        """The path prefix of all shared memory of this host.

        Call it while the daemon lives: its environment names the folder. Without a daemon this process's own
        environment is used.
        """
        daemon = self.daemon()
        environment = environment_of(daemon) if daemon else dict(os.environ)
        return Path(shm_prefix(str(self.root), environment.get(SHM_DIR_VARIABLE, DEFAULT_SHM_DIR)))

    def remove(self) -> None:
        """Remove the state folder. Raises ConfigurationError if part of it cannot be removed."""
        try:
            shutil.rmtree(self.root)
        except OSError as error:
            raise ConfigurationError(
                f"The state folder {self.root} could not be removed: {error.strerror}.",
                hint="remove what is left of it",
            ) from error

    def _serves(self, process: LiveProcess) -> bool:
        """Whether a process is a daemon, spawner or engine with this state folder."""
        return not _MODULES.isdisjoint(process.argv) and state_dir_of(process) == self.root


def segments(prefix: Path) -> list[Path]:
    """The shared-memory files with this prefix."""
    try:
        entries = list(os.scandir(prefix.parent))
    except FileNotFoundError:
        return []
    own = (e.name for e in entries if e.name.startswith(f"{prefix.name}.") and e.is_file(follow_symlinks=False))
    return [prefix.parent / name for name in sorted(own)]


def host_id_of(process: LiveProcess) -> str:
    """A process's --host-id; '' if it has none."""
    return _given(process, "--host-id")


def _given(process: LiveProcess, option: str) -> str:
    given = ""
    for argument, following in zip(process.argv, [*process.argv[1:], ""], strict=True):
        if argument == option:
            given = following
        elif argument.startswith(f"{option}="):
            given = argument.partition("=")[2]
    return given


def state_dir_of(process: LiveProcess) -> Path | None:
    """A process's --state-dir; None if it has none, or has ended."""
    given = _given(process, "--state-dir")
    if not given:
        return None
    try:
        return (Path(f"/proc/{process.pid}/cwd").readlink() / given).resolve()
    except OSError:
        return None


def is_daemon(process: LiveProcess) -> bool:
    return _DAEMON in process.argv
