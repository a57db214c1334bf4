"""What the daemon needs of its host: a disk and shared memory with some room, and an address of its own."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, MemoryTooSmall, StorageFull
from flyball.worker_user import WorkerUser
from host_daemon.settings import DaemonSettings
from host_daemon.store.state_dir import DATABASE_FILE

MIN_DISK_BYTES = 64 << 20
_USER_TIMEOUT_S = 60.0
MIN_SHM_BYTES = 16 << 20  # for beacons and control words only; the engine checks the slots of each job


def check_host(settings: DaemonSettings) -> None:
    """Raise the error that names what this host lacks. Call it once the state folder is open."""
    try:
        check_disk(settings.state_dir)
    except StorageFull as error:
        if not _has_workers(settings.state_dir / DATABASE_FILE):
            raise
        sys.stderr.write(f"warning: {error.message} It starts all the same: it may have to stop workers.\n")
    check_shm(Path(settings.shm_dir))
    _check_address(settings.address)
    if settings.worker_user is not None:
        _check_worker_user(settings.worker_user, (settings.state_dir, Path(settings.shm_dir)))


def _check_worker_user(user: WorkerUser, folders: Sequence[Path]) -> None:
    """Raise ConfigurationError if workers could not start, or not reach these folders."""
    import subprocess  # not for each start

    code = "import os, sys, flyball; sys.exit(' '.join(p for p in sys.argv[1:] if not os.access(p, os.X_OK)))"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *map(str, folders)],
            env=user.environment(),
            user=user.uid,
            group=user.gid,
            extra_groups=user.groups,
            capture_output=True,
            text=True,
            timeout=_USER_TIMEOUT_S,
            check=False,
        )
        why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        why = [str(error)]
    if why:
        raise ConfigurationError(
            f"Workers of user {user.name} could not run here: {why[0]}.",
            hint="install Python and Flyball where all may read them, and choose a --state-dir that they can go "
            "through to: not below /root",
        )


def _has_workers(database: Path) -> bool:
    """Whether an earlier daemon left workers."""
    import sqlite3  # not for each start

    try:
        connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
        try:
            return connection.execute("SELECT 1 FROM workers WHERE ended = 0 LIMIT 1").fetchone() is not None
        finally:
            connection.close()
    except sqlite3.Error:  # there is none, or the daemon could not open it either
        return False


def check_disk(state_dir: Path) -> None:
    """Raise StorageFull if the disk of this folder has no room for the daemon."""
    free = shutil.disk_usage(state_dir).free
    if free < MIN_DISK_BYTES:
        raise StorageFull(
            f"The disk of {state_dir} has {free >> 20} MiB left; the daemon needs {MIN_DISK_BYTES >> 20}.",
            hint="free space there, or choose another --state-dir",
        )


def check_shm(shm_dir: Path) -> None:
    """Raise ConfigurationError if no slots can be made here, MemoryTooSmall if not even the daemon's segments fit."""
    if not shm_dir.is_dir() or not os.access(shm_dir, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{shm_dir} is not a folder that this user can write to.",
            hint="mount a tmpfs there, or set FLYBALL_SHM_DIR",
        )
    free = shutil.disk_usage(shm_dir).free
    if free < MIN_SHM_BYTES:
        raise MemoryTooSmall(
            f"{shm_dir} has {free >> 20} MiB left. Beacons and control words need {MIN_SHM_BYTES >> 20}, and every "
            "rank also needs twice the size of its state.",
            hint="enlarge it (docker: --shm-size; else mount -o remount,size=...), or set FLYBALL_SHM_DIR",
        )


def _check_address(address: str) -> None:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
    except socket.gaierror:
        raise ConfigurationError(
            f"--address {address} is not an IP address.", hint="give the address at which other hosts reach this one"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(target)
        except OSError as error:
            why = "is not an address of this host" if error.errno == errno.EADDRNOTAVAIL else f"cannot be used: {error}"
            raise ConfigurationError(f"--address {address} {why}.", hint="`ip addr` shows the addresses") from error
