"""Finds the processes that a worker has started, however far they have moved away from it: into sessions of their own,
or to another parent after theirs has ended."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from flyball.contracts.on_host import worker_env
from flyball.process_title import PREFIX
from host_daemon.kernel.processes import ProcessStat, read_stat

_INIT = 1


class WorkerOrigin(msgspec.Struct, frozen=True):
    """A worker, which may have ended. Its pid is the id of its session."""

    pid: int
    start_ticks: int
    job: str
    rank: int
    generation: int

    @property
    def mark(self) -> bytes:
        """What the environment of each process has that was started from it by exec."""
        return f"{worker_env.WORKER}={self.pid}.{self.start_ticks}".encode()

    @property
    def title(self) -> bytes:
        """How the command line of each process begins that was forked from it alone."""
        return f"{PREFIX}{self.job} rank {self.rank} gen {self.generation}: ".encode()


def kin_of(origins: Iterable[WorkerOrigin], known: Mapping[int, int]) -> dict[int, int]:
    """The live processes of these workers: pid -> start ticks. `known`: what was found before, which may have lost the
    parent that it was found by."""
    stats = _processes()
    children = defaultdict(list)
    for pid, stat in stats.items():
        children[stat.parent].append(pid)
    found = {pid for pid, start_ticks in known.items() if pid in stats and stats[pid].start_ticks == start_ticks}
    for origin in origins:
        found |= _of(origin, stats)
    reached = list(found)
    while reached:
        fresh = [child for child in children[reached.pop()] if child not in found]
        found.update(fresh)
        reached += fresh
    return {pid: stats[pid].start_ticks for pid in found - {os.getpid(), _INIT} if stats[pid].state not in "ZX"}


def _processes() -> dict[int, ProcessStat]:
    numbers = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())
    return {pid: stat for pid in numbers if (stat := read_stat(pid)) is not None}


def _of(origin: WorkerOrigin, stats: Mapping[int, ProcessStat]) -> set[int]:
    """The worker, its session, and orphans of it: those have the daemon as their parent, which is their subreaper, or
    init if it was started anew since."""
    leader = stats.get(origin.pid)
    if leader is not None and leader.start_ticks != origin.start_ticks:
        return set()  # the id of an ended session now belongs to a new process, which is none of ours
    found = {origin.pid} if leader is not None else set()
    for pid, stat in stats.items():
        is_orphan = stat.parent in (os.getpid(), _INIT) and stat.start_ticks >= origin.start_ticks
        if stat.session == origin.pid or (is_orphan and _comes_from(origin, pid, stat.parent)):
            found.add(pid)
    return found


def _comes_from(origin: WorkerOrigin, pid: int, parent: int) -> bool:
    if origin.mark in _words(pid, "environ"):
        return True
    if parent == _INIT:  # it may be another daemon's, which runs a job of this name
        return False
    return b"\0".join(_words(pid, "cmdline")).startswith(origin.title)


def _words(pid: int, name: str) -> Collection[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return ()
