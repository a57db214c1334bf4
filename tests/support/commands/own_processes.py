"""Processes that are a test's own: what marks them is a folder (named on their command line, written to, worked in) or
an entry of their environment. They are found by that mark, and ended by their ids."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from support.clocks.waits import until

from simulator.inject.processes import own_processes


def is_of(process: psutil.Process, folder: Path) -> bool:
    """False for one that has ended, or belongs to another user."""
    proc = Path(f"/proc/{process.pid}")
    try:
        if str(folder).encode() in (proc / "cmdline").read_bytes():
            return True
        return any((proc / link).readlink().is_relative_to(folder) for link in ("fd/1", "cwd"))
    except OSError:
        return False


def processes_of(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_of(process, folder)]


def processes_with(entry: str) -> list[psutil.Process]:
    """Live processes of this user that have this entry, "NAME=value", in their environment."""
    found = []
    for process in own_processes():
        with suppress(OSError, psutil.NoSuchProcess):
            if entry.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(process.pid))
    return found


def kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill what `find` finds, and what that has started meanwhile, until it finds nothing."""

    def none_is_left() -> bool:
        found = find()
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return not found

    until(none_is_left, "the end of the processes of this test")


def is_running(pid: int) -> bool:
    """False if it has ended and only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command_of(pid: int) -> str:
    """Its command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
