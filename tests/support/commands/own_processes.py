"""Processes that belong to a folder: named on their command line, or writing their output into it, or working in it."""

from __future__ import annotations

from pathlib import Path

import psutil


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
