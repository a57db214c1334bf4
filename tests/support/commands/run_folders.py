"""A folder for the state and the shared memory of `flyball` commands, and the environment that points them there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.commands.own_processes import processes_of

NOT_OURS = ("FLYBALL_", "PET_", "TORCHELASTIC_", "OMP_", "PYTEST_")  # frameworks look whether pytest runs them


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets. Afterwards no process of it may be left; what a failed test leaves
    is killed."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        folder = Path(name)
        (folder / "shm").mkdir()
        try:
            yield folder
        finally:
            left = processes_of(folder)
            for process in left:
                process.kill()
        assert left == []


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of the tests without what belongs to another run, and with `more`."""
    return {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)} | more


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    """As `clean_environment`, with the state and the shared memory in this folder."""
    return clean_environment(FLYBALL_STATE_DIR=str(folder / "s"), FLYBALL_SHM_DIR=str(folder / "shm")) | more
