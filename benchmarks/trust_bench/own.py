"""Processes of the benchmark: they carry a mark in their environment, by which they are found and ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from simulator.inject.processes import LiveProcess, environment_of, own_processes

LAUNCHERS = ("FLYBALL_", "PET_", "TORCHELASTIC_")  # what a launcher sets for its workers
END_DEADLINE_S = 60.0


def clean_environment() -> dict[str, str]:
    """This process's environment, without what a launcher around it has set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}


def marked(name: str, value: str) -> list[LiveProcess]:
    """Live processes that have this variable with this value."""
    return [p for p in own_processes() if environment_of(p).get(name) == value]


def end_marked(name: str, value: str) -> None:
    """Kill them by their pids, and those that they start meanwhile."""
    deadline_s = time.monotonic() + END_DEADLINE_S
    while (left := marked(name, value)) and time.monotonic() < deadline_s:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)  # until the kernel has ended them


def newest_lines(files: list[Path], characters: int = 1500) -> str:
    """The end of each of these logs, for the message of an error: the logs are removed with everything else."""
    ends = [(file.name, file.read_text(errors="replace").strip()[-characters:]) for file in sorted(files)]
    return "\n".join(f"--- {name}\n{end}" for name, end in ends if end)
