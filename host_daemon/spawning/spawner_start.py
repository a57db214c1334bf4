"""Starts a spawner process. Light to import: the daemon starts the spawner first, and imports its own modules while
torch is imported."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flyball.process_title import TITLE_ROOM
from host_daemon.kernel.processes import launch


class StartedSpawner(NamedTuple):
    """A spawner that is importing torch. It ends when `control` is closed."""

    pid: int
    control: socket.socket
    environment: Mapping[str, str]


def start_spawner(*, environment: Mapping[str, str], log_path: Path, state_dir: Path) -> StartedSpawner:
    """Launch it. Raises OSError."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            pid = launch(
                [sys.executable, "-P", "-m", "host_daemon.spawning.spawner", "--state-dir", str(state_dir), TITLE_ROOM],
                environment=environment,
                log_path=log_path,
                descriptor=theirs.fileno(),
            )
        undo.pop_all()
    return StartedSpawner(pid, ours, environment)
