"""A step of a batch system. To end it, its step daemon signals every process of the step, not only the command that
its user started.

So one process obeys SIGTERM: that command. What it started waits for its order, and saves meanwhile. Who obeys whom is
in the environment, `OBEYS`: the pid whose SIGTERM counts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

OBEYS: Final = "FLYBALL_OBEYS"
_JOB_IDS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_WARNINGS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_ENDS_AT: Final = "SLURM_JOB_END_TIME"  # seconds since 1970
DEFAULT_NOTICE_S: Final = 30.0  # Slurm's KillWait: from SIGTERM to SIGKILL
_LONGEST_NOTICE_S: Final = 600.0  # with more time left, the job was cancelled, not warned


def is_batch_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is part of a batch job."""
    return any(environ.get(name) for name in _JOB_IDS)


def notice_s(environ: Mapping[str, str], now: float) -> float:
    """The time from the first SIGTERM, at `now` (wall clock), to SIGKILL. Slurm says when the job ends: a warning that
    was asked for (`--signal=TERM@60`) comes before that, and its KillWait after it."""
    try:
        left_s = float(environ.get(_ENDS_AT, "")) - now
    except ValueError:
        return DEFAULT_NOTICE_S
    return left_s + DEFAULT_NOTICE_S if 0.0 < left_s <= _LONGEST_NOTICE_S else DEFAULT_NOTICE_S


def lead_step(environ: MutableMapping[str, str]) -> None:
    """Have what this process starts from now on obey nobody else's SIGTERM."""
    environ[OBEYS] = str(os.getpid())


def leader_of(environ: Mapping[str, str]) -> int:
    """The pid whose SIGTERM this process obeys; 0: anybody's."""
    given = environ.get(OBEYS, "")
    return int(given) if given.isdecimal() else 0


def ignore_warnings() -> None:
    """Ignore what a batch system warns a step with (`--signal=USR1@60`), and so do processes that are started from now
    on: without a handler it ends them."""
    for number in _WARNINGS:
        signal.signal(number, signal.SIG_IGN)


def block_term() -> None:
    """SIGTERM waits until somebody takes it; warnings are ignored. Call it before any thread starts: threads inherit
    it."""
    ignore_warnings()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def take_term(
    is_leader: Callable[[int], bool], obey: Callable[[], object], see: Callable[[], object] = lambda: None
) -> None:
    """Call `obey`, in a thread, for each SIGTERM of a process that is the leader. For all others, also those from
    outside of this pid namespace, whose pid is 0, call `see`. Needs `block_term`."""

    def take() -> None:
        while True:
            (obey if is_leader(signal.sigwaitinfo({signal.SIGTERM}).si_pid) else see)()

    threading.Thread(target=take, name="take-sigterm", daemon=True).start()


def ignore_term(environ: Mapping[str, str]) -> None:
    """In a batch step, have this process and the programs that it becomes ignore SIGTERM, unless they take it."""
    if leader_of(environ):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_own_children(is_own: Callable[[int], bool]) -> None:
    """Have `os.kill` end a child that inherited to ignore SIGTERM by SIGKILL: `Pool.terminate` and `Popen.terminate`
    would wait for ever. `is_own(pid)`: it is a child of this process, and ignores SIGTERM."""
    send = os.kill

    def kill(pid: int, number: int, /) -> None:
        send(pid, signal.SIGKILL if number == signal.SIGTERM and pid > 0 and is_own(pid) else number)

    os.kill = kill
