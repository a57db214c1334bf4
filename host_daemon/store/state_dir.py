"""The host's state folder: its lock, and the paths of everything in it."""

from __future__ import annotations

import os
from pathlib import Path

from flyball.contracts.errors import ConfigurationError
from flyball.contracts.on_host.engine_wire import ENGINE_PID_FILE, ENGINE_SOCKET, HOST_STATE_VERSION, NOTIFY_SOCKET
from flyball.contracts.on_host.injected import INJECT_FOLDER
from flyball.state_folder import StateFolder, clear_errors, write_private

DATABASE_FILE = "daemon.sqlite"
PID_FILE = "daemon.pid"  # locked by the daemon while it runs


class HostStateDir:
    """Names the files of one host, and holds the lock that admits a single daemon."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._folder = StateFolder(self.root, version=HOST_STATE_VERSION, in_use=self._in_use)

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
        return self.root / "engine.log"

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
        base = Path(log_dir) if log_dir else self.root / "logs"
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
        link.symlink_to(Path(log_dir) / job)

    def store_log(self, log_dir: str, job: str, generation: int) -> Path:
        """Output of the process that hosts a generation's rendezvous store."""
        return self.rank_log(log_dir, job, generation, 0).with_name("store.log")

    def error_file(self, job: str, generation: int, rank: int) -> Path:
        """TORCHELASTIC_ERROR_FILE of one rank."""
        return self.root / "errors" / job / f"g{generation}-r{rank}.json"

    def open(self) -> None:
        """Create the folder (0700) or check its version, and lock it for this process.

        Raises StateVersionMismatch, StorageFull, or ConfigurationError if it cannot be used or has a daemon already.
        """
        self._folder.open(PID_FILE)
        self._folder.write_lock(PID_FILE, str(os.getpid()))

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
