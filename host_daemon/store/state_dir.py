"""The host's state folder: its lock, and the paths of everything in it."""

from __future__ import annotations

import os
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, FlyballError
from flyball.contracts.on_host.engine_wire import (
    DAEMON_PID_FILE,
    ENGINE_LOG,
    ENGINE_PID_FILE,
    ENGINE_SOCKET,
    HOST_STATE_VERSION,
    NOTIFY_SOCKET,
)
from flyball.contracts.on_host.injected import INJECT_FOLDER
from flyball.contracts.on_host.os_text import from_text
from flyball.state_folder import StateFolder, clear_errors, create_once, write_private
from flyball.worker_files import read_worker_file
from flyball.worker_user import WorkerUser

DATABASE_FILE = "daemon.sqlite"
HOST_FILE = "host-id"  # whose folder it is
MAX_HOST_BYTES = 256
_PASSABLE = 0o711  # for whoever knows the names below


def host_of(state_dir: Path) -> str:
    """The host with this state folder, '' if that is not known: a daemon of 0.1.0 does not say so."""
    try:
        return read_worker_file(str(state_dir / HOST_FILE), MAX_HOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


class HostStateDir:
    """Names the files of one host, and holds the lock that admits a single daemon."""

    def __init__(self, root: Path, user: WorkerUser | None = None) -> None:
        """`user`: whose the workers are, None: this process's."""
        self.root = root.resolve()
        self._user = user
        self._folder = StateFolder(self.root, version=HOST_STATE_VERSION, in_use=self._in_use)

    @property
    def has_worker_user(self) -> bool:
        return self._user is not None

    @property
    def database(self) -> Path:
        return self.root / DATABASE_FILE

    @property
    def engine_socket(self) -> Path:
        return self.root / ENGINE_SOCKET

    @property
    def engine_notify(self) -> Path:
        return self.root / NOTIFY_SOCKET

    @property
    def engine_pid(self) -> Path:
        return self.root / ENGINE_PID_FILE

    @property
    def inject_folder(self) -> Path:
        return self.root / INJECT_FOLDER

    @property
    def engine_log(self) -> Path:
        return self.root / ENGINE_LOG

    def keep_peer_key(self, key: str) -> Path:
        """Write the key that the cluster's engines share, for this host's engine alone."""
        path = self.root / "engine.token"
        with clear_errors(path):
            write_private(path, f"{key}\n".encode(), durable=False)  # rewritten at each start of the engine
        return path

    @property
    def spawner_log(self) -> Path:
        return self.root / "spawner.log"

    @property
    def preemption_notice(self) -> Path:
        return self.root / "preemption-notice.json"

    def rank_log(self, log_dir: str, job: str, generation: int, rank: int) -> Path:
        """stdout and stderr of one rank. `log_dir` is the job's own folder for logs, '' for this one."""
        base = Path(from_text(log_dir)) if log_dir else self.root / "logs"
        return base / job / f"g{generation}" / f"rank{rank}.log"

    def job_logs(self, job: str) -> Path:
        """The folder of a job's logs, or a link to it."""
        return self.root / "logs" / job

    def point_to_logs(self, log_dir: str, job: str) -> None:
        """Make a job's logs reachable from this folder even if it chose its own folder for them."""
        link = self.job_logs(job)
        if not log_dir or (link.exists() and not link.is_symlink()):
            return
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(from_text(log_dir)) / job)

    def store_log(self, log_dir: str, job: str, generation: int) -> Path:
        """Output of the process that hosts a generation's rendezvous store."""
        return self.rank_log(log_dir, job, generation, 0).with_name("store.log")

    def error_file(self, job: str, generation: int, rank: int) -> Path:
        """TORCHELASTIC_ERROR_FILE of one rank."""
        return self.root / "errors" / job / f"g{generation}-r{rank}.json"

    def make_rank_folders(self, log_dir: str, job: str, generation: int) -> None:
        """The folders of the logs and error files of a generation's ranks. Workers of another user own what they write
        into, and can go through what is above it. Raises OSError."""
        logs = self.rank_log(log_dir, job, generation, 0).parent
        errors = self.error_file(job, generation, 0).parent
        user = self._user
        if user is None:
            logs.mkdir(parents=True, exist_ok=True)
            errors.mkdir(parents=True, exist_ok=True)
            return
        if log_dir:
            with user.acting():  # it may be anywhere
                logs.mkdir(parents=True, exist_ok=True)
        for folder in (errors,) if log_dir else (logs, errors):
            folder.mkdir(parents=True, exist_ok=True)
            for parent in folder.parents:
                if parent == self.root:
                    break
                parent.chmod(_PASSABLE)
            user.give(folder, 0o700)

    def open(self, host_id: str) -> None:
        """Create the folder (0700) or check its version and its host, and lock it for this process. For workers of
        another user it can be gone through, and nothing else in it can.

        Raises StateVersionMismatch, StorageFull, or ConfigurationError if it cannot be used, has a daemon already, or
        is another host's: its workers would be taken for strays, and ended.
        """
        self._folder.open(DAEMON_PID_FILE)
        self._folder.write_lock(DAEMON_PID_FILE, str(os.getpid()))
        self._check_host(host_id)
        if self._user is not None:
            os.umask(0o077)
            with clear_errors(self.root):
                for entry in self.root.iterdir():  # of an earlier daemon
                    if not entry.is_symlink():
                        entry.chmod(entry.stat().st_mode & 0o700)
                self.root.chmod(_PASSABLE)

    def _check_host(self, host_id: str) -> None:
        path = self.root / HOST_FILE
        try:
            with clear_errors(path):
                if not path.exists():
                    create_once(path, f"{host_id}\n".encode())
            mine = host_of(self.root)
            if mine != host_id:
                raise ConfigurationError(
                    f"{self.root} is the state folder of host {mine}, not of {host_id}.",
                    hint=f"give {host_id} a folder of its own with --state-dir, or name this host --host-id {mine}",
                )
        except FlyballError:
            self._folder.close()
            raise

    def close(self) -> None:
        """Release the lock; the files stay."""
        self._folder.close()

    def _in_use(self, _lock: str, pid: str) -> ConfigurationError:
        return ConfigurationError(
            f"A host daemon (pid {pid}) already uses {self.root}.",
            hint="stop it, or choose another folder with --state-dir",
        )


def end_file(error_file: Path) -> Path:
    """The file that exists if the rank with this error file ended well."""
    return error_file.with_suffix(".ended")
