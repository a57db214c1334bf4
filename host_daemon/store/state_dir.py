"""The host's state folder: its version, its lock, and where everything in it is."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, StateVersionMismatch, StorageFull
from flyball.contracts.on_host.engine_wire import ENGINE_PID_FILE, ENGINE_SOCKET, HOST_STATE_VERSION, NOTIFY_SOCKET


class HostStateDir:
    """Names the files of one host, and holds the lock that makes its daemon the only one."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock_descriptor = -1

    @property
    def database(self) -> Path:
        return self.root / "daemon.sqlite"

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
    def engine_log(self) -> Path:
        return self.root / "engine.log"

    def keep_peer_key(self, key: str) -> Path:
        """Write down, for the engine alone, the key that the engines of the cluster share."""
        path = self.root / "engine.token"
        with clear_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{key}\n")
        return path

    @property
    def spawner_log(self) -> Path:
        return self.root / "spawner.log"

    @property
    def preemption_notice(self) -> Path:
        return self.root / "preemption-notice.json"

    def rank_log(self, log_dir: str, job: str, generation: int, rank: int) -> Path:
        """stdout and stderr of one rank; `log_dir` is the job's own choice, '' for this folder."""
        base = Path(log_dir) if log_dir else self.root / "logs"
        return base / job / f"g{generation}" / f"rank{rank}.log"

    def job_logs(self, job: str) -> Path:
        """The folder of a job's logs, or a link to it."""
        return self.root / "logs" / job

    def point_to_logs(self, log_dir: str, job: str) -> None:
        """Have the job's logs be found from this folder too, where it chose a folder of its own for them."""
        link = self.job_logs(job)
        if not log_dir or (link.exists() and not link.is_symlink()):
            return
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(log_dir) / job)

    def store_log(self, log_dir: str, job: str, generation: int) -> Path:
        """What the process that hosts a generation's rendezvous store printed."""
        return self.rank_log(log_dir, job, generation, 0).with_name("store.log")

    def error_file(self, job: str, generation: int, rank: int) -> Path:
        """TORCHELASTIC_ERROR_FILE of one rank."""
        return self.root / "errors" / job / f"g{generation}-r{rank}.json"

    def open(self) -> None:
        """Create the folder (0700) or check its version, and lock it for this process.

        Raises StateVersionMismatch, StorageFull, or ConfigurationError if it cannot be used or has a daemon already.
        """
        with clear_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock()
            self._check_version()

    def close(self) -> None:
        """Let go of the lock; the files stay."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _lock(self) -> None:
        descriptor = os.open(self.root / "daemon.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise ConfigurationError(
                f"A host daemon (pid {holder or 'unknown'}) already uses {self.root}.",
                hint="stop it, or give this one another folder with --state-dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock_descriptor = descriptor

    def _check_version(self) -> None:
        path = self.root / "VERSION"
        try:
            found = path.read_text().strip()
        except FileNotFoundError:
            temporary = path.with_name(f".VERSION.{os.getpid()}")
            with temporary.open("w") as file:
                file.write(f"{HOST_STATE_VERSION}\n")
                file.flush()
                os.fsync(file.fileno())  # an empty one would lock the folder's owner out after a power cut
            temporary.rename(path)
            return
        if found != HOST_STATE_VERSION:
            raise StateVersionMismatch(
                f"The state folder {self.root} has version {found!r}; this release of Flyball uses "
                f"{HOST_STATE_VERSION!r}.",
                hint="run the release that wrote it, or choose another folder with --state-dir; nothing was changed",
            )


def end_file(error_file: Path) -> Path:
    """There if the rank with this error file ended well."""
    return error_file.with_suffix(".ended")


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says into errors that name the path and the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"There is no room for {path}.", hint="free space on that disk") from error
        raise ConfigurationError(
            f"Cannot use {path}: {error.strerror}.", hint="choose a folder that you may write to"
        ) from error
