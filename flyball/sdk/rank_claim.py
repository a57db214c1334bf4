"""Finds out whether this process is its rank, or was started by the process that is.

A rank's processes inherit its environment: workers of a DataLoader, subprocesses, whatever a launcher starts. One of
them is the rank:

- Whoever attaches leaves its mark in its environment (`worker_env.ATTACHED`). What it starts has that mark, and another
  one of its own: a child, for as long as it lives. A program that takes the process's place (exec) has the same mark.
- What has no such mark (a launcher's child, one that was started before the rank attached) is the rank. If a living
  process has claimed it before, in the rank's beacon, two that nobody can tell apart act as one rank: that is said.

A mark is a pid with the time at which that process began: neither changes by exec, and no two processes share both.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from flyball.contracts.errors import UsageError
from flyball.contracts.on_host import worker_env
from flyball.sdk.beacon import CLAIM_WORDS, SAID_WORD
from flyball.sdk.worker_identity import WorkerIdentity

_WORD_BYTES = 8
_ENDED = ("Z", "X")  # and not reaped yet


def own_mark() -> str:
    """The mark of this process."""
    return _mark(os.getpid(), _start_ticks(os.getpid()))


def claim_rank(identity: WorkerIdentity, environment: MutableMapping[str, str]) -> int:
    """Make this process the rank, for itself and what it starts from now on. Returns 0; or, if the process that is or
    was the rank has started this one, its pid.

    Raises UsageError in the process that the daemon started if one that it started itself has attached before it.
    """
    name = _name(identity)
    if not name:
        return 0
    mark, _, of = environment.get(worker_env.ATTACHED, "").partition(" ")
    if of == name and mark != own_mark():
        return _pid_of(mark)
    holder = _claim(identity.beacon) if identity.beacon else 0
    if holder and environment.get(worker_env.WORKER) == own_mark():
        raise UsageError(
            f"Process {holder}, which this one has started, has attached as rank {identity.rank} before it.",
            hint="call flyball.attach() before you start processes, or not in them",
        )
    if holder:
        sys.stderr.write(
            f"flyball: processes {holder} and {os.getpid()} have both attached as rank {identity.rank}, and neither "
            f"started the other. If both save, each replaces what the other saved: attach in one of them only.\n"
        )
    environment[worker_env.ATTACHED] = f"{own_mark()} {name}"
    return 0


def is_first_child(beacon: str) -> bool:
    """Whether no child of this rank has said yet that it is one. Without a beacon, always."""
    try:
        with _Locked(beacon) as words:
            is_first = words.read(SAID_WORD) == 0
            words.write(SAID_WORD, 1)
            return is_first
    except OSError:
        return True


def _claim(beacon: str) -> int:
    """Claim the rank of a beacon. Returns 0, or the pid of another living process that has. Raises OSError."""
    pid_word, start_word = CLAIM_WORDS
    with _Locked(beacon) as words:
        pid, start_ticks = words.read(pid_word), words.read(start_word)
        if pid and pid != os.getpid() and start_ticks and start_ticks == _start_ticks(pid):
            return pid
        words.write(pid_word, os.getpid())
        words.write(start_word, _start_ticks(os.getpid()))
        return 0


class _Locked:
    """The words of a beacon file, for one process at a time."""

    def __init__(self, beacon: str) -> None:
        self._descriptor = os.open(beacon, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def __enter__(self) -> _Locked:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, word: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, _WORD_BYTES, word * _WORD_BYTES), "little", signed=True)

    def write(self, word: int, value: int) -> None:
        os.pwrite(self._descriptor, value.to_bytes(_WORD_BYTES, "little", signed=True), word * _WORD_BYTES)


def _name(identity: WorkerIdentity) -> str:
    """Of this rank in this generation; '' without a supervisor."""
    if identity.beacon or not identity.shm_prefix:
        return identity.beacon
    return f"{identity.shm_prefix}.{identity.job}.{identity.rank}.{identity.generation}"


def _mark(pid: int, start_ticks: int) -> str:
    return f"{pid}.{start_ticks}"


def _pid_of(mark: str) -> int:
    pid = mark.partition(".")[0]
    return int(pid) if pid.isascii() and pid.isdigit() else -1


def _start_ticks(pid: int) -> int:
    """When the process began, in the kernel's clock; 0 if it has ended, or cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in _ENDED else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0
