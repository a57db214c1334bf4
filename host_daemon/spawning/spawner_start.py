"""Starts a spawner process. Light to import: the daemon starts the spawner first, and imports its own modules while
torch is imported."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flyball.worker_user import WorkerUser
from host_daemon.kernel.processes import launch
from host_daemon.spawning.spawn_wire import interpreter_of


class StartedSpawner(NamedTuple):
    """A spawner that is importing torch. It ends when `control` is closed."""

    pid: int
    control: socket.socket
    environment: Mapping[str, str]


def start_spawner(
    *, environment: Mapping[str, str], log_path: Path, state_dir: Path, user: WorkerUser | None = None
) -> StartedSpawner:
    """Launch it, as the user that its workers will be. Raises OSError."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            pid = launch(
                interpreter_of("host_daemon.spawning.spawner", "--state-dir", str(state_dir)),
                environment=environment,
                log_path=log_path,
                descriptor=theirs.fileno(),
                user=user,
            )
        undo.pop_all()
    return StartedSpawner(pid, ours, environment)
